"""`turnmill run`, `demo`, `eval`: start a run in the foreground, show it, and say what came of it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from turnmill import assets
from turnmill.cli import render
from turnmill.cli.options import collect_flags, config_options
from turnmill.cli.show import find_run, json_option, load_metrics, root_option
from turnmill.config import Resolved, base_model_of, load_config
from turnmill.errors import Cancelled, InvalidInput, NotFound, TurnmillError
from turnmill.records import Run, RunKind
from turnmill.wiring.control import Order, check_order, execute
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading import read_metrics, read_run

VIEW_INTERVAL_S = 0.5
# Without a terminal a line is printed every so many steps.
LINE_EVERY_STEPS = 10

data_file = click.Path(path_type=Path)


def resolve(config_file: Path | None, flags: Mapping[str, object]) -> Resolved:
    """All layers of the configuration, the recipe beside the chosen base model included."""
    base_model = base_model_of(file=config_file, environ=os.environ, flags=flags)
    recipe = assets.model_folder(base_model) / "recipe.toml"
    return load_config(recipe=recipe if recipe.is_file() else None, file=config_file, environ=os.environ, flags=flags)


@click.command()
@click.option("--data", "data_path", type=data_file, required=True, help="Tasks to train on (.jsonl).")
@click.option("--eval-data", type=data_file, help="Held-out tasks (.jsonl) for the evaluation before and after.")
@config_options
@root_option
@json_option
def run(
    data_path: Path, eval_data: Path | None, config_file: Path | None, root: Path, as_json: bool, **flags: object
) -> None:
    """Train on a file of tasks, in the foreground."""
    resolved = resolve(config_file, collect_flags(flags))
    _start(root, Order(kind=RunKind.TRAIN, resolved=resolved, data=data_path, eval_data=eval_data), as_json)


@click.command()
@config_options
@root_option
@json_option
def demo(config_file: Path | None, root: Path, as_json: bool, **flags: object) -> None:
    """Train the shipped tiny model on Wordle and evaluate it on held-out words: minutes on a laptop CPU."""
    resolved = resolve(config_file, collect_flags(flags))
    order = Order(
        kind=RunKind.TRAIN,
        resolved=resolved,
        data=assets.wordle_data("train"),
        eval_data=assets.wordle_data("eval"),
    )
    _start(root, order, as_json)


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL")
@click.option("--data", "data_path", type=data_file, required=True, help="Tasks to evaluate on (.jsonl).")
@config_options
@root_option
@json_option
def evaluate(
    target: str, data_path: Path, config_file: Path | None, root: Path, as_json: bool, **flags: object
) -> None:
    """Evaluate a run's final checkpoint, a shipped model, or a folder with a Hugging Face model."""
    model = _model_of(root, target)
    resolved = resolve(config_file, {**collect_flags(flags), "base_model": str(model)})
    _start(root, Order(kind=RunKind.EVAL, resolved=resolved, data=None, eval_data=data_path), as_json)


def _model_of(root: Path, target: str) -> str:
    if target in assets.shipped_models() or Path(target).expanduser().is_dir():
        return target
    if "/" in target:
        raise NotFound(f"{target} is not a folder")
    try:
        found = find_run(root, target)
    except NotFound as error:
        names = ", ".join(assets.shipped_models())
        raise NotFound(f"{error} (shipped models: {names})") from error
    checkpoint = render.summary(found, [])["checkpoint"]
    if checkpoint is None:
        raise InvalidInput(f"run {target} ({found.status}) has no final checkpoint to evaluate")
    return str(checkpoint)


def _start(root: Path, order: Order, as_json: bool) -> None:
    check_order(order)
    final, error = run_loop(_run_and_show(root, order, as_json))
    _conclude(root, final, error, as_json)
    if isinstance(error, Cancelled):
        raise KeyboardInterrupt
    if error is not None:
        raise error


async def _run_and_show(root: Path, order: Order, as_json: bool) -> tuple[Run, TurnmillError | None]:
    """Walk the pipeline beside a view of it; the first Ctrl-C cancels the run in order."""
    cancel = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel.set)
    started: asyncio.Queue[Run] = asyncio.Queue()
    view = asyncio.create_task(_view(root, started, cancel, as_json), name="view")
    try:
        return await execute(root, order, cancel=cancel, created=started.put_nowait)
    finally:
        view.cancel()
        await asyncio.gather(view, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _view(root: Path, started: "asyncio.Queue[Run]", cancel: asyncio.Event, as_json: bool) -> None:
    run = await started.get()
    console = Console(stderr=as_json)
    told_cancel = False
    if console.is_terminal:
        with Live(render.live_view(run, []), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(VIEW_INTERVAL_S)
                run, metrics = await read_run(root, run.run_id), await read_metrics(root, run.run_id)
                live.update(render.live_view(run, metrics), refresh=True)
                if cancel.is_set() and not told_cancel:
                    told_cancel = True
                    live.console.print("stopping: the current step is finished, then everything is shut down")
    else:
        await _print_lines(root, run, console)


async def _print_lines(root: Path, run: Run, console: Console) -> None:
    console.print(f"run {run.run_id} in {root}", soft_wrap=True)
    stage, shown = "", 0
    while True:
        await asyncio.sleep(VIEW_INTERVAL_S)
        run, metrics = await read_run(root, run.run_id), await read_metrics(root, run.run_id)
        if run.stages and run.stages[-1].name != stage:
            stage = run.stages[-1].name
            console.print(f"stage {stage}", soft_wrap=True)
        for metric in metrics[shown:]:
            if metric.step == 1 or metric.step % LINE_EVERY_STEPS == 0:
                console.print(render.step_line(metric, int(run.config["max_steps"])), soft_wrap=True, highlight=False)
        shown = len(metrics)


def _conclude(root: Path, run: Run, error: TurnmillError | None, as_json: bool) -> None:
    metrics = load_metrics(root, run)
    figures = render.summary(run, metrics)
    if as_json:
        click.echo(json.dumps(figures))
    console = Console(stderr=as_json)
    if not as_json:
        if metrics:
            console.print(render.curve_table(metrics))
            console.print(Text(render.sparkline(render.rewards(metrics)), style="magenta"))
        _print_figures(console, run, figures)
    if error is not None:
        _print_kept(console, root, run, figures)


def _print_figures(console: Console, run: Run, figures: Mapping[str, Any]) -> None:
    if figures["reward_first"] is not None:
        console.print(
            f"mean reward {figures['reward_first']:.3f} at the first step, "
            f"{figures['reward_last10']:.3f} over the last 10 of {figures['steps']} steps "
            f"({render.duration(figures['train_s'] or 0)}, {figures['num_generated']} conversations)"
        )
    if figures["eval_before"] is not None and figures["eval_after"] is not None:
        console.print(f"held-out solve rate {figures['eval_before']:.3f} before, {figures['eval_after']:.3f} after")
    for stage in run.stages:
        if stage.name == "Evaluate" and "eval" in stage.result:
            result = stage.result["eval"]
            console.print(
                f"solved {result['solved']:.3f} ± {result['solved_margin']:.3f} of {result['num_valid']} rollouts "
                f"({result['num_tasks']} tasks, {result['num_invalid']} invalid)"
            )
    if figures["checkpoint"]:
        console.print(f"final checkpoint: {figures['checkpoint']}", soft_wrap=True)
    console.print(f"more: turnmill status {run.run_id}", soft_wrap=True)


def _print_kept(console: Console, root: Path, run: Run, figures: Mapping[str, Any]) -> None:
    """After a failure or Ctrl-C: what was kept, and how to start again."""
    folder = root / "runs" / run.run_id
    console.print(f"{run.status.value} after step {figures['steps']}; every process that was started has ended")
    console.print(f"kept: {folder} (records, conversations, metrics, logs/)", soft_wrap=True)
    console.print("start again with the same command: it is a new run from step 1", soft_wrap=True)
    sys.stdout.flush()
