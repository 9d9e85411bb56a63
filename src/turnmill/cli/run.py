"""`turnmill run`, `demo`, `eval`, `resume`: a run in the foreground, shown, and what came of it."""

import asyncio
import json
import logging
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console

from turnmill import assets
from turnmill.cli import render
from turnmill.cli.cost import budget_options
from turnmill.cli.cost_lines import forecast_lines
from turnmill.cli.next_steps import next_step
from turnmill.cli.options import (
    EPILOG,
    TRAINING_ALONE,
    CommandWithParameters,
    backend_options,
    collect_flags,
    config_options,
    unsafe_env_option,
)
from turnmill.cli.serve import step_option
from turnmill.cli.show import at_root, find_run, json_option, load_metrics, root_option
from turnmill.cli.view import PlainConsole, WarningsShown, command, say, show
from turnmill.config import ENVIRONMENT_CHOICES, ENVIRONMENT_PARAMETERS, Resolved, from_dict, to_dict
from turnmill.config.deployment import load_deployment
from turnmill.errors import Duplicate, InvalidInput, NotFound, TurnmillError
from turnmill.records import Run, RunKind
from turnmill.telemetry import closing_log, configure_logging
from turnmill.wiring.backend import choose
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.mirroring import mirrored
from turnmill.wiring.reading.runs import read_baseline
from turnmill.wiring.running.control import Order, check_order, execute, resolve
from turnmill.wiring.running.foreground import using
from turnmill.wiring.running.resume import resume as resume_run
from turnmill.wiring.serving import find_model
from turnmill.wiring.variables import log_format

data_file = click.Path(path_type=Path)
# How conversations go, for a model that was trained so. The token budget bounds their length.
PLAYED = (
    "judges",
    "max_length",
    "max_new_tokens",
    "micro_batch_tokens",
    "val_temperature",
    "client_sampling",
    "served_model_names",
    "success_threshold",
)
figures_option = json_option("Print the figures of the run as one object; all else goes to standard error.")


@click.command(cls=CommandWithParameters, epilog=EPILOG)
@click.option("--data", "data_path", type=data_file, metavar="FILE", required=True, help="Tasks to train on (.jsonl).")
@click.option(
    "--eval-data", type=data_file, metavar="FILE", help="Held-out tasks (.jsonl), played after training by both models."
)
@unsafe_env_option
@backend_options
@root_option
@figures_option
@config_options()
def run(
    data_path: Path,
    eval_data: Path | None,
    config_file: Path | None,
    backend: str | None,
    local_compute: bool,
    root: Path,
    as_json: bool,
    **flags: object,
) -> None:
    """Train on a file of tasks, in the foreground."""
    resolved = resolve(file=config_file, environ=os.environ, flags=collect_flags(flags), kind=RunKind.TRAIN)
    order = Order(kind=RunKind.TRAIN, resolved=resolved, data=data_path, eval_data=eval_data)
    _start(root, order, backend, local_compute, as_json)


@click.command(cls=CommandWithParameters, epilog=EPILOG, short_help="Train the shipped tiny model on Wordle.")
@backend_options
@root_option
@figures_option
@config_options()
def demo(
    config_file: Path | None, backend: str | None, local_compute: bool, root: Path, as_json: bool, **flags: object
) -> None:
    """Train the shipped tiny model on Wordle and evaluate it on held-out words: minutes on a laptop CPU."""
    resolved = resolve(file=config_file, environ=os.environ, flags=collect_flags(flags), kind=RunKind.TRAIN)
    order = Order(
        kind=RunKind.TRAIN,
        resolved=resolved,
        data=assets.wordle_data("train"),
        eval_data=assets.wordle_data("eval"),
    )
    _start(root, order, backend, local_compute, as_json)


@click.command("eval", cls=CommandWithParameters, epilog=EPILOG, short_help="Evaluate a run's checkpoint or a model.")
@click.argument("target", metavar="RUN|MODEL")
@step_option
@click.option(
    "--data", "data_path", type=data_file, metavar="FILE", required=True, help="Tasks to evaluate on (.jsonl)."
)
@unsafe_env_option
@backend_options
@root_option
@figures_option
@config_options(without=TRAINING_ALONE | {"base_model"})
def evaluate(
    target: str,
    step: int | None,
    data_path: Path,
    config_file: Path | None,
    backend: str | None,
    local_compute: bool,
    root: Path,
    as_json: bool,
    **flags: object,
) -> None:
    """Evaluate a run's final checkpoint, one of its steps, a shipped model or a folder with a Hugging Face model.

    What was set for the run about its environment and the length of its conversations holds here too, unless set anew.
    """
    model, trained_by = _model_of(root, target, step)
    given = {**collect_flags(flags), "base_model": model}
    resolved = resolve(file=config_file, environ=os.environ, flags=given, kind=RunKind.EVAL)
    if trained_by is not None:
        resolved = as_played(resolved, trained_by)
    order = Order(kind=RunKind.EVAL, resolved=resolved, data=None, eval_data=data_path)
    _start(root, order, backend, local_compute, as_json)


def as_played(resolved: Resolved, run: Run) -> Resolved:
    """`resolved` with what was set for `run` about playing, where nothing else sets it; raises `ConfigError`."""
    unset = ("default", "recipe.toml")
    is_another = any(resolved.sources[name] not in unset for name in ENVIRONMENT_CHOICES)
    taken = {
        name: run.config[name]
        # What was set about one environment is not for another.
        for name in (PLAYED if is_another else (*ENVIRONMENT_PARAMETERS, *PLAYED))
        if resolved.sources[name] in unset and run.sources.get(name, "default") not in unset
    }
    sources = {**resolved.sources, **dict.fromkeys(taken, f"run {run.run_id}")}
    return Resolved(config=from_dict({**to_dict(resolved.config), **taken}), sources=sources)


def _model_of(root: Path, target: str, step: int | None) -> tuple[str, Run | None]:
    """The model that `target` names, and the run if it names one."""
    if step is not None:
        return str(find_model(root, target, step).folder), find_run(root, target)
    if target in assets.shipped_models():
        return target, None
    if (folder := Path(target).expanduser()).is_dir():
        return str(folder.absolute()), None
    if "/" in target:
        raise NotFound(f"{target} is not a folder")
    try:
        found = find_run(root, target)
    except NotFound as error:
        names = ", ".join(assets.shipped_models())
        raise NotFound(f"{error} (shipped models: {names})") from error
    return str(find_model(root, target).folder), found


@click.command(short_help="Go on with a run that failed or was stopped.")
@click.argument("run_id", metavar="RUN")
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Go on after this step and give up the later ones (0: from the base model).",
)
@budget_options
@root_option
@figures_option
def resume(run_id: str, from_step: int | None, root: Path, as_json: bool, **budgets: float | None) -> None:
    """Go on with a run that failed, was stopped or lost its process, with its parameters and its data.

    It goes on after its last recorded step, with the weights of that step bit for bit.
    """
    find_run(root, run_id)
    wanted = {name: value for name, value in budgets.items() if value is not None}
    in_foreground(
        root,
        lambda cancel, created: resume_run(
            root, run_id, from_step=from_step, cancel=cancel, created=created, budgets=wanted
        ),
        as_json,
    )


# ---------------------------------------------------------------- in the foreground


# Walks a run to its end: told by what event it is cancelled, and whom to tell the run as soon as its record is written.
Walk = Callable[[asyncio.Event, Callable[[Run], None]], Awaitable[tuple[Run, TurnmillError | None]]]


def _start(root: Path, order: Order, backend: str | None, is_local: bool, as_json: bool) -> None:
    check_order(root, order)
    _check_root(root)
    choose(root, flag=backend, is_local=is_local, environ=os.environ)
    in_foreground(root, lambda cancel, created: execute(root, order, cancel=cancel, created=created), as_json)


def in_foreground(root: Path, walk: Walk, as_json: bool) -> None:
    """Walk a run to its end and show it; raises what went wrong."""
    console = PlainConsole(stderr=as_json)
    log_format()  # a bad one is refused before there is a run, and so is a turnmill.toml
    load_deployment(root, os.environ)
    with using(root):
        final, error = run_loop(_walk_and_show(root, walk, console))
    _conclude(root, final, error, console, as_json)
    if error is not None and not isinstance(error, Duplicate):
        raise error


def _check_root(root: Path) -> None:
    """Make the deployment's folder; raises `InvalidInput` where nothing can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise InvalidInput(f"--root {root}: can't write there: {(error.strerror or str(error)).lower()}") from error


async def _walk_and_show(root: Path, walk: Walk, console: Console) -> tuple[Run, TurnmillError | None]:
    """Walk the pipeline beside a view of it; the first Ctrl-C, or the loss of the output, cancels the run in order."""
    cancel, ended = asyncio.Event(), asyncio.Event()
    views: list[asyncio.Task[None]] = []

    async def view(run: Run) -> None:
        try:
            say(console, render.origin(run, root / "runs" / run.run_id))
            for line in forecast_lines(run.forecast):
                say(console, line)
            await show(root, run.run_id, console, ended=ended)
        except OSError:
            # Nobody can see it any more: the terminal, or the reader of the pipe, is gone.
            cancel.set()
            raise

    async with AsyncExitStack() as stack:
        stack.enter_context(on_signals(cancel, console))
        start_mirror = await stack.enter_async_context(mirrored(root))

        def created(run: Run) -> None:
            stack.enter_context(control_log(root / "runs" / run.run_id / "logs" / "control.log", run.run_id))
            stack.enter_context(WarningsShown(console))
            start_mirror(run.run_id)
            views.append(asyncio.create_task(view(run), name="view"))

        try:
            outcome = await walk(cancel, created)
        finally:
            ended.set()
            await asyncio.gather(*views, return_exceptions=True)
    for task in views:
        task.result()
    return outcome


@contextmanager
def on_signals(
    cancel: asyncio.Event, console: Console, text: str = "stopping: every process of the run is ended"
) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal end the run in order; the default would leave its record as active."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)

    def stop() -> None:
        first = not cancel.is_set()
        cancel.set()
        # A terminal that hung up takes no text.
        with suppress(OSError):
            console.print(text if first else "still stopping, 10 s at most")

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def control_log(path: Path, run_id: str | None = None) -> Iterator[None]:
    """Logs of this process go to a file of the run, like those of its other roles; the screen belongs to the view."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    with closing_log(file):
        configure_logging("control", stream=file, run_id=run_id, form=log_format())
        try:
            yield
        finally:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _conclude(root: Path, run: Run, error: TurnmillError | None, console: Console, as_json: bool) -> None:
    metrics = load_metrics(root, run)
    baseline = run_loop(read_baseline(root, run.run_id))
    if as_json:
        click.echo(json.dumps(render.summary(run, metrics)))
    elif metrics:
        console.print(render.curve_table(metrics))
        if not console.is_terminal:  # else the view has left it there
            console.print(render.curve(metrics))
    lines = render.result_lines(run, metrics)
    if baseline is not None:
        told = render.baseline_lines(baseline.figures())
        lines = [*(told[:1] if baseline.lets_train else told), *lines]
    if isinstance(error, Duplicate):
        lines.append(f"nothing was trained: {error}")
    elif error is not None:
        lines += [
            f"{run.status.value}; every process that was started has ended",
            f"kept: {root / 'runs' / run.run_id} (records, conversations, metrics, logs/)",
        ]
    for line in lines:
        say(console, line)
    step = next_step(run, num_steps=len(metrics), at_root=at_root(root)) if error is not None else None
    for line in [*([] if step is None else [step]), f"more: turnmill status {run.run_id}{at_root(root)}"]:
        say(console, command(line))
