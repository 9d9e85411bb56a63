"""From a task of the data to the row that a verifiers environment plays: it takes the place of its own dataset.

metadata (prompt, answer, info, task) -> {prompt, example_id, answer, info, ...} -> Environment.rollout
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnmill.environment.base import opening_messages
from turnmill.errors import DataError
from turnmill.records import Task, digest_of, encode

# Hex digits of an example id: as many as JSON readers keep exact.
_ID_DIGITS = 12
# What stands in a part of a gold reply that is not the answer.
_FILLING = "..."
# Keys of `info` that verifiers reads as something else, or refuses.
_TAKEN = {
    "task": "verifiers takes it for the whole row; give it another name",
    "oai_tools": "verifiers takes tools from `tool_defs`, as [{name, description, parameters}]",
}


def row_of(task: Task, *, system_prompt: str | None, few_shot: Sequence[Any] | None) -> dict[str, Any]:
    """The row of `task`; raises `DataError` naming what can't be played.

    A prompt that is a text is a question: system prompt and examples come before it. One that is a list of messages
    gets the system prompt where it does not begin with one of its own.
    """
    opening = opening_messages(task)
    prompt: list[Any] = [] if opening[0].get("role") == "system" else _system(system_prompt)
    if isinstance(task.metadata["prompt"], str):
        prompt += few_shot or ()
    row = {**task.metadata, "prompt": [*prompt, *opening], "example_id": _example_id(task.metadata)}
    if "info" in row:
        row["info"] = _info(task)
    # verifiers keeps the name `task` for the row itself, and refuses a text there.
    if "task" in row:
        row["task_name"] = row.pop("task")
    return {name: value for name, value in row.items() if value is not None}


def _system(system_prompt: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system_prompt}] if system_prompt else []


def _example_id(metadata: Mapping[str, Any]) -> int:
    """The same for all rollouts of a task, in each run."""
    return int(digest_of(encode(metadata))[:_ID_DIGITS], 16)


def _info(task: Task) -> dict[str, Any] | None:
    info = task.metadata["info"]
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except json.JSONDecodeError as error:
            raise DataError(f"task {task.id}: metadata.info is not valid JSON: {error}") from error
    if info is not None and not isinstance(info, dict):
        raise DataError(f"task {task.id}: metadata.info must be an object or its JSON text, not {info!r:.80}")
    for name, why in _TAKEN.items():
        if name in (info or {}):
            raise DataError(f"task {task.id}: metadata.info has the key {name!r}: {why}")
    return info


# ---------------------------------------------------------------- gold


def gold_reply(answer: str, parser: Any) -> str:
    """A reply from which `parser` reads `answer`; where none is found, the best guess."""
    replies = list(_replies(answer, parser))
    for reply in replies:
        read = parser.parse_answer([{"role": "assistant", "content": reply}])
        if read is not None and str(read).strip() == answer.strip():
            return reply
    return replies[0]


def _replies(answer: str, parser: Any) -> Iterator[str]:
    fields = list(parser.get_fields()) if hasattr(parser, "get_fields") else []
    if fields:
        # Without an answer field, the last: one thinks first.
        told = getattr(parser, "answer_field", None)
        told = told if told in fields else fields[-1]
        yield parser.format(**{field: answer if field == told else _FILLING for field in fields})
    for thought, said in itertools.product(("", f"<think>\n{_FILLING}\n</think>\n"), (answer, f"\\boxed{{{answer}}}")):
        yield thought + said
