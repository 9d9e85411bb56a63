"""The one entry point of every role process."""

import asyncio
import json
import logging
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from turnmill import assets
from turnmill.config import Config, from_dict
from turnmill.environment.base import Environment
from turnmill.environment.registry import EnvironmentKind, find, is_built_in, load_built_in
from turnmill.errors import InvalidInput, WeightsUnproved
from turnmill.pipeline.engine import load_run
from turnmill.pipeline.preparing import request_key
from turnmill.pipeline.processes import EXIT_REFUSED
from turnmill.ports import RunPorts
from turnmill.records import EnvironmentChoice, PreflightRequest, Purpose, Run, RunKind, decode
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.news import Listener, News
from turnmill.rollout.scheduler import Scheduler
from turnmill.telemetry import configure_logging
from turnmill.weights import Lora
from turnmill.wiring import variables
from turnmill.wiring.backend import backend_of, open_external_run, rollout_alarm
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import read_validated
from turnmill.wiring.running.measuring import Validator

logger = logging.getLogger(__name__)
ROLES = ("worker", "replica", "trainer", "preflight", "proxy")
# They serve until the launcher ends them, so that ending for any other reason is a death.
_SERVICES = ("worker", "replica", "proxy")
# Imports that take seconds.
_HEAVY = {
    "replica": ("turnmill.generation.transformers_engine", "turnmill.generation.renderer"),
    "trainer": ("turnmill.training.trainer",),
}
# What a shell calls the end by SIGTERM.
_EXIT_TOLD_TO_STOP = 128 + signal.SIGTERM


def run_role(role: str, *, root: Path, run_id: str, name: str) -> None:
    """The one entry point of every role process; returns when the role is done or was asked to stop.

    Raises `SystemExit` for a service that was asked to stop: with exit code 0 nobody would start it again
    when the request came from somebody else than the launcher, and the run would wait for it for ever. And for a
    replica whose start once more would be of no use, which has said why.
    """
    configure_logging(name, run_id=run_id, form=variables.log_format())
    starters: dict[str, Callable[[Path, str, str, asyncio.Event], Coroutine[Any, Any, None]]] = {
        "worker": _worker,
        "replica": _replica,
        "trainer": _trainer,
        "preflight": _preflight,
        "proxy": _proxy,
    }
    for module in _HEAVY.get(role, ()):
        # Before SIGTERM is caught: nothing is held yet, so it may end the process there and then.
        import_module(module)
    try:
        run_loop(_until_stopped(lambda stop: starters[role](root.absolute(), run_id, name, stop)))
    except WeightsUnproved as error:
        if not error.is_final:
            raise
        raise SystemExit(EXIT_REFUSED) from error
    if role in _SERVICES:
        raise SystemExit(_EXIT_TOLD_TO_STOP)


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
    from turnmill.wiring.boxes import box_settings

    missing = [
        key for key in (variables.WORKER_TOKEN, variables.PROXY_URL, variables.WORKER_CONFIG) if key not in os.environ
    ]
    if missing:
        raise InvalidInput(f"a worker needs {', '.join(missing)} in its environment")
    config = from_dict(json.loads(os.environ[variables.WORKER_CONFIG]))
    found = find(config.environment, root=root)
    environment: Environment | Settings
    if found.kind is EnvironmentKind.BUILT_IN:
        environment = load_built_in(found.choice)
    else:
        log = root / "runs" / run_id / "logs" / f"{name}-environment.log"
        environment = await asyncio.to_thread(box_settings, found, root, log=log, call_timeout_s=config.call_timeout_s)
    await run_worker(
        proxy_url=os.environ[variables.PROXY_URL],
        worker_token=os.environ[variables.WORKER_TOKEN],
        name=name,
        config=config,
        environment=environment,
        stop=stop,
        sign=variables.proxy_signer(),
    )


async def _proxy(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    """Serves at the URL that it is started with, so that workers find the next one of it, too; raises what ended it."""
    from turnmill.conversation.hosting import serve
    from turnmill.conversation.proxy import create_app
    from turnmill.conversation.sessions import Sessions
    from turnmill.conversation.shared import SharedSessions

    url, host, port = variables.proxy_place()
    async with _opened(root, run_id) as (run, config, ports):
        if run.kind is RunKind.EXTERNAL:
            shared = SharedSessions(ports, run=run, config=config, on_dead=rollout_alarm(root, ports))
            shared.base_url = url
            async with serve(create_app(shared), host=host, port=port):
                logger.info("serving at %s", url)
                await stop.wait()
            return
        sessions = Sessions(ports, run=run, config=config)
        sessions.base_url = url
        async with sessions, serve(create_app(sessions), host=host, port=port, is_reserved=True):
            logger.info("serving at %s", url)
            ended = asyncio.create_task(sessions.until_stopped(), name="proxy-ended")
            asked = asyncio.create_task(stop.wait(), name="proxy-stop")
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, asked):
                task.cancel()
        sessions.check()


async def _preflight(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    """Has the run's blobs and nothing else; the code of a package has a box beside it, and not even these."""
    from turnmill.wiring.boxes import box_settings
    from turnmill.wiring.running.boxed_preflight import run_boxed_preflight
    from turnmill.wiring.running.preflight import run_preflight

    def settings_of(choice: EnvironmentChoice) -> Settings:
        log = root / "runs" / run_id / "logs" / f"{name}-environment.log"
        # There is no model that could be called.
        return box_settings(find(choice, root=root), root, log=log, call_timeout_s=1.0)

    ports = backend_of(root).open_run(run_id, num_replicas=0)
    try:
        request = decode(await ports.blobs.get(request_key(name)), PreflightRequest)
        if is_built_in(request.environment):
            await run_preflight(ports.blobs, name, stop=stop, load=load_built_in)
        else:
            await run_boxed_preflight(ports.blobs, name, stop=stop, settings_of=settings_of)
    finally:
        ports.close()


@asynccontextmanager
async def _opened(root: Path, run_id: str) -> AsyncIterator[tuple[Run, Config, RunPorts]]:
    runs = backend_of(root).open_records()
    try:
        run = await load_run(runs, run_id)
    finally:
        runs.close()
    config = from_dict(run.config)
    if run.kind is RunKind.EXTERNAL:
        ports = open_external_run(root, run_id)
    else:
        ports = backend_of(root).open_run(run_id, num_replicas=config.generation_replicas)
    try:
        yield run, config, ports
    finally:
        ports.close()


async def _replica(root: Path, run_id: str, name: str, stop: asyncio.Event) -> None:
    from turnmill.generation.renderer import Renderer
    from turnmill.generation.replica import run_replica
    from turnmill.generation.transformers_engine import TransformersEngine

    async with _opened(root, run_id) as (run, config, ports):
        folder = assets.model_folder(config.base_model)
        # What is evaluated by itself has no trainer whose adapters would come.
        lora = Lora.of(config) if run.kind is RunKind.TRAIN else None
        engine = TransformersEngine(folder, num_slots=config.generation_slots, max_length=config.max_length, lora=lora)
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
        tasks = await asyncio.to_thread(read_validated, run, Path(run.data_path))
        async with _validator(ports, run, config) as (validator, news):
            scheduler = Scheduler(ports.records, ports.rollout_request, news, run_id, Purpose.TRAIN, config)
            await scheduler.start()
            try:
                await train(
                    ports,
                    run=run,
                    config=config,
                    tasks=tasks,
                    rollouts=scheduler,
                    trainer=Trainer(assets.model_folder(config.base_model), config),
                    folder=root / "runs" / run_id / "checkpoints",
                    stop=stop,
                    evaluator=validator,
                )
            finally:
                await scheduler.close()


@asynccontextmanager
async def _validator(ports: RunPorts, run: Run, config: Config) -> AsyncIterator[tuple[Validator | None, News]]:
    """What evaluates while the run trains, and where the run's own scheduler has its news from.

    None where nothing is to be evaluated: then the scheduler is alone with the queue.
    """
    if not config.val_every or run.eval_path is None:
        yield None, ports.rollout_response
        return
    held_out = await asyncio.to_thread(read_validated, run, Path(run.eval_path))
    listener = Listener(ports.rollout_response, (Purpose.TRAIN, Purpose.EVAL))
    inboxes = listener.inboxes
    listener.start()
    try:
        yield Validator(ports, run.run_id, config, held_out, inboxes[Purpose.EVAL]), inboxes[Purpose.TRAIN]
    finally:
        await listener.close()
