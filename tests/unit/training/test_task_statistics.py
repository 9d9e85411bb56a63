"""What is known of each task, and that a process which begins with the records knows it to the last bit."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from turnmill.config import Config
from turnmill.records import Batch, Progress, Task, TaskOutcome, decode, encode
from turnmill.training.batcher import BatchBuilder
from turnmill.training.task_statistics import TaskStatistics, TaskTable, outcome_of, write_statistics


def outcome(
    task_id: str, rewards: Sequence[float], position: int = 0, *, num_invalid: int = 0, is_given_up: bool = False
) -> TaskOutcome:
    has_signal = None if is_given_up else len(set(rewards)) > 1
    return outcome_of(
        task_id, position, rewards, num_invalid=num_invalid, num_truncated=0, threshold=1.0, has_signal=has_signal
    )


def test_groups_add_up_to_the_statistics_of_their_task() -> None:
    table = TaskTable()
    table.close([outcome("a", [0.0, 0.25, 1.0, 1.0], 7, num_invalid=2)], has_batch=True)
    given_up = outcome("a", [1.0], 11, num_invalid=5, is_given_up=True)
    table.close([outcome("a", [0.0, 0.0, 0.0, 0.0], 9), given_up], has_batch=True)
    assert table.statistics["a"] == TaskStatistics(
        task_id="a",
        num_played=6 + 4 + 6,
        num_valid=9,
        num_passed=3,
        reward_sum=3.25,
        num_signal=1,
        num_no_signal=1,
        num_abandoned=1,
        pass_rate=0.25,
        position=9,
        step=2,
    )
    assert table.statistics["a"].reward_mean == pytest.approx(3.25 / 9)
    assert TaskStatistics(task_id="b").reward_mean is None


def test_the_newest_group_weighs_half_of_the_pass_rate() -> None:
    found = TaskStatistics(task_id="a")
    rates = []
    for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0]):
        found = found.after(outcome("a", rewards), 1)
        rates.append(found.pass_rate)
    assert rates == [1.0, 0.5, 0.5]


def test_the_record_of_a_batch_keeps_what_was_decided_since_the_one_before() -> None:
    table = TaskTable()
    table.close([outcome("b", [1.0, 0.0], 1), outcome("a", [1.0, 0.0], 0)], has_batch=True)
    assert [found.task_id for found in table.outcomes] == ["a", "b"], "by their place in the data"
    for task_id, has_batch in (("c", False), ("d", False), ("e", True), ("f", True)):
        table.close([outcome(task_id, [0.0, 0.0], 2)], has_batch=has_batch)
        if task_id == "e":
            assert [found.task_id for found in table.outcomes] == ["c", "d", "e"]
    assert [found.task_id for found in table.outcomes] == ["f"]
    assert {key: found.step for key, found in table.statistics.items()} == dict(
        zip("abcdef", (1, 1, 2, 2, 2, 3), strict=True)
    )


def test_the_file_holds_one_task_a_line(tmp_path: Path) -> None:
    table = TaskTable()
    table.close([outcome(task_id, [1.0, 0.5]) for task_id in ("b", "a")], has_batch=True)
    write_statistics(table.statistics, tmp_path)
    text = (tmp_path / "tasks.json").read_text()
    assert [row["task_id"] for row in json.loads(text)] == ["a", "b"]
    assert json.loads(text)[0] == {**table.statistics["a"].as_object(), "reward_mean": 0.75}
    assert len(text.splitlines()) == 4


class Player:
    """Plays a builder's batches, keeps their records, and may be killed between two samples."""

    def __init__(self, config: Config, tasks: list[Task], chances: dict[str, float]) -> None:
        self.config, self.tasks, self.chances = config, tasks, chances
        self.records: list[bytes] = []
        # Task ids of the groups of each recorded batch, in the order in which they were drawn.
        self.drawn: list[list[str]] = []

    @property
    def progress(self) -> list[Progress]:
        return [decode(record, Batch).progress for record in self.records]

    def begin(self) -> tuple[BatchBuilder, TaskTable]:
        """As a new process does: with the records and nothing else."""
        batches = [decode(record, Batch) for record in self.records]
        table = TaskTable.of(batches)
        progress = batches[-1].progress if batches else Progress()
        return BatchBuilder(self.config, self.tasks, prefix="1.", progress=progress, table=table), table

    def reward(self, task: Task, member: int, num_empty: int) -> float | None:
        """Of a member of a group that is played for the next step: the same for whoever plays it."""
        rng = random.Random(f"{task.id}/{len(self.records)}/{num_empty}/{member}")
        return None if rng.random() < 0.05 else float(rng.random() < self.chances[task.id])

    def play(self, builder: BatchBuilder, *, kill_after: int | None = None) -> None:
        """Up to the record of the next batch, or until so many samples have ended."""
        drawn: list[str] = []
        waiting: list[tuple[str, float | None]] = []
        members: dict[str, int] = {}
        num_ended = num_empty = 0
        while num_ended != kill_after:
            draws = builder.draw()
            ids = []
            for draw in draws:
                if draw.group_id not in members:
                    drawn.append(draw.task.id)
                member = members[draw.group_id] = members.get(draw.group_id, -1) + 1
                ids.append(f"{draw.group_id}/{member}")
                waiting.append((ids[-1], self.reward(draw.task, member, num_empty)))
            builder.bind(draws, ids)
            if not builder.is_closed:
                sample_id, reward = waiting.pop(0)
                end = builder.leave if sample_id in builder.leaving else builder.end
                end(sample_id, reward)
                num_ended += 1
            elif (closed := builder.close()).groups:
                for sample_id, reward in waiting:
                    builder.leave(sample_id, reward)
                self.drawn.append(drawn)
                batch = Batch(run_id="r", step=len(self.records) + 1, groups=closed.groups, progress=builder.progress)
                self.records.append(encode(batch))
                return
            else:
                num_empty += 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("curriculum", ["none", "pass_rate"])
def test_a_process_that_goes_on_draws_what_an_undisturbed_one_does(seed: int, curriculum: str) -> None:
    rng = random.Random(seed)
    config = Config(
        number_generation=4,
        global_batch_size=4 * rng.randint(1, 4),
        max_refill_rounds=rng.randint(0, 3),
        shuffle=rng.random() < 0.5,
        curriculum=curriculum,
        curriculum_revisit=rng.randint(1, 4),
    )
    tasks = [Task(id=f"t{i}", metadata={}) for i in range(rng.randint(2, 12))]
    # One can always be learned from, so that no step is empty for ever.
    chances = {task.id: rng.choice([0.0, 0.3, 1.0]) for task in tasks} | {"t0": 0.5}
    alone, disturbed = Player(config, tasks, chances), Player(config, tasks, chances)
    builder, table = alone.begin()
    for _ in range(12):
        alone.play(builder)
        if rng.random() < 0.5:
            disturbed.play(disturbed.begin()[0], kill_after=rng.randint(1, 20))
        if len(disturbed.records) < len(alone.records):
            disturbed.play(disturbed.begin()[0])
        assert TaskTable.of([decode(record, Batch) for record in disturbed.records]).statistics == table.statistics
    assert disturbed.drawn == alone.drawn
    assert disturbed.progress == alone.progress


def test_a_run_that_goes_on_from_an_earlier_step_gives_up_what_came_later() -> None:
    config = Config(number_generation=4, global_batch_size=8, curriculum="pass_rate")
    tasks = [Task(id=f"t{i}", metadata={}) for i in range(6)]
    player = Player(config, tasks, {task.id: 0.5 for task in tasks})
    builder, _ = player.begin()
    for _ in range(5):
        player.play(builder)
    records, drawn, progress = player.records, player.drawn, player.progress
    player.records, player.drawn = records[:2], drawn[:2]
    builder, table = player.begin()
    assert {found.step for found in table.statistics.values()} <= {1, 2}
    for _ in range(3):
        player.play(builder)
    assert player.progress == progress and player.drawn == drawn


def test_a_curriculum_plays_less_without_signal_than_data_order() -> None:
    tasks = [Task(id=f"t{i}", metadata={}) for i in range(24)]
    chances = {task.id: (0.0, 0.5, 1.0)[index % 3] for index, task in enumerate(tasks)}
    useless = {}
    for curriculum in ("none", "pass_rate"):
        config = Config(number_generation=4, global_batch_size=16, max_refill_rounds=6, curriculum=curriculum)
        player = Player(config, tasks, chances)
        builder, table = player.begin()
        for _ in range(20):
            player.play(builder)
        found = table.statistics.values()
        useless[curriculum] = sum(task.num_no_signal for task in found) / sum(
            task.num_signal + task.num_no_signal for task in found
        )
    assert useless["none"] > 0.6
    assert useless["pass_rate"] < useless["none"] - 0.15
