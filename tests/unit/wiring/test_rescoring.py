"""Stored conversations through an environment that was changed: the same rewards, other ones, or none, and why."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.wiring.rescoring_house import SAID, Played, played_run
from turnmill.errors import InvalidInput, NotFound, RecordCorrupt
from turnmill.ports import Write
from turnmill.records import InvalidReason, Purpose, SampleState, encode
from turnmill.wiring.rescoring.comparison import Rescored, Verdict
from turnmill.wiring.rescoring.rescore import Rescoring, Selection, rescore

OLD = {"t1_0": 1.0, "t1_1": 0.125, "t2_0": 0.125, "t2_1": 0.25}


@pytest.fixture
async def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Played]:
    # Also where nothing can close a box.
    monkeypatch.setenv("TURNMILL_UNSAFE_ENV", "1")
    async with played_run(tmp_path / "root") as run:
        yield run


async def again(
    played: Played, selection: Selection | None = None, *, group_rewards: bool = False, **env_args: Any
) -> Rescoring:
    """The run, rescored; what it wrote itself is as it was before."""
    config = replace(played.config, env_args=env_args, group_rewards=group_rewards)
    told: list[tuple[Rescored, int]] = []
    before, files = await played.samples(), run_files(played.root)
    found = await rescore(
        played.root,
        played.run,
        config,
        selection or Selection(purposes=[Purpose.TRAIN]),
        log=played.root.parent / "environment.log",
        told=lambda rescored, num: told.append((rescored, num)),
    )
    assert [num for _, num in told] == [len(found.rescored)] * len(found.rescored)
    assert await played.samples() == before and run_files(played.root) == files
    return found


def run_files(root: Path) -> dict[Path, bytes]:
    """Of records and conversations; queues are still cleared up when the last report is answered."""
    return {path: path.read_bytes() for path in root.glob("runs/*/records/*.db*") if path.suffix != ".db-shm"}


def rewards(found: Rescoring) -> dict[str, float | None]:
    return {each.sample.sample_id: each.new for each in found.rescored}


async def test_the_same_environment_gives_the_same_rewards_to_the_last_bit(played: Played) -> None:
    found = await again(played)
    assert {sample.sample_id: sample.reward for sample in await played.samples()} == OLD
    assert rewards(found) == OLD
    for each in found.rescored:
        assert (each.verdict, each.change) == (Verdict.RESCORED, 0.0)
        assert (dict(each.metrics), each.num_calls) == (each.sample.metrics, 2)
        assert each.turn_rewards == each.sample.turn_rewards and len(each.turn_rewards) == 2
    assert found.rescored[1].turn_rewards == {"t1_1_0": 0.25, "t1_1_1": 0.0}
    comparison = found.comparison
    assert (comparison.difference, comparison.low, comparison.high) == (0.0, 0.0, 0.0)
    assert (comparison.num_changed, comparison.num_pairs, comparison.most_changed) == (0, 4, [])
    assert comparison.correlation == pytest.approx(1.0)


async def test_a_changed_reward_gives_the_expected_numbers(played: Played) -> None:
    found = await again(played, letter="o")
    assert rewards(found) == {"t1_0": 0.25, "t1_1": 0.875, "t2_0": 0.875, "t2_1": 1.0}
    comparison = found.comparison
    assert (comparison.old_mean, comparison.new_mean, comparison.difference) == (0.375, 0.75, 0.375)
    assert comparison.low is not None and comparison.high is not None
    # Two tasks: one degree of freedom.
    assert comparison.high - 0.375 == pytest.approx(12.7062 * (2 * 1.125) ** 0.5 / 4, rel=1e-4)
    assert 0.375 - comparison.low == pytest.approx(comparison.high - 0.375)
    assert [(task.task_id, task.num, task.old, task.new) for task in comparison.tasks] == [
        ("t1", 2, 0.5625, 0.5625),
        ("t2", 2, 0.1875, 0.9375),
    ]
    assert (comparison.old_pass_rate, comparison.new_pass_rate) == (0.25, 0.25)
    assert set(comparison.most_changed) == set(SAID)


async def test_groups_gain_and_lose_signal(played: Played) -> None:
    signal = (await again(played, weight=0.0)).comparison.signal
    assert (signal.num, signal.old, signal.new, signal.gained, signal.lost) == (2, 2, 1, 0, 1)
    few = await again(played, Selection(purposes=[Purpose.TRAIN], sample_ids=["t1_0", "t1_1", "t2_0"]))
    assert (few.comparison.signal.num, few.comparison.signal.num_incomplete) == (1, 1)


async def test_a_changed_prompt_diverges_where_it_is_asked_for_anything_else(played: Played) -> None:
    found = await again(played, told="Other.")
    assert found.comparison.num_diverged == 4 and found.comparison.num_pairs == 0
    for each in found.rescored:
        assert (each.verdict, each.reward, each.turn, each.num_calls) == (Verdict.DIVERGED, None, 2, 1)
        assert each.detail == "messages[2] is user 'Other.', stored is user 'Again.'"
    assert (found.comparison.difference, found.comparison.correlation) == (None, None)


async def test_more_turns_diverge_and_fewer_are_scored_on_what_they_asked_for(played: Played) -> None:
    longer = await again(played, num_turns=3)
    assert {(each.verdict, each.turn) for each in longer.rescored} == {(Verdict.DIVERGED, 3)}
    shorter = await again(played, num_turns=1)
    assert rewards(shorter) == {"t1_0": 0.25, "t1_1": 0.25, "t2_0": 0.75, "t2_1": 0.25}
    assert {(each.num_calls, each.num_stored_calls) for each in shorter.rescored} == {(1, 2)}


async def test_a_reward_that_raises_is_invalid_with_its_reason(played: Played) -> None:
    found = await again(played, is_broken=True)
    assert found.comparison.invalid == {"reward_error": 4}
    for each in found.rescored:
        assert (each.verdict, each.reason) == (Verdict.INVALID, InvalidReason.REWARD_ERROR)
        assert "reward function raising raised KeyError: 'nothing'" in (each.detail or "")


async def test_one_that_ends_the_process_of_all_costs_no_other_its_reward(played: Played) -> None:
    found = await again(played, ends="t1_1")
    assert {name: value for name, value in rewards(found).items() if value is not None} == {
        name: value for name, value in OLD.items() if name != "t1_1"
    }
    (ended,) = [each for each in found.rescored if each.verdict is Verdict.INVALID]
    assert (ended.sample.sample_id, ended.reason) == ("t1_1", InvalidReason.ENV_ERROR)


async def test_a_group_that_is_whole_is_scored_anew(played: Played) -> None:
    found = await again(played, group_rewards=True, group_weight=0.5)
    assert [each.group_reward for each in found.rescored] == [0.5, 0.0, 0.5, 0.0]
    assert rewards(found) == {"t1_0": 1.5, "t1_1": 0.125, "t2_0": 0.625, "t2_1": 0.25}
    few = await again(played, Selection(purposes=[Purpose.TRAIN], limit=3), group_rewards=True, group_weight=0.5)
    assert [each.group_reward for each in few.rescored] == [None, 0.5, 0.0]


async def test_a_selection_says_which_conversations(played: Played) -> None:
    async def chosen(**names: Any) -> list[str]:
        found = await again(played, Selection(purposes=list(Purpose), **names))
        return [each.sample.sample_id for each in found.rescored]

    await alter(played, "t1_1", state=SampleState.TRAINED, step=3)
    assert await chosen() == list(SAID)
    assert await chosen(steps=(2, 3)) == ["t1_1"]
    assert await chosen(limit=1) == ["t2_1"]
    assert await chosen(sample_ids=["t2_0"]) == ["t2_0"]
    with pytest.raises(InvalidInput, match="--sample t9: run run-1 has no such rollout"):
        await chosen(sample_ids=["t9"])
    with pytest.raises(InvalidInput, match="has no conversation that was brought to an end among 0 rollouts"):
        await chosen(steps=(4, 4))


async def test_what_never_ended_is_left_out_and_a_mended_reward_is_new(played: Played) -> None:
    await alter(played, "t1_0", state=SampleState.INVALID, reward=None, reason=InvalidReason.REWARD_ERROR)
    await alter(played, "t2_1", state=SampleState.INVALID, reward=None, reason=InvalidReason.INFRA)
    found = await again(played)
    assert found.num_left_out == 1 and found.comparison.num_repaired == 1
    assert [(each.sample.sample_id, each.old, each.new) for each in found.rescored] == [
        ("t1_0", None, 1.0),
        ("t1_1", 0.125, 0.125),
        ("t2_0", 0.125, 0.125),
    ]
    assert found.comparison.num_pairs == 2


async def test_an_environment_that_can_t_be_loaded_and_a_lost_call_end_it(played: Played) -> None:
    with pytest.raises(InvalidInput, match="has no argument 'letters'"):
        await again(played, letters="o")
    missing = replace(played.config, env="nowhere", env_args={})
    with pytest.raises(NotFound, match="nowhere"):
        await rescore(
            played.root,
            played.run,
            missing,
            Selection(purposes=[Purpose.TRAIN]),
            log=played.root.parent / "log",
            told=lambda rescored, num: None,
        )
    await alter(played, "t1_0", calls=("t1_0_0", "t1_0_9"))
    with pytest.raises(RecordCorrupt, match="t1_0_9 is not recorded any more"):
        await again(played)


async def alter(played: Played, sample_id: str, **changes: Any) -> None:
    """A sample as another end would have left it."""
    sample = replace(await played.world.sample(sample_id), **changes)
    sample = replace(sample, report_digest=sample.expected_report_digest())
    await played.world.ports.records.write([Write(key=sample.key, value=encode(sample), expected=None)])
