"""A model that is served or talked to: which one is meant, and its parts.

RUN | MODEL -> folder, and how its conversations were in training -> engine, tokenizer -> server | chat
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from turnmill import assets
from turnmill.config import Config, from_dict
from turnmill.conversation.serving import listening
from turnmill.errors import InvalidInput, NotFound
from turnmill.records import Run
from turnmill.wiring.backend import remote_of
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.running.control import resolve

if TYPE_CHECKING:
    from turnmill.generation.engine import StreamingEngine
    from turnmill.generation.renderer import Renderer
    from turnmill.serving.app import App

# How long requests that are being answered have to end.
GRACE_S = 30
_VERSION = re.compile(r"\d+\.\d+")
_NEEDED = ("torch", "transformers", "safetensors", "numpy", "jinja2")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Which weights, and the limits and the temperature that they were trained with."""

    name: str
    folder: Path
    config: Config


def find_model(root: Path, target: str, step: int | None = None) -> ServedModel:
    """What `target` names: a shipped model, a folder, a run, or a published model whose run is gone.

    With `step`, that checkpoint of a run. Raises `NotFound` or `InvalidInput`.
    """
    runs = {run.run_id: run for run in look_at_runs(root)}
    if step is not None and target not in runs:
        raise InvalidInput(f"--step is for a run: {target!r} is none in {root}")
    if target in runs:
        return _of_run(root, runs[target], step)
    if target in assets.shipped_models():
        return _of_folder(target, assets.model_folder(target), target)
    folder = Path(os.path.expanduser(target))
    place = folder if _is_model(folder) else _published(root, target)
    if place is not None and _is_model(place):
        return _of_folder(folder.absolute().name, place.absolute(), str(place.absolute()))
    if folder.is_dir():
        raise InvalidInput(f"{folder} is no Hugging Face model: config.json is missing")
    names = ", ".join(assets.shipped_models())
    raise NotFound(f"{target!r} is no run in {root}, no folder with a model and no shipped model ({names})")


def _of_run(root: Path, run: Run, step: int | None) -> ServedModel:
    checkpoints = root.absolute() / "runs" / run.run_id / "checkpoints"
    folder = checkpoints / ("final" if step is None else f"step-{step}")
    if not _is_model(folder) and step is None:
        # Trained on another machine, for example.
        folder = _published(root, run.run_id) or folder
    if os.path.isfile(folder / "adapter_config.json"):
        folder = _merged(root, run, folder)
    if not _is_model(folder):
        there = sorted(path.name for path in checkpoints.glob("[!.]*")) if checkpoints.is_dir() else []
        hint = f"there are {', '.join(there)} (--step N)" if there else "it has none"
        raise NotFound(f"run {run.run_id} ({run.status}) has no checkpoint {folder.name}: {hint}")
    name = run.run_id if step is None else f"{run.run_id}/step-{step}"
    return ServedModel(name=name, folder=folder, config=from_dict(run.config))


def _merged(root: Path, run: Run, checkpoint: Path) -> Path:
    """The model of an adapter's checkpoint, below the run: made when it is first asked for, which takes seconds."""
    _check_installed(*_NEEDED, "peft")
    from turnmill.training.merging import merge_checkpoint

    config = from_dict(run.config)
    target = root.absolute() / "runs" / run.run_id / "merged" / checkpoint.name
    merge_checkpoint(checkpoint, assets.model_folder(config.base_model), config, target)
    return target


def _published(root: Path, run_id: str) -> Path | None:
    """The latest version that was published of a run, `bucket/models/<run>/<version>`: it outlives the run.

    What is published elsewhere is downloaded there first.
    """
    folder = root / "bucket" / "models" / run_id
    if not run_id or "/" in run_id:
        return None
    if (remote := remote_of(root)) is not None:
        return remote.fetch_model(run_id, folder)
    if not os.path.isdir(folder):
        return None
    versions = [path for path in folder.iterdir() if _VERSION.fullmatch(path.name)]
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def _is_model(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")


def _of_folder(name: str, folder: Path, base_model: str) -> ServedModel:
    return ServedModel(
        name=name, folder=folder, config=resolve(file=None, environ={}, flags={"base_model": base_model}).config
    )


def load(model: ServedModel, *, num_slots: int) -> "tuple[StreamingEngine, Renderer]":
    """Read the weights, which takes seconds; raises `InvalidInput` where they can't be used."""
    _check_installed(*_NEEDED)
    from turnmill.generation.renderer import Renderer
    from turnmill.generation.transformers_engine import TransformersEngine

    renderer = Renderer(model.folder)
    return TransformersEngine(model.folder, num_slots=num_slots, max_length=model.config.max_length), renderer


def _check_installed(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InvalidInput(f"serving a model needs {', '.join(missing)}: pip install 'turnmill[train]'")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, and what clients must show; None: nothing."""

    host: str
    port: int
    token: str | None


async def serve_model(
    model: ServedModel,
    address: Address,
    *,
    num_slots: int,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    """Serve until `stop`; what is being answered then is answered, unless `hurry` is set.

    `ready` is told the base URL. Raises `InvalidInput` where the address can't be listened at.
    """
    from turnmill.generation.stability import warn_of_differences
    from turnmill.serving.answers import Answerer
    from turnmill.serving.app import App, Model
    from turnmill.serving.conversations import Conversations
    from turnmill.serving.loop import EngineLoop

    engine, renderer = await asyncio.to_thread(load, model, num_slots=num_slots)
    await asyncio.to_thread(warn_of_differences, renderer)
    config = model.config
    async with EngineLoop(engine) as loop:
        answerer = Answerer(
            loop, Conversations(renderer), max_length=engine.max_length, max_new_tokens=config.max_new_tokens
        )
        shown = Model(
            name=model.name,
            created_at=(model.folder / "config.json").stat().st_mtime,
            max_length=engine.max_length,
            temperature=config.temperature,
        )
        app = App(shown, answerer, renderer.token_of, token=address.token)
        hurrying = asyncio.create_task(_close_when(hurry, loop.close), name="hurry")
        try:
            async with _listening(app, address) as port:
                host = f"[{address.host}]" if ":" in address.host else address.host
                ready(f"http://{host}:{port}/v1")
                await _until(stop, loop.task)
        finally:
            hurrying.cancel()
            await asyncio.gather(hurrying, return_exceptions=True)


@asynccontextmanager
async def _listening(app: "App", address: Address) -> AsyncIterator[int]:
    server = listening(app, host=address.host, port=address.port, name="serve", stop=app.stop, grace_s=GRACE_S)
    try:
        port = await server.__aenter__()
    except OSError as error:
        raise InvalidInput(
            f"--host {address.host} --port {address.port}: can't listen there: {error.strerror or error}"
        ) from error
    try:
        yield port
    finally:
        await server.__aexit__(None, None, None)


async def _close_when(hurry: asyncio.Event, close: Callable[[], Awaitable[None]]) -> None:
    await hurry.wait()
    await close()


async def _until(stop: asyncio.Event, engine: "asyncio.Task[None] | None") -> None:
    """Return when told to stop; raises what ended the engine before."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({stopped, engine} if engine else {stopped}, return_when=asyncio.FIRST_COMPLETED)
        if engine is not None and engine.done():
            engine.result()
    finally:
        stopped.cancel()
