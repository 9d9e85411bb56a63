"""`turnmill conversations`: what was said in a run's rollouts, on records that the embedded backend keeps."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.cli.test_queues_command import make_run
from turnmill.backends.embedded import open_run
from turnmill.cli.commands import turnmill
from turnmill.conversation.history import write_calls, write_samples
from turnmill.errors import NotFound
from turnmill.records import (
    Call,
    FinishReason,
    InvalidReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Sampling,
)

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"country": "Peru"}'}},
        {"id": "call00002", "type": "function", "function": {"name": "look_up", "arguments": '{"country": "Chad"}'}},
    ],
}


def sample_of(sample_id: str, purpose: Purpose = Purpose.TRAIN, **changes: Any) -> SampleRecord:
    known: dict[str, Any] = {
        "run_id": "r1",
        "purpose": purpose,
        "sample_id": sample_id,
        "task_id": sample_id.partition("_")[0],
        "group_id": "g",
        "state": SampleState.REQUESTED,
        "created_at": 1.0,
        "deadline": 2.0,
        "request": RolloutRequest(
            sample_id=sample_id,
            timestamp="2026-01-01T00:00:00Z",
            max_length=100,
            rewards={"range": [0.0, 1.0]},
            data={},
        ),
    }
    return SampleRecord(**{**known, **changes})


def call_of(number: int, said: str, reply: Any, *, parent: Call | None = None, **changes: Any) -> Call:
    known: dict[str, Any] = {
        "run_id": "r1",
        "purpose": Purpose.TRAIN,
        "sample_id": "peru_0",
        "call_id": f"peru_0_{number}",
        "attempt": 1,
        "parent": None if parent is None else parent.call_id,
        "parent_digest": "" if parent is None else parent.digest,
        "choice": 0,
        "request_digest": "",
        "sampling": Sampling(),
        "messages": [{"role": "user", "content": said}],
        "reply": reply if isinstance(reply, dict) else {"role": "assistant", "content": reply},
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [-1.0, -1.0],
        "version": "1.4",
        "finish_reason": FinishReason.STOP,
        "created_at": 1.0,
    }
    return Call(**{**known, **changes}).sealed()


def store(root: Path, samples: list[SampleRecord], calls: list[Call]) -> None:
    make_run(root)

    async def write() -> None:
        ports = open_run(root, "r1", num_replicas=0)
        await write_samples(ports.records, [(sample, 0) for sample in samples])
        await write_calls(ports.records, calls)
        ports.close()

    asyncio.run(write())


def shown(root: Path, *arguments: str) -> str:
    done = CliRunner().invoke(turnmill, ["conversations", "r1", *arguments, "--root", str(root)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A rollout that calls tools, asks for two choices and branches, and what a dead attempt said."""
    first = call_of(0, "Where is it warm?", CALLING, tools=[TOOL], finish_reason=FinishReason.TOOL_CALLS, attempt=2)
    answers = [{"role": "tool", "tool_call_id": "call00001", "content": "Lima"}]
    chosen, other = (
        call_of(
            number, "", f"In {city}.\x1b[31m", parent=first, messages=answers, choice=choice, num_choices=2, attempt=2
        )
        for number, city, choice in ((1, "Lima", 0), (2, "Oslo", 1))
    )
    last = call_of(3, "Sure?", "Yes.", parent=chosen, attempt=2)
    own = call_of(4, "Sub-agent", "Done.", attempt=2)
    lost = call_of(5, "Sure?", "No.", parent=other)
    calls = [first, chosen, other, last, own, lost]
    played = sample_of(
        "peru_0",
        state=SampleState.TRAINED,
        step=3,
        versions=("1.0", "1.1"),
        attempt=2,
        reward=0.5,
        metrics={"turns": 3.0},
        turn_rewards={"peru_0_3": -0.25},
        stop_reason="end_of_conversation",
        calls=tuple(call.call_id for call in calls[:-1]),
    )
    failed = sample_of(
        "chad_0", state=SampleState.INVALID, reason=InvalidReason.ENV_ERROR, detail="KeyError: 'x'", created_at=2.0
    )
    evaluated = sample_of("peru_0", Purpose.EVAL, state=SampleState.LEASED, created_at=3.0)
    store(tmp_path / "root", [played, failed, evaluated], calls)
    return tmp_path / "root"


def test_a_trained_rollout_says_which_weights_sampled_it_and_how_old_they_were(root: Path) -> None:
    assert "step 3, weights 1.0 to 1.1, 2 steps old" in shown(root, "peru_0")
    (trained,) = [json.loads(line) for line in shown(root, "--step", "3", "--json").splitlines()]
    assert trained["versions"] == ["1.0", "1.1"]


def test_rollouts_are_listed_with_rewards_and_reasons(root: Path) -> None:
    text = shown(root)
    assert "0.500" in text and "env_error: KeyError: 'x'" in text and "turnmill conversations r1 peru_0" in text

    def listed(*arguments: str) -> list[tuple[str, str]]:
        objects = [json.loads(line) for line in shown(root, *arguments, "--json").splitlines()]
        return [(each["sample_id"], each["purpose"]) for each in objects]

    assert listed() == [("peru_0", "train"), ("chad_0", "train"), ("peru_0", "eval")]
    assert listed("--last", "1") == listed("--purpose", "eval") == [("peru_0", "eval")]
    assert listed("--invalid") == listed("--task", "chad") == [("chad_0", "train")]
    assert listed("--step", "3") == [("peru_0", "train")]
    assert listed("--step", "4") == []


def test_a_rollout_shows_tool_calls_choices_and_branches(root: Path) -> None:
    text = shown(root, "peru_0", "--purpose", "train")
    parts = [
        "reward 0.5, turns 3",
        "tools: look_up",
        "user      Where is it warm?",
        'assistant → look_up({"country": "Peru"})',
        '          → look_up({"country": "Chad"})',
        "tool      Lima",
        "peru_0_1 · choice 1 of 2 · 2 tokens · stop · weights 1.4",
        "assistant In Lima.",
        "user      Sure?",
        "weights 1.4 · turn reward -0.25",
        "assistant Yes.",
        "branch: goes on from peru_0_0",
        "peru_0_2 · choice 2 of 2",
        "of attempt 1, not used",
        "branch: a conversation of its own",
        "user      Sub-agent",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), text
    # What only a terminal would read is written out.
    assert "\x1b" not in text and r"\x1b[31m" in text


def test_json_holds_all_of_it(root: Path) -> None:
    train, evaluated = (json.loads(line) for line in shown(root, "peru_0", "--json").splitlines())
    assert (train["reward"], train["step"], evaluated["calls"]) == (0.5, 3, [])
    first, *_, lost = train["calls"]
    assert first["reply"]["tool_calls"][0]["function"]["name"] == "look_up"
    assert (first["is_used"], lost["is_used"], lost["parent"]) == (True, False, "peru_0_2")
    assert [call["turn_reward"] for call in train["calls"]] == [None, None, None, -0.25, None, None]
    assert (first["num_prompt_tokens"], first["num_sampled_tokens"], first["num_trained_tokens"]) == (1, 2, 2)


def test_what_is_not_there_is_said(root: Path) -> None:
    for arguments, text in ((["r1", "nobody"], "no rollout 'nobody'"), (["r2"], "no run 'r2'")):
        done = CliRunner().invoke(turnmill, ["conversations", *arguments, "--root", str(root)])
        assert isinstance(done.exception, NotFound) and text in str(done.exception)
    assert "no such rollouts" in shown(root, "--step", "9")
    assert "nothing was said" in shown(root, "chad_0")
