"""A run from the order to its end, in the control process.

order -> checks -> run record -> ports, proxy, launcher -> pipeline walks its stages -> all closed in reverse
"""

import asyncio
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnmill import assets
from turnmill.alerts import Dispatcher
from turnmill.backends.embedded import ProcessLauncher
from turnmill.budget import Meter
from turnmill.config import ENVIRONMENT_PARAMETERS, Config, Resolved, base_model_of, from_dict, load_config, to_dict
from turnmill.config.deployment import load_judges
from turnmill.config.values import suggest
from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.conversation.serving import reserved_port
from turnmill.conversation.sessions import Sessions
from turnmill.environment import opening_messages
from turnmill.environment.judges import check_secrets, settings_variable
from turnmill.environment.registry import EnvironmentKind, find, load_built_in
from turnmill.errors import Cancelled, ConfigError, Conflict, DataError, InvalidInput, TurnmillError
from turnmill.evaluation import BackgroundEvaluations
from turnmill.intake.claims import claim, content_id, digest_of_weights
from turnmill.intake.dataset import read_tasks, validate
from turnmill.intake.reports import RefusedData
from turnmill.pipeline.background import Background
from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.stage import StageContext
from turnmill.ports import RecordStore, RunPorts
from turnmill.records import Run, RunKind, RunStatus, Task
from turnmill.wiring import variables
from turnmill.wiring.backend import backend_of
from turnmill.wiring.boxes import check_box
from turnmill.wiring.reading.costs import admission
from turnmill.wiring.reading.runs import as_seen, began
from turnmill.wiring.running.cancelling import cancellable
from turnmill.wiring.running.measuring import play
from turnmill.wiring.running.quarantine import is_sidecars, quarantine
from turnmill.wiring.running.redriving import give_up_redriven
from turnmill.wiring.running.walking import walk_monitored

_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a user asked for: a kind of run on data, with resolved parameters."""

    kind: RunKind
    resolved: Resolved
    data: Path | None
    eval_data: Path | None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which run it is that begins, and what made it."""

    run_id: str
    cause: str
    retry_of: str | None = None


def new_run_id(now: float | None = None) -> str:
    """UTC time and a random suffix; opaque to everything else."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"


def check_order(root: Path, order: Order) -> None:
    """What can be known before anything is made in the deployment at `root`; raises `InvalidInput`."""
    needed = ["torch", "transformers", "safetensors", "numpy"]
    if order.kind is RunKind.TRAIN and order.resolved.config.is_lora:
        needed.append("peft")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"training and evaluation need {', '.join(missing)}: install the extra, pip install 'turnmill[train]'"
        )
    base_model = order.resolved.config.base_model
    folder = assets.model_folder(base_model)
    # Not `Path.is_file`: that raises an error for a name that is too long.
    if not os.path.isfile(folder / "config.json"):
        names = assets.shipped_models()
        raise InvalidInput(
            f'base_model = "{base_model}" ({order.resolved.sources["base_model"]}) is neither a shipped model '
            f"({', '.join(names)}) nor a folder with a Hugging Face model (config.json){suggest(base_model, names)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(f"base_model folder {folder} has no .safetensors file; other weight formats are not loaded")
    check_task = task_check(root, order.resolved.config)
    check_secrets(load_judges(root, order.resolved.config.judges), os.environ)
    check_box(find(order.resolved.config.environment, root=root))
    for path in (order.data, order.eval_data):
        if path is not None:
            _check_tasks(check_task, path)


def resolve(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    sidecar: Path | None = None,
    kind: RunKind | None = None,
) -> Resolved:
    """All layers of the configuration, the recipe beside the chosen base model included; raises `ConfigError`.

    `kind` is of the run that it is for (see `load_config`).
    """
    base_model = base_model_of(file=file, environ=environ, flags=flags, sidecar=sidecar)
    recipe = assets.model_folder(base_model) / "recipe.toml"
    return load_config(
        recipe=recipe if os.path.isfile(recipe) else None,
        file=file,
        environ=environ,
        sidecar=sidecar,
        flags=flags,
        kind=kind,
    )


def with_absolute_model(config: Config) -> Config:
    """The run may be looked at, resumed or evaluated from another working directory."""
    if config.base_model in assets.shipped_models():
        return config
    return replace(config, base_model=str(assets.model_folder(config.base_model).absolute()))


async def execute(
    root: Path,
    order: Order,
    *,
    cancel: asyncio.Event,
    created: Callable[[Run], None],
    origin: Origin | None = None,
) -> tuple[Run, TurnmillError | None]:
    """Run `order` to its end in this process (control and proxy) and its children (worker, replicas, trainer).

    Returns the final run record and what went wrong. `created` is told the run as soon as it exists. Without an
    `origin` the run is a cause of its own; raises `Conflict` if there is a run of that id already, and `InvalidInput`
    for one that its budgets or the deployment's ceilings do not let begin.
    """
    token = new_token()
    origin = origin or Origin(run_id=new_run_id(), cause=f"cli/{secrets.token_hex(8)}")
    config = with_absolute_model(order.resolved.config)
    run = Run(
        run_id=origin.run_id,
        cause=origin.cause,
        retry_of=origin.retry_of,
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        kind=order.kind,
        config=to_dict(config),
        sources=order.resolved.sources,
        data_path=str(order.data.resolve()) if order.data else None,
        eval_path=str(order.eval_data.resolve()) if order.eval_data else None,
        worker_token_hash=hash_of(token),
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )
    async with AsyncExitStack() as letting_in:
        run = await letting_in.enter_async_context(admission(root, run))
        config = from_dict(run.config)
        runs = backend_of(root).open_records()
        try:
            async with cancellable(runs, run.run_id, cancel, RunStatus.CANCELLED) as why:
                record = await RunRecord.create(runs, run)
                await letting_in.aclose()
                created(run)
                async with open_control(root, run, config, token) as ctx:
                    return await walk_monitored(root, ctx, record, why, None)
        finally:
            runs.close()


async def begin(
    root: Path, run_id: str, *, cancel: asyncio.Event, when_cancelled: RunStatus, alarms: Dispatcher | None = None
) -> tuple[Run, TurnmillError | None]:
    """Run a queued run for the first time, as `execute` does with an order; what is wrong with it makes it a failure.

    Raises `Conflict` when somebody else has begun it, or does so at the same moment.
    """
    runs = backend_of(root).open_records()
    try:
        record = await RunRecord.open(runs, run_id)
        if (status := as_seen(record.run).status) not in (RunStatus.QUEUED, RunStatus.INTERRUPTED):
            raise Conflict(f"run {run_id} does not wait to be begun: it is {status}")
        run, config = record.run, from_dict(record.run.config)
        token = new_token()
        async with AsyncExitStack() as letting_in:
            try:
                await _check_queued(root, runs, run, config)
                run = await letting_in.enter_async_context(admission(root, run))
            except InvalidInput as error:
                await record.save(replace(run, status=RunStatus.FAILED, ended_at=time.time(), error=str(error)))
                return record.run, error
            config = from_dict(run.config)
            # Wishes count from here on: before, a run that is cancelled has not begun.
            async with cancellable(runs, run_id, cancel, when_cancelled) as why:
                active = replace(run, status=RunStatus.ACTIVE, worker_token_hash=hash_of(token))
                await record.save(replace(active, pid=os.getpid(), pid_began=began(os.getpid())))
                await letting_in.aclose()
                async with open_control(root, record.run, config, token) as ctx:
                    return await walk_monitored(root, ctx, record, why, alarms)
    finally:
        runs.close()


async def _check_queued(root: Path, runs: RecordStore, run: Run, config: Config) -> None:
    """Raise `InvalidInput` for a run that can't be begun; an upload that brought wrong parameters is held then."""
    if run.refused is not None:
        raise await quarantine(root, runs, run, ConfigError(run.refused))
    try:
        resolved = Resolved(config=config, sources=run.sources)
        # Files are read: conversations of other runs go on meanwhile.
        order = Order(kind=run.kind, resolved=resolved, data=None, eval_data=None)
        await asyncio.to_thread(check_order, root, order)
    except InvalidInput as error:
        if any(is_sidecars(run, name) for name in ("base_model", *ENVIRONMENT_PARAMETERS)):
            raise await quarantine(root, runs, run, ConfigError(str(error))) from error
        raise


def new_token() -> str:
    """The secret that a run's workers show."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What the run's record keeps of it."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Proxy:
    """Where the proxy of a run is."""

    url: str
    # Raises what ended it, where it is in this process; else its role's death says so.
    check: Callable[[], None]
    # Of its process, where it has one of its own.
    env: Mapping[str, str] | None = None


@asynccontextmanager
async def _hosted_proxy(ports: RunPorts, run: Run, config: Config) -> AsyncIterator[_Proxy]:
    """In this process: whoever has the run's files has nothing to gain from another one."""
    sessions = Sessions(ports, run=run, config=config)
    async with sessions, serve(create_app(sessions)) as port:
        sessions.base_url = f"http://{_HOST}:{port}"
        yield _Proxy(url=sessions.base_url, check=sessions.check)


@asynccontextmanager
async def _proxy_apart() -> AsyncIterator[_Proxy]:
    """In a process of its own, which a stage starts once the run's queues are there; on this port however often."""
    with reserved_port(_HOST) as port:
        url = f"http://{_HOST}:{port}"
        yield _Proxy(url=url, check=lambda: None, env={variables.PROXY_URL: url})


@asynccontextmanager
async def open_control(root: Path, run: Run, config: Config, token: str) -> AsyncIterator[StageContext]:
    """The parts of a control process, for the stages of its run; all are closed in reverse."""
    backend = backend_of(root)
    ports = backend.open_run(run.run_id, num_replicas=config.generation_replicas)
    launcher = ProcessLauncher(root)
    meter = Meter(ports.records, run, root=root)
    evaluations = BackgroundEvaluations(partial(play, ports, run, config, meter))
    background = Background()
    hosting = _hosted_proxy(ports, run, config) if backend.hosts_proxy else _proxy_apart()
    try:
        await meter.start()
        async with hosting as proxy:
            judges_env = settings_variable(load_judges(root, config.judges))
            worker_env = {
                **judges_env,
                variables.WORKER_TOKEN: token,
                variables.PROXY_URL: proxy.url,
                variables.WORKER_CONFIG: json.dumps(to_dict(config)),
            }
            try:
                yield StageContext(
                    background=background,
                    run=run,
                    config=config,
                    ports=ports,
                    launcher=launcher,
                    evaluations=evaluations,
                    validate=partial(validate_data, root, config),
                    quarantine=partial(quarantine, root, ports.runs, run),
                    give_up_redriven=partial(give_up_redriven, ports.records, run.run_id),
                    claim=partial(_claim, root, ports, run),
                    worker_env=worker_env,
                    judges_env=judges_env,
                    proxy_env=proxy.env,
                    check=proxy.check,
                    meter=meter,
                )
            finally:
                await background.close()
                await evaluations.close()
                await launcher.close()
    finally:
        await meter.close()
        ports.close()


def task_check(root: Path, config: Config) -> Callable[[Task], object]:
    """What raises `DataError` for a task that the environment can't play.

    A package's code runs in its box alone: Preflight asks it, and here only the prompt is looked at. Raises
    `InvalidInput` where the environment can't be found, or a built-in one refuses its arguments.
    """
    found = find(config.environment, root=root)
    return load_built_in(found.choice).validate if found.kind is EnvironmentKind.BUILT_IN else opening_messages


async def validate_data(root: Path, config: Config, path: Path) -> dict[str, Any]:
    """Path, number of rows and digest of a file that this configuration can train on; raises `RefusedData`."""
    check_task = await asyncio.to_thread(task_check, root, config)
    is_given_up = threading.Event()

    def try_task(task: Task) -> None:
        if is_given_up.is_set():
            raise Cancelled("nobody waits for it any more")
        check_task(task)

    try:
        report = await asyncio.to_thread(validate, path, play=try_task)
    except asyncio.CancelledError:
        # The thread would read on, and the process could not end before it has.
        is_given_up.set()
        raise
    if not report.ok:
        raise RefusedData(report)
    return {"path": str(path), "rows": report.num_rows, "digest": report.digest}


async def _claim(root: Path, ports: RunPorts, run: Run, digest: str, held_out: str | None) -> dict[str, Any]:
    """Claim what an upload trains; `earlier` is a run with the same content that came to nothing."""
    folder = assets.model_folder(run.config["base_model"])
    weights = await asyncio.to_thread(digest_of_weights, folder)
    environment = await asyncio.to_thread(find(from_dict(run.config).environment, root=root).digest)
    content = content_id(
        data=digest, held_out=held_out, config=run.config, base_weights=weights, environment=environment
    )
    return {"content_id": content, "earlier": await claim(ports.runs, content, run.run_id)}


def _check_tasks(check_task: Callable[[Task], object], path: Path) -> None:
    """Raise `DataError` for the first task that the environment can't play."""
    for task in read_tasks(path):
        try:
            check_task(task)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
