"""Gradients made ahead: in the order of the batch, each group once, and none left over."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.config import Config
from turnmill.training.ahead import Ahead
from turnmill.training.samples import Row, TrainingSample
from turnmill.training.trainer import Trainer


class Recorder(Trainer):
    """Takes groups when it is let, and remembers them."""

    def __init__(self, base_model: Path, config: Config) -> None:
        super().__init__(base_model, config)
        self.may_go = threading.Event()
        self.begun: list[str] = []
        self.taken: list[tuple[str, int]] = []

    def accumulate(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        threads: int,
        *,
        version: str | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        keys = [group[0].key for group in groups]
        self.begun += keys
        if "quick" not in keys:
            assert self.may_go.wait(10)
        if "broken" in keys:
            raise RuntimeError("this group is broken")
        after()
        self.taken += [(key, threads) for key in keys]

    def abandon(self) -> None:
        self.taken = []


def group(key: str, num_positions: int = 600) -> list[TrainingSample]:
    row = Row(
        key=key,
        token_ids=[7] * num_positions,
        loss_mask=[0] * num_positions,
        logprobs=[0.0] * num_positions,
        temperatures=[1.0] * num_positions,
        spans=(),
    )
    return [TrainingSample(key=key, reward=1.0, rows=(row,))]


@pytest.fixture
def recorder(tiny_model: Path, small_config: Config) -> Recorder:
    return Recorder(tiny_model, replace(small_config, trainer_threads=4))


async def begun(ahead: Ahead, num_groups: int) -> None:
    async with asyncio.timeout(10):
        while ahead.num_begun < num_groups:  # noqa: ASYNC110 (it tells nobody that it has begun)
            await asyncio.sleep(0)


async def test_what_is_offered_meanwhile_waits_and_the_rest_is_made_at_once_on_all_cores(recorder: Recorder) -> None:
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group("a")])
    await begun(ahead, 1)
    ahead.offer([group("b")])
    parts = ahead.complete([group("c"), group("d")], is_alone=True)
    assert parts == (1, 3)
    recorder.may_go.set()
    await ahead.wait()
    assert recorder.taken == [("a", 1), ("b", 4), ("c", 4), ("d", 4)]


async def test_the_rest_is_begun_beside_what_runs_and_added_behind_it(recorder: Recorder) -> None:
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group("a")])
    await begun(ahead, 1)
    ahead.complete([group("quick")], is_alone=True)
    async with asyncio.timeout(10):
        while recorder.begun != ["a", "quick"]:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0)
    assert recorder.taken == []
    recorder.may_go.set()
    await ahead.wait()
    assert recorder.taken == [("a", 1), ("quick", 4)]


async def test_when_the_rest_fails_nothing_is_being_added_any_more(recorder: Recorder) -> None:
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group("a")])
    await begun(ahead, 1)
    ahead.complete([group("quick"), group("broken")], is_alone=True)
    failed = asyncio.create_task(ahead.wait())
    await asyncio.sleep(0.05)
    assert not failed.done(), "the part before it still runs"
    recorder.may_go.set()
    with pytest.raises(RuntimeError, match="broken"):
        await failed
    assert recorder.taken == [("a", 1)]


async def test_a_part_is_closed_once_it_is_large_enough(recorder: Recorder) -> None:
    recorder.may_go.set()
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group(key) for key in "abcde"])
    await begun(ahead, 5)
    parts = ahead.complete([], is_alone=True)
    assert parts == (2, 2, 1)
    await ahead.wait()
    assert [key for key, _ in recorder.taken] == list("abcde")


async def test_beside_others_the_rest_takes_the_threads_of_a_role(recorder: Recorder) -> None:
    recorder.may_go.set()
    ahead = Ahead(recorder, recorder.config)
    assert ahead.complete([group("a")], is_alone=False) == (1,)
    await ahead.wait()
    # And the next batch begins with nothing of this one.
    assert ahead.complete([group("b"), group("c")], is_alone=True) == (2,)
    await ahead.wait()
    assert recorder.taken == [("a", 1), ("b", 4), ("c", 4)]


async def test_abandoning_waits_for_what_runs_and_leaves_nothing(recorder: Recorder) -> None:
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group("a"), group("b")])
    await begun(ahead, 2)
    ahead.offer([group("c")])
    abandoned = asyncio.create_task(ahead.abandon())
    await asyncio.sleep(0)
    recorder.may_go.set()
    await abandoned
    assert recorder.taken == [] and ahead.num_begun == 0


async def test_what_ended_an_early_part_is_told_at_the_next_offer_or_at_the_end(recorder: Recorder) -> None:
    recorder.may_go.set()
    ahead = Ahead(recorder, recorder.config)
    ahead.offer([group("broken")])
    with pytest.raises(RuntimeError, match="broken"):
        while True:
            await asyncio.sleep(0.001)
            ahead.offer([])
    with pytest.raises(RuntimeError, match="broken"):
        await ahead.abandon()
    ahead.offer([group("broken")])
    ahead.complete([group("a")], is_alone=True)
    with pytest.raises(RuntimeError, match="broken"):
        await ahead.wait()
    assert recorder.taken == []


async def test_all_cores_are_those_that_the_process_may_use(tiny_model: Path, small_config: Config) -> None:
    trainer = Recorder(tiny_model, replace(small_config, trainer_threads=0))
    trainer.may_go.set()
    ahead = Ahead(trainer, trainer.config)
    ahead.complete([group("a")], is_alone=True)
    await ahead.wait()
    assert trainer.taken == [("a", len(os.sched_getaffinity(0)))]


async def test_where_gradients_take_the_whole_batch_nothing_is_begun_before_it_is_complete(
    tiny_model: Path, small_config: Config
) -> None:
    trainer = Recorder(tiny_model, replace(small_config, trainer_threads=4, ppo_minibatches=2))
    trainer.may_go.set()
    ahead = Ahead(trainer, trainer.config)
    ahead.offer([group("a")])
    ahead.offer([group("b")])
    await asyncio.sleep(0.01)
    assert ahead.num_begun == 0 and trainer.taken == []
    assert ahead.complete([group("c")], is_alone=True) == (3,)
    await ahead.wait()
    assert trainer.taken == [("a", 4), ("b", 4), ("c", 4)]
