"""The composition root: which parts make a control process, and which make each role.

execute(order) -> run record, ports, proxy, launcher -> pipeline walks its stages -> everything closed in reverse
run_role(name) -> ports of the run -> worker | replica | trainer until it is done or asked to stop
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnmill import assets
from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.config import Config, Resolved, from_dict, to_dict
from turnmill.config.values import suggest
from turnmill.environment import Environment, load
from turnmill.errors import DataError, InvalidInput, TurnmillError
from turnmill.evaluation import BackgroundEvaluations, Evaluation, evaluate
from turnmill.intake.dataset import read_tasks, validate
from turnmill.pipeline.engine import RunRecord, load_run, walk
from turnmill.pipeline.stages import StageContext, stages_of
from turnmill.ports import RunPorts
from turnmill.records import RUN_PREFIX, Metric, Purpose, Run, RunKind, RunStatus, Task, decode
from turnmill.rollout.scheduler import Scheduler
from turnmill.telemetry import configure_logging

logger = logging.getLogger(__name__)
WORKER_TOKEN_VARIABLE = "TURNMILL_WORKER_TOKEN"
PROXY_URL_VARIABLE = "TURNMILL_PROXY_URL"
WORKER_CONFIG_VARIABLE = "TURNMILL_WORKER_CONFIG"
ROLES = ("worker", "replica", "trainer")


# ---------------------------------------------------------------- control


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a user asked for: a kind of run on data, with resolved parameters."""

    kind: RunKind
    resolved: Resolved
    data: Path | None
    eval_data: Path | None


def new_run_id(now: float | None = None) -> str:
    """UTC time and a random suffix; opaque to everything else."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def check_order(order: Order) -> None:
    """What can be known before anything is made; raises `InvalidInput`."""
    base_model = order.resolved.config.base_model
    folder = assets.model_folder(base_model)
    if not (folder / "config.json").is_file():
        names = assets.shipped_models()
        raise InvalidInput(
            f'base_model = "{base_model}" ({order.resolved.sources["base_model"]}) is neither a shipped model '
            f"({', '.join(names)}) nor a folder with a Hugging Face model (config.json){suggest(base_model, names)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(f"base_model folder {folder} has no .safetensors file; other weight formats are not loaded")
    environment = load(order.resolved.config.env, order.resolved.config.env_args)
    for path in (order.data, order.eval_data):
        if path is not None:
            for task in read_tasks(path):
                _check_task(environment, task, path)


def _check_task(environment: Environment, task: Task, path: Path) -> None:
    try:
        environment.validate(task)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


async def execute(
    root: Path, order: Order, *, cancel: asyncio.Event, created: Callable[[Run], None]
) -> tuple[Run, TurnmillError | None]:
    """Run `order` to its end in this process (control and proxy) and its children (worker, replicas, trainer).

    Returns the final run record and what went wrong. `created` is told the run as soon as it exists.
    """
    token = secrets.token_urlsafe(32)
    run = Run(
        run_id=new_run_id(),
        cause=f"cli/{secrets.token_hex(8)}",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        kind=order.kind,
        config=to_dict(order.resolved.config),
        sources=order.resolved.sources,
        data_path=str(order.data.resolve()) if order.data else None,
        eval_path=str(order.eval_data.resolve()) if order.eval_data else None,
        worker_token_hash=hashlib.sha256(token.encode()).hexdigest(),
        pid=os.getpid(),
    )
    runs = open_root_records(root)
    try:
        record = await RunRecord.create(runs, run)
        created(run)
        async with _control(root, run, order.resolved.config, token) as ctx:
            return await walk(ctx, stages_of(run.kind), record, cancel)
    finally:
        runs.close()


@asynccontextmanager
async def _control(root: Path, run: Run, config: Config, token: str) -> AsyncIterator[StageContext]:
    from turnmill.conversation.proxy import create_app, serve
    from turnmill.conversation.sessions import Sessions

    ports = open_run(root, run.run_id, num_replicas=config.generation_replicas)
    launcher = ProcessLauncher(root)
    evaluations = BackgroundEvaluations(_player(ports, run, config))
    sessions = Sessions(ports, run=run, config=config)
    try:
        async with sessions, serve(create_app(sessions)) as port:
            url = f"http://127.0.0.1:{port}"
            sessions.base_url = url
            worker_env = {
                WORKER_TOKEN_VARIABLE: token,
                PROXY_URL_VARIABLE: url,
                WORKER_CONFIG_VARIABLE: json.dumps(to_dict(config)),
            }
            try:
                yield StageContext(
                    run=run,
                    config=config,
                    ports=ports,
                    launcher=launcher,
                    evaluations=evaluations,
                    validate=_validate,
                    worker_env=worker_env,
                )
            finally:
                await evaluations.close()
                await launcher.close()
    finally:
        ports.close()


async def _validate(path: Path) -> dict[str, Any]:
    report = await asyncio.to_thread(validate, path)
    if not report.ok:
        raise DataError(report.summary())
    return {"path": str(path), "rows": report.num_rows, "digest": report.digest}


def _player(ports: RunPorts, run: Run, config: Config) -> Callable[[str, Path], Coroutine[Any, Any, Evaluation]]:
    async def play(name: str, path: Path) -> Evaluation:
        tasks = await asyncio.to_thread(read_tasks, path)
        scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, run.run_id, Purpose.EVAL, config
        )
        await scheduler.start()
        try:
            return await evaluate(
                tasks,
                scheduler,
                name=name,
                num_rollouts=config.eval_rollouts,
                threshold=config.success_threshold,
            )
        finally:
            await scheduler.close()

    return play


# ---------------------------------------------------------------- reading


async def list_runs(root: Path) -> list[Run]:
    """All runs of a deployment, oldest first."""
    if not (root / "records").is_dir():
        return []
    found: list[Run] = []
    runs = open_root_records(root)
    try:
        page = await runs.scan(RUN_PREFIX)
        while page:
            found += [decode(item.value, Run) for item in page]
            page = await runs.scan(RUN_PREFIX, after=page[-1].key)
    finally:
        runs.close()
    return sorted(found, key=lambda run: run.created_at)


async def read_run(root: Path, run_id: str) -> Run:
    """One run; raises `NotFound`."""
    runs = open_root_records(root)
    try:
        return await load_run(runs, run_id)
    finally:
        runs.close()


async def read_metrics(root: Path, run_id: str) -> list[Metric]:
    """The metrics of a run by step."""
    ports = open_run(root, run_id, num_replicas=0)
    try:
        return await ports.metrics.read(run_id)
    finally:
        ports.close()


# ---------------------------------------------------------------- roles


def run_role(role: str, *, root: Path, run_id: str, name: str) -> None:
    """The one entry point of every role process; returns when the role is done or was asked to stop."""
    configure_logging(name)
    starters: dict[str, Callable[[Path, str, str, asyncio.Event], Coroutine[Any, Any, None]]] = {
        "worker": _worker,
        "replica": _replica,
        "trainer": _trainer,
    }
    run_loop(_until_stopped(lambda stop: starters[role](root, run_id, name, stop)))


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def _until_stopped(start: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        # The launcher holds the other end and never writes: readable means that it died.
        loop.add_reader(0, _orphaned, loop, stop)
    await start(stop)


def _orphaned(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.remove_reader(0)
    logger.warning("the control process is gone; stopping")
    stop.set()


async def _worker(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    """Knows the proxy only: it opens no queue and no record."""
    from turnmill.rollout.worker import run_worker

    missing = [
        key for key in (WORKER_TOKEN_VARIABLE, PROXY_URL_VARIABLE, WORKER_CONFIG_VARIABLE) if key not in os.environ
    ]
    if missing:
        raise InvalidInput(f"a worker needs {', '.join(missing)} in its environment")
    config = from_dict(json.loads(os.environ[WORKER_CONFIG_VARIABLE]))
    await run_worker(
        proxy_url=os.environ[PROXY_URL_VARIABLE],
        worker_token=os.environ[WORKER_TOKEN_VARIABLE],
        name=name,
        config=config,
        environment=load(config.env, config.env_args),
        stop=stop,
    )


@asynccontextmanager
async def _opened(root: Path, run_id: str) -> AsyncIterator[tuple[Run, Config, RunPorts]]:
    runs = open_root_records(root)
    try:
        run = await load_run(runs, run_id)
    finally:
        runs.close()
    config = from_dict(run.config)
    ports = open_run(root, run_id, num_replicas=config.generation_replicas)
    try:
        yield run, config, ports
    finally:
        ports.close()


async def _replica(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    from turnmill.generation.renderer import Renderer
    from turnmill.generation.replica import run_replica
    from turnmill.generation.transformers_engine import TransformersEngine

    async with _opened(root, run_id) as (_, config, ports):
        folder = assets.model_folder(config.base_model)
        engine = TransformersEngine(folder, num_slots=config.generation_slots, max_length=config.max_length)
        await run_replica(
            ports,
            run_id=run_id,
            name=name,
            index=int(name.rsplit("-", 1)[1]),
            config=config,
            engine=engine,
            renderer=Renderer(folder),
            stop=stop,
        )


async def _trainer(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    from turnmill.training.loop import train
    from turnmill.training.trainer import Trainer

    async with _opened(root, run_id) as (run, config, ports):
        if run.data_path is None:
            raise InvalidInput(f"run {run_id} has no training data")
        await _check_unchanged(run)
        scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, run_id, Purpose.TRAIN, config
        )
        await scheduler.start()
        try:
            await train(
                ports,
                run=run,
                config=config,
                tasks=await asyncio.to_thread(read_tasks, Path(run.data_path)),
                rollouts=scheduler,
                trainer=Trainer(assets.model_folder(config.base_model), config),
                folder=root / "runs" / run_id / "checkpoints",
                stop=stop,
            )
        finally:
            await scheduler.close()


async def _check_unchanged(run: Run) -> None:
    """The file that is trained on is the file that was validated."""
    path = Path(str(run.data_path))
    validated = {stage.name: stage.result for stage in run.stages}.get("ValidateData", {}).get("data", {})
    report = await asyncio.to_thread(validate, path)
    if report.digest != validated.get("digest"):
        raise InvalidInput(f"{path} changed after it was validated; start a new run for the new content")
