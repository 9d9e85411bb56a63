from dataclasses import replace

import pytest

from turnmill.records import DropReason
from turnmill.training.batcher import Drop
from turnmill.training.samples import Row, Span, TrainingSample
from turnmill.training.tally import Rollout, Tally, ages


def rollout(score: float, **metrics: float) -> Rollout:
    return Rollout(reward=score, metrics=metrics, num_sampled=4, length=30, staleness=0)


def test_means_are_over_all_valid_rollouts_before_any_filter() -> None:
    tally = Tally(rollouts=[rollout(1.0, turns=2), rollout(0.0, turns=6), rollout(0.5)], num_invalid=1)
    tally.seconds.generate_s = 2.0
    tally.drop([Drop(sample_id="x", reason=DropReason.NO_SIGNAL)])
    values = tally.values(threshold=0.5, num_trained=2)
    assert values["reward_mean"] == 0.5 and values["reward_min"] == 0.0 and values["reward_max"] == 1.0
    assert values["solved"] == pytest.approx(2 / 3)
    assert values["invalid_share"] == 0.25
    assert values["dropped_share"] == pytest.approx(1 / 3)
    assert values["dropped_no_signal"] == 1 and values["dropped_surplus"] == 0
    assert values["num_generated"] == 3 and values["num_trained"] == 2
    assert values["turns_mean"] == 4.0
    assert values["response_length_mean"] == 4 and values["conversation_length_mean"] == 30
    assert values["tokens_per_s"] == 6.0


def test_a_metric_of_the_environment_never_hides_one_of_ours() -> None:
    values = Tally(rollouts=[rollout(1.0, reward=-5.0)]).values(threshold=1.0, num_trained=1)
    assert values["reward_mean"] == 1.0


def aged(*versions: str) -> TrainingSample:
    spans = tuple(Span(call_id=f"c{i}", start=i, end=i + 1, version=text) for i, text in enumerate(("0.0", *versions)))
    size = len(spans)
    row = Row(
        key="k",
        token_ids=[7] * size,
        loss_mask=[0] + [1] * (size - 1),
        logprobs=[0.0] * size,
        temperatures=[1.0] * size,
        spans=spans,
    )
    return TrainingSample(key="k", reward=1.0, rows=(row,))


def test_a_conversation_is_as_old_as_its_oldest_trained_token() -> None:
    samples = [aged("1.4"), aged("1.3", "1.4"), aged("1.4", "1.2"), aged("1.4"), aged()]
    values = ages(samples, 5, 3)
    assert values == {
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "staleness_share_0": 0.5,
        "staleness_share_1": 0.25,
        "staleness_share_2": 0.25,
        "staleness_share_3": 0.0,
    }
    assert ages([aged("1.4")], 5, 0) == {"staleness_mean": 0.0, "staleness_max": 0}
    assert ages([aged()], 5, 0) == {}


def test_conversations_cut_off_at_max_length_are_told() -> None:
    tally = Tally(rollouts=[rollout(0.0), replace(rollout(0.0), is_truncated=True)])
    assert tally.values(threshold=1.0, num_trained=0)["truncated_share"] == 0.5
    assert "2 valid rollouts" in tally.describe() and "1 of them cut off at max_length" in tally.describe()


def test_nothing_valid_gives_no_means() -> None:
    values = Tally(num_invalid=3).values(threshold=1.0, num_trained=0)
    assert values["invalid_share"] == 1.0
    assert "reward_mean" not in values
    assert Tally(num_invalid=3).describe() == "no valid rollout, 3 invalid"
