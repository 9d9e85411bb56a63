"""`turnmill conversations`: what was said in the rollouts of a run. It reads and changes nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnmill.cli.show import at_root, choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole, command, say
from turnmill.records import Call, Purpose, SampleRecord, SampleState, Version
from turnmill.wiring.reading.conversations import Conversation, read_conversations, read_samples, summary_of
from turnmill.wiring.reading.runs import look_at_runs

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_NUM_LISTED = 20


@click.command(short_help="Read what was said in a run's rollouts.")
@click.argument("run_id", metavar="RUN")
@click.argument("sample_id", metavar="[ROLLOUT]", required=False)
@click.option("--purpose", type=click.Choice([purpose.value for purpose in Purpose]), help="Only rollouts for this.")
@click.option("--step", type=click.IntRange(min=1), help="List those of one optimizer step.")
@click.option("--task", metavar="ID", help="List those of one task.")
@click.option("--invalid", is_flag=True, help="List those that have no reward, with the reason.")
@click.option("--last", type=click.IntRange(min=1), default=_NUM_LISTED, show_default=True, help="List so many.")
@root_option
@json_option("Print one object a rollout; of ROLLOUT with all that was said.")
def conversations(
    run_id: str,
    sample_id: str | None,
    purpose: str | None,
    step: int | None,
    task: str | None,
    invalid: bool,
    last: int,
    root: Path,
    as_json: bool,
) -> None:
    """List the rollouts of RUN, the last ones; with ROLLOUT show all that was said in it.

    Messages, tool calls and their answers, in the order of the conversation; where it branches (sub-agents, several
    choices, a changed history) each branch follows what it goes on from.
    """
    run = choose_run(look_at_runs(root), root, run_id)
    purposes = list(Purpose) if purpose is None else [Purpose(purpose)]
    if sample_id is not None:
        for conversation in read_conversations(root, run, sample_id, purposes):
            _show(conversation, as_json=as_json)
        return
    samples = [
        sample
        for sample in read_samples(root, run, purposes)
        if (step is None or sample.step == step)
        and (task is None or sample.task_id == task)
        and (not invalid or sample.state is SampleState.INVALID)
    ]
    if as_json:
        for sample in samples[-last:]:
            click.echo(json.dumps(summary_of(sample)))
        return
    if not samples:
        click.echo("no such rollouts", err=True)
        return
    console = PlainConsole()
    console.print(_table(samples[-last:]))
    if len(samples) > last:
        say(console, Text(f"the last {last} of {len(samples)}; --last N lists more", style="dim"))
    say(console, command(f"read one: turnmill conversations {run.run_id} {samples[-1].sample_id}{at_root(root)}"))


def _table(samples: Sequence[SampleRecord]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("rollout", "for", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "reward", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end", overflow="fold")
    for sample in samples:
        table.add_row(
            _plain(sample.sample_id),
            sample.purpose.value,
            sample.state.value,
            "" if sample.step is None else str(sample.step),
            _reward(sample),
            str(len(sample.calls)),
            _plain(_end(sample)),
        )
    return table


def _reward(sample: SampleRecord) -> str:
    return "" if sample.reward is None else f"{sample.reward:.3f}"


def _end(sample: SampleRecord) -> str:
    """How it ended, in words."""
    if sample.reason is not None:
        return f"{sample.reason}: {sample.detail}" if sample.detail else sample.reason.value
    why = f"dropped: {sample.drop_reason}" if sample.drop_reason is not None else ""
    return ", ".join(filter(None, (sample.stop_reason, why)))


# ---------------------------------------------------------------- one rollout


def _show(conversation: Conversation, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(conversation.as_object()))
        return
    console, sample = PlainConsole(), conversation.sample
    say(console, Text.assemble(("rollout ", "dim"), (_plain(sample.sample_id), "bold"), f" {sample.purpose.value}"))
    say(console, " · ".join(filter(None, (sample.state.value, _worth(sample), _plain(_end(sample)), _weights(sample)))))
    for call, is_next in conversation.branches():
        for text in _lines(conversation, call, is_next=is_next):
            say(console, text)
    if not conversation.calls:
        say(console, Text("nothing was said", style="dim"))


def _weights(sample: SampleRecord) -> str:
    """Which versions sampled what is trained, and how many steps before."""
    if sample.step is None or sample.versions is None:
        return ""
    oldest, newest = sample.versions
    age = sample.step - 1 - Version.parse(oldest).n
    span = oldest if oldest == newest else f"{oldest} to {newest}"
    return f"step {sample.step}, weights {span}" + (f", {age} step{'s' if age > 1 else ''} old" if age else "")


def _worth(sample: SampleRecord) -> str:
    if sample.reward is None:
        return ""
    metrics = "".join(f", {_plain(name)} {value:g}" for name, value in sample.metrics.items())
    group = f" + {sample.group_reward:g} of its group" if sample.group_reward is not None else ""
    return f"reward {sample.reward:g}{group}{metrics}"


def _lines(conversation: Conversation, call: Call, *, is_next: bool) -> Iterator[Text]:
    """A call: from where it goes on where that is not seen, what was said to the model, and its reply."""
    yield Text("")
    if not is_next and call is not conversation.calls[0]:
        from_where = f"goes on from {_plain(call.parent)}" if call.parent is not None else "a conversation of its own"
        yield Text(f"branch: {from_where}", style="bold")
    if call.tools:
        yield Text(f"tools: {', '.join(_plain(_tool_name(tool)) for tool in call.tools)}", style="dim")
    for message in call.messages:
        yield from _message(message)
    yield Text(_about(conversation, call), style="dim")
    yield from _message(call.reply)


def _about(conversation: Conversation, call: Call) -> str:
    parts = [_plain(call.call_id)]
    if call.num_choices > 1:
        parts.append(f"choice {call.choice + 1} of {call.num_choices}")
    parts += [f"{call.num_sampled} tokens", call.finish_reason.value, f"weights {call.version}"]
    if (worth := conversation.sample.turn_rewards.get(call.call_id)) is not None:
        parts.append(f"turn reward {worth:g}")
    if not conversation.is_used(call):
        parts.append(f"of attempt {call.attempt}, not used")
    return " · ".join(parts)


def _message(message: Mapping[str, Any]) -> Iterator[Text]:
    """A message: its role before the first line, and the tools that it calls."""
    role = str(message.get("role") or "assistant")
    label = (f"{role:<10}", _ROLES.get(role, ""))
    calls = message.get("tool_calls") or ()
    text = _content(message.get("content"))
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str) and thoughts:
        yield Text.assemble(label, (_indented(f"(thinks) {thoughts}"), "dim"))
        label = (" " * 10, "")
    if text or not (calls or thoughts):
        yield Text.assemble(label, _indented(text) if text else ("(empty)", "dim"))
        label = (" " * 10, "")
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield Text.assemble(label, ("→ ", "dim"), (_plain(str(function.get("name"))), "bold"), f"({_indented(shown)})")
        label = (" " * 10, "")


def _content(content: Any) -> str:
    """The text of a message; what is no text, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(part.get("text", json.dumps(part)) if isinstance(part, dict) else str(part) for part in content)
    return json.dumps(content)


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or {}).get("name"))


def _indented(text: str) -> str:
    """Further lines below the first one."""
    return ("\n" + " " * 10).join(_plain(line) for line in text.split("\n"))


def _plain(text: str) -> str:
    """Without what a terminal would act on: a model says anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
