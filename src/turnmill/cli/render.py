"""How runs look in a terminal: sparklines, one-line progress, tables. Pure functions from records to renderables."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnmill.cli.options import TRAINING_ALONE
from turnmill.pipeline.promotion import worse_lines
from turnmill.records import Alert, DeliveryState, Metric, Run, RunKind, RunStatus, Severity
from turnmill.wiring.reading.figures import max_steps_of as max_steps_of
from turnmill.wiring.reading.figures import rewards as rewards
from turnmill.wiring.reading.figures import stage_s
from turnmill.wiring.reading.figures import summary as summary

BARS = "▁▂▃▄▅▆▇█"
STYLES = {"running": "cyan", "done": "green", "failed": "red"}
RUN_STYLES = {
    RunStatus.QUEUED: "blue",
    RunStatus.ACTIVE: "cyan",
    RunStatus.SUCCEEDED: "green",
    RunStatus.FAILED: "red",
    RunStatus.CANCELLED: "yellow",
    RunStatus.DUPLICATE: "dim",
    RunStatus.INTERRUPTED: "red",
}
SEVERITY_STYLES = {
    Severity.INFO: "blue",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
    Severity.CRITICAL: "bold red",
}
# Of an alert, in a list of them.
_MOST_ERROR_LINES = 5


def sparkline(values: Sequence[float], *, width: int = 50) -> str:
    """One character a bucket of neighbouring values, by their mean, on the scale 0..1, wider where values are."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    width = min(width, len(values))
    text = ""
    for i in range(width):
        bucket = values[i * len(values) // width : (i + 1) * len(values) // width]
        share = (sum(bucket) / len(bucket) - low) / (high - low)
        text += BARS[min(len(BARS) - 1, max(0, int(share * len(BARS))))]
    return text


def duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 4 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def eta_s(metrics: Sequence[Metric], max_steps: int) -> float | None:
    """Seconds to the last step at the pace of the last ten steps; None before there is a pace."""
    recent = metrics[-11:]
    if len(recent) < 2:
        return None
    pace = (recent[-1].time - recent[0].time) / (recent[-1].step - recent[0].step)
    return pace * max(0, max_steps - recent[-1].step)


def step_line(metric: Metric, max_steps: int) -> str:
    """One step in one line, for logs and pipes."""
    v = metric.values
    held_out = f"  held-out {text}" if (text := _held_out(metric)) else ""
    return (
        f"step {metric.step}/{max_steps}  reward {v.get('reward_mean', float('nan')):.3f}  "
        f"solved {v.get('solved', float('nan')):.3f}{held_out}{_age(metric)}  {_detail(metric)}"
    )


def _held_out(metric: Metric) -> str:
    """What the evaluation after a step found; empty where there was none."""
    v = metric.values
    if "val_failed" in v:
        return "failed"
    if "val_solved" not in v:
        return ""
    return f"{v['val_solved']:.3f} ({v['val_solved_low']:.3f} to {v['val_solved_high']:.3f})"


def held_out_curve(metrics: Sequence[Metric]) -> Text | None:
    """The share of held-out rollouts that were solved, by evaluation, in one line; None where none was played."""
    found = [metric for metric in metrics if "val_solved" in metric.values]
    if not found:
        return None
    values = [metric.values["val_solved"] for metric in found]
    steps = f"step {found[-1].step}" if len(found) == 1 else f"steps {found[0].step} to {found[-1].step}"
    return Text.assemble(
        ("held-out ", "dim"),
        (sparkline(values), "green"),
        (f"  {values[0]:.3f} → {_held_out(found[-1])} at {steps}", "dim"),
    )


def _detail(metric: Metric) -> str:
    """In less than 80 columns."""
    v = metric.values
    return (
        f"{v.get('num_generated', 0):.0f} rollouts  loss {v.get('loss', float('nan')):+.4f}  "
        f"audit {v.get('audit_max', float('nan')):.1e}  "
        f"{v.get('generate_s', 0):.1f} s generate + {v.get('train_s', 0):.1f} s train"
    )


def _age(metric: Metric) -> str:
    """How many steps old the conversations of a step were; empty where none was older than its weights."""
    v = metric.values
    return f"  age {v['staleness_mean']:.1f} (most {v['staleness_max']:.0f})" if v.get("staleness_max") else ""


def lineage_lines(run: Run) -> list[str]:
    """What a run has to do with others."""
    lines = [f"retry of run {run.retry_of}"] if run.retry_of else []
    return [*lines, f"retried as run {run.retried_as}"] if run.retried_as else lines


def stages_text(run: Run) -> Text:
    """The stages of a run with how long each took."""
    text = Text()
    for stage in run.current_stages:
        if text:
            text.append(" → ")
        text.append(stage.name, style=STYLES.get(stage.state, ""))
        if (seconds := stage_s(run, stage)) is not None:
            text.append(f" {duration(seconds)}", style="dim")
        if stage.state == "running" and stage.detail:
            text.append(f" ({stage.detail})", style="dim")
    return text


def live_view(run: Run, metrics: Sequence[Metric]) -> RenderableType:
    """What `watch`, `run` and `demo` show while a run goes on."""
    max_steps = max_steps_of(run)
    head = Text.assemble(("run ", "dim"), (run.run_id, "bold"), "  ", (run.status.value, RUN_STYLES[run.status]))
    rows: list[RenderableType] = [head, stages_text(run)]
    values = rewards(metrics)
    if values:
        left = eta_s(metrics, max_steps)
        pace = f"  about {duration(left)} left" if left and run.status is RunStatus.ACTIVE else ""
        rows.append(
            Text.assemble(
                ("step ", "dim"),
                f"{metrics[-1].step}/{max_steps}",
                ("  reward ", "dim"),
                (f"{values[-1]:.3f}", "bold"),
                (_age(metrics[-1]), "dim"),
                (pace, "dim"),
            )
        )
        rows.append(curve(metrics))
        if (held_out := held_out_curve(metrics)) is not None:
            rows.append(held_out)
        rows.append(Text(_detail(metrics[-1]), style="dim"))
    return Group(*rows)


def curve(metrics: Sequence[Metric]) -> Text:
    """The reward of all steps in one line."""
    values = rewards(metrics)
    return Text.assemble((sparkline(values), "magenta"), (f"  {values[0]:.2f} → {values[-1]:.2f}", "dim"))


def origin(run: Run, folder: Path) -> Text:
    """Which run this is, where it is kept, and each parameter that counts and is no default, by what set it."""
    unused = TRAINING_ALONE if run.kind is RunKind.EVAL else frozenset()
    text = Text.assemble(("run ", "dim"), (run.run_id, "bold"), (" in ", "dim"), f"{folder}\n")
    text.append("model ", style="dim").append(str(run.config["base_model"]))
    by_source: dict[str, list[str]] = {}
    for name, source in run.sources.items():
        if source == "recipe.toml" and name not in unused:
            by_source.setdefault("its recipe.toml", []).append(f"{name}={_plain(run.config[name])}")
        elif source not in ("default", "recipe.toml") and name != "base_model":
            by_source.setdefault("set for this run", []).append(f"{name}={_plain(run.config[name])} ({source})")
    for source in sorted(by_source):
        text.append(f"\n{source}: ", style="dim").append(", ".join(by_source[source]), style="dim")
    return text


def _plain(value: object) -> str:
    """As it is written in TOML or on the command line, texts without their quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def curve_table(metrics: Sequence[Metric], *, rows: int = 10) -> Table:
    """The reward curve in about `rows` rows, each the mean of its steps."""
    table = Table(box=SIMPLE, caption="reward: mean of all valid rollouts", caption_justify="left")
    for name in ("steps", "reward", "solved", "rollouts", "without signal", "audit max"):
        table.add_column(name, justify="right")
    size = max(1, -(-len(metrics) // rows))
    for start in range(0, len(metrics), size):
        part = metrics[start : start + size]

        def mean(key: str, part: Sequence[Metric] = part) -> float:
            return sum(m.values.get(key, 0.0) for m in part) / len(part)

        table.add_row(
            str(part[0].step) if len(part) == 1 else f"{part[0].step}–{part[-1].step}",
            f"{mean('reward_mean'):.3f}",
            f"{mean('solved'):.3f}",
            f"{mean('num_generated'):.0f}",
            f"{mean('dropped_no_signal'):.0f}",
            f"{max(m.values.get('audit_max', 0.0) for m in part):.1e}",
        )
    return table


def runs_table(found: Sequence[tuple[Run, Sequence[Metric]]]) -> Table:
    """One row a run, in less than 80 columns."""
    table = Table(box=SIMPLE)
    table.add_column("run", no_wrap=True)
    for name in ("kind", "status"):
        table.add_column(name)
    for name in ("steps", "reward", "held-out"):
        table.add_column(name, justify="right")
    for run, metrics in found:
        figures = summary(run, metrics)
        solved = [figures[name] for name in ("eval_before", "eval_after", "eval") if figures[name] is not None]
        reward = figures["reward_last10"]
        table.add_row(
            run.run_id,
            run.kind.value,
            Text(run.status.value, style=RUN_STYLES[run.status]),
            f"{figures['steps']}/{max_steps_of(run)}" if run.kind is RunKind.TRAIN else "",
            "" if reward is None else f"{reward:.3f}",
            " → ".join(f"{share:.3f}" for share in solved),
        )
    return table


def parameters_table(run: Run) -> Table:
    """Each parameter that has not its default, with its value and where it came from."""
    table = Table(box=SIMPLE)
    table.add_column("parameter")
    table.add_column("value")
    table.add_column("source", style="dim")
    for name, value in run.config.items():
        source = run.sources.get(name, "default")
        if source != "default":
            table.add_row(Text(name, style="bold"), Text(_plain(value)), Text(source))
    return table


def defaults_text(run: Run) -> Text:
    """The other parameters: those that nobody set, in one paragraph."""
    unset = [f"{name}={_plain(value)}" for name, value in run.config.items() if name not in _set_names(run)]
    return Text.assemble(("defaults: ", "bold"), ", ".join(unset), style="dim")


def _set_names(run: Run) -> set[str]:
    return {name for name, source in run.sources.items() if source != "default"}


def evaluation_lines(run: Run) -> list[str]:
    """The share of held-out rollouts that were solved, with the half width of its 95 % interval."""
    found = {
        name: result
        for stage in run.current_stages
        if stage.name == "Evaluate"
        for name, result in stage.result.items()
    }
    titles = {"before": "held-out before training", "after": "held-out after training", "eval": "held-out"}
    lines = []
    for name, result in found.items():
        lines.append(
            f"{titles[name]}: {result['solved']:.3f} solved "
            f"(95 % interval {result['solved_low']:.3f} to {result['solved_high']:.3f}; "
            f"{result['num_valid']} rollouts, {result['num_tasks']} tasks, {result['num_invalid']} invalid)"
        )
        if several := several_text(result):
            lines.append(f"  {several}")
    return lines


def several_text(result: Mapping[str, Any]) -> str:
    """What tasks that were played more than once tell: pass@k (one of k is enough) and pass^k (all k are)."""
    parts = [
        f"{sign}{k} {estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"
        for kind, sign in (("pass_at", "pass@"), ("pass_hat", "pass^"))
        for k, estimate in result.get(kind, {}).items()
        if k != "1"
    ]
    return ", ".join(parts)


_BASELINE_TITLES = {"0": "none", "100": "all"}
_BASELINE_WIDTH = 30


def baseline_lines(figures: Mapping[str, Any]) -> list[str]:
    """What the base model could do on tasks of the training data: the share that passed, and a bar of tasks each."""
    ignored = ", ignored" if figures["is_ignored"] else ""
    verdict = f" ({figures['verdict'].replace('_', ' ')}{ignored})" if figures["verdict"] != "signal" else ""
    num_tasks = figures["num_tasks"]
    lines = [
        f"baseline: {figures['num_passed']} of {figures['num_rollouts']} rollouts of the base model pass{verdict}, "
        f"{figures['pass_rate']:.3f} (95 % interval {figures['low']:.3f} to {figures['high']:.3f}); "
        f"mean reward {figures['reward_mean']:.3f}",
        "1 task by how many of its rollouts pass:"
        if num_tasks == 1
        else f"{num_tasks} tasks by how many of theirs pass:",
    ]
    most = max(figures["histogram"].values())
    for name, num in figures["histogram"].items():
        bar = "█" * -(-num * _BASELINE_WIDTH // most)
        title = _BASELINE_TITLES.get(name, f"{name.replace('-', '–')} %")
        lines.append(f"  {title:>8}  {bar}{' ' if bar else ''}{num}")
    return lines


def promotion_lines(run: Run) -> list[str]:
    """Whether the model was published, where, and why."""
    published = {stage.name: stage.result for stage in run.current_stages}.get("Publish", {})
    if not published:
        return []
    promotion = published["promotion"]
    if promotion["is_published"]:
        return [f"published: {published['location']} ({promotion['rule']}: {promotion['reason']})"]
    return [
        f"not published ({promotion['rule']}: {promotion['reason']}); the checkpoint stays, "
        "and promotion = always publishes any",
        *worse_lines(promotion),
    ]


def result_lines(run: Run, metrics: Sequence[Metric]) -> list[str]:
    """What came of a run, in sentences."""
    figures = summary(run, metrics)
    lines = []
    if figures["reward_first"] is not None:
        last = min(10, len(rewards(metrics)))
        later = f", {figures['reward_last10']:.3f} over the last {last} of {figures['steps']}" if last > 1 else ""
        lines.append(
            f"reward {figures['reward_first']:.3f} at the first step{later} "
            f"({duration(figures['train_s'] or 0)}, {figures['num_generated']} rollouts)"
        )
    lines += evaluation_lines(run)
    if figures["checkpoint"]:
        lines.append(f"final checkpoint: {figures['checkpoint']}")
    lines += promotion_lines(run)
    return lines


def _state(alert: Alert) -> str:
    if alert.resolved_at is None:
        return "open"
    return "over since " + datetime.fromtimestamp(alert.resolved_at).strftime("%Y-%m-%d %H:%M:%S")


def alert_lines(alert: Alert) -> list[Text]:
    """When, how bad, what; then the error, the next command, and deliveries that are not done."""
    when = datetime.fromtimestamp(alert.created_at).strftime("%Y-%m-%d %H:%M:%S")
    again = f" (and {alert.num_repeats} times again)" if alert.num_repeats else ""
    lines = [
        Text.assemble(
            f"{when}  ", (f"{alert.severity:8}", SEVERITY_STYLES[alert.severity]), f"  {alert.summary}{again}"
        ),
        Text(f"    {alert.kind} {alert.alert_id}: {_state(alert)}", style="dim"),
    ]
    if alert.error:
        lines += [Text(f"    {line}") for line in alert.error.splitlines()[:_MOST_ERROR_LINES]]
    if alert.conversation:
        lines.append(Text(f"    conversation: {alert.conversation}", style="dim"))
    lines.append(Text(f"    next: {alert.command}", style="dim", no_wrap=True))
    for delivery in alert.deliveries:
        if delivery.state in (DeliveryState.PENDING, DeliveryState.DEAD):
            why = f": {delivery.last_error}" if delivery.last_error else ""
            lines.append(Text(f"    {delivery.channel}: {delivery.state} after {delivery.attempts} attempts{why}"))
    return lines
