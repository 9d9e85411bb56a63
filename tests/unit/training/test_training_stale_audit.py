"""Tokens of older versions against the weights of their own: which are compared, and what is said where that fails."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnmill.backends.embedded.weights import FolderWeightStore
from turnmill.config import Config
from turnmill.errors import AuditFailed, RecordCorrupt
from turnmill.records import Call, SampleRecord, Version
from turnmill.training.microbatches import MicroBatch
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, Span, TrainingSample, training_sample
from turnmill.training.stale_audit import StaleAudit, chosen
from turnmill.training.trainer import Trainer

OLD, NEW = Version(incarnation=1, n=1), Version(incarnation=1, n=2)


@pytest.fixture(params=["RFT_MULTITURN_FULL", "RFT_MULTITURN_LORA"])
def trainer(request: pytest.FixtureRequest, trainer_of: Callable[[Config], Trainer], small_config: Config) -> Trainer:
    """Its weights are not those of the base model any more."""
    made = trainer_of(
        replace(small_config, rollout_strategy="off_policy_async", training_method=request.param, lora_rank=2)
    )
    with torch.no_grad():
        for parameter in made.policy.parameters():
            parameter.add_(0.01)
    return made


@pytest.fixture
async def weights(tmp_path: Path, trainer: Trainer) -> FolderWeightStore:
    """Holds version 1.1, which is what the trainer has; the trainer goes on a little."""
    store = FolderWeightStore(tmp_path / "weights")
    source = tmp_path / "source"
    source.mkdir()
    trainer.save_weights(source)
    await store.publish(OLD, source, trainer.fingerprint())
    return store


@torch.no_grad()
def logprobs_of(trainer: Trainer, ids: list[int], start: int) -> list[float]:
    log_p_tv = torch.log_softmax(trainer.policy.model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
    return [float(log_p_tv[t - 1, ids[t]]) for t in range(start, len(ids))]


@pytest.fixture
def sample(trainer: Trainer, call_of: Callable[..., Call], sample_of: Callable[..., SampleRecord]) -> TrainingSample:
    """A call of version 1.1 with the log-probs of its weights, and one of 1.2 with some that are of no weights."""
    first = [2, 300, 6, 4, 310, 6]
    old = call_of("t_0", 0, logprobs=logprobs_of(trainer, first, 4), version=str(OLD))
    new = call_of("t_0", 1, old, version=str(NEW))
    return training_sample(sample_of("t_0", [old, new]), [old, new])


def test_a_sample_knows_the_span_of_its_versions_and_what_each_trains(sample: TrainingSample) -> None:
    (row,) = sample.rows
    assert sample.versions == ("1.1", "1.2") and row.trained_versions == {"1.1", "1.2"}
    old, new = row.only("1.1"), row.only("1.2")
    assert old.token_ids == [2, 300, 6, 4, 310, 6] and old.loss_mask == [0, 0, 0, 0, 1, 1]
    assert len(new.token_ids) == 12 and new.loss_mask == [0] * 10 + [1, 1]
    assert old.num_trained + new.num_trained == row.num_trained


async def test_only_older_tokens_are_compared_and_with_their_own_weights(
    trainer: Trainer, weights: FolderWeightStore, sample: TrainingSample
) -> None:
    known = {str(OLD): trainer.fingerprint()}
    with torch.no_grad():
        trainer.policy.parameters()[0].add_(0.5)
    found = await StaleAudit(trainer, weights).check([[sample]], NEW, known, may_be_gone=False)
    assert found.num_tokens == 2 and found.max < 1e-4


async def test_a_wrong_log_prob_of_an_older_token_is_named(
    trainer: Trainer,
    weights: FolderWeightStore,
    call_of: Callable[..., Call],
    sample_of: Callable[..., SampleRecord],
) -> None:
    call = call_of("t_0", 0, logprobs=[-0.5, -0.1], version=str(OLD))
    wrong = training_sample(sample_of("t_0", [call]), [call])
    with pytest.raises(AuditFailed, match=r"disagree over 2 tokens.*call t_0_0 \(version 1\.1\)"):
        await StaleAudit(trainer, weights).check([[wrong]], NEW, {str(OLD): trainer.fingerprint()}, may_be_gone=False)


async def test_weights_that_are_gone_stop_the_run_unless_a_step_is_made_again(
    trainer: Trainer, weights: FolderWeightStore, sample: TrainingSample
) -> None:
    audit, known = StaleAudit(trainer, weights), {str(OLD): trainer.fingerprint()}
    await weights.prune([])
    with pytest.raises(AuditFailed, match=r"tokens of version 1\.1 are trained, whose weights are not kept"):
        await audit.check([[sample]], NEW, known, may_be_gone=False)
    assert (await audit.check([[sample]], NEW, known, may_be_gone=True)).num_tokens == 0


async def test_kept_weights_that_are_not_those_that_were_published_stop_the_run(
    trainer: Trainer, weights: FolderWeightStore, sample: TrainingSample
) -> None:
    with pytest.raises(AuditFailed, match=r"kept weights of version 1\.1 are .*, published were 0000"):
        await StaleAudit(trainer, weights).check([[sample]], NEW, {str(OLD): "0000"}, may_be_gone=False)
    path = Path((await weights.get(OLD)).location) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordCorrupt, match="can't be read"):
        await StaleAudit(trainer, weights).check([[sample]], NEW, {str(OLD): "0000"}, may_be_gone=False)


async def test_given_up_it_ends_after_the_pass_that_is_being_made(
    trainer: Trainer, weights: FolderWeightStore, sample: TrainingSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, known = StaleAudit(trainer, weights), {str(OLD): trainer.fingerprint()}
    # One row fills a pass.
    trainer.config = replace(trainer.config, micro_batch_tokens=8)
    begun, going_on, num_passes = threading.Event(), threading.Event(), 0
    logits = Policy.logits

    def slow(self: Policy, batch: MicroBatch) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        begun.set()
        assert going_on.wait(20)
        return logits(self, batch)

    monkeypatch.setattr(Policy, "logits", slow)
    task = asyncio.create_task(audit.check([[sample] * 5], NEW, known, may_be_gone=False))
    assert await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    again = asyncio.create_task(audit.check([[sample] * 5], NEW, known, may_be_gone=False))
    await asyncio.sleep(0.05)
    assert not task.done(), "the policy is in use"
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await again).num_tokens == 4 and num_passes == 1 + 2


def aged(name: str, *versions: str) -> TrainingSample:
    spans = tuple(Span(call_id=f"c{i}", start=2 * i, end=2 * i + 2, version=text) for i, text in enumerate(versions))
    num = 2 * len(versions)
    row = Row(
        key=name,
        token_ids=[1] * num,
        loss_mask=[0, 1] * len(versions),
        logprobs=[0.0] * num,
        temperatures=[1.0] * num,
        spans=spans,
    )
    return TrainingSample(key=name, reward=1.0, rows=(row,))


def test_a_quarter_of_the_conversations_with_older_tokens_is_compared() -> None:
    samples = [aged(f"s{i}", "1.1", "1.3") for i in range(40)] + [aged(f"n{i}", "1.3") for i in range(20)]
    found = chosen(samples, "1.3")
    assert len(found) == 10 and all(sample.key.startswith("s") for sample in found)
    # Whatever the order in which they come, and others in other batches.
    assert chosen(samples[::-1], "1.3") == found
    others = chosen([aged(f"r{i}", "1.1") for i in range(40)], "1.3")
    assert {sample.key[1:] for sample in found} != {sample.key[1:] for sample in others}
    assert len(chosen(samples, "1.1")) == 15
    assert chosen(samples[40:], "1.3") == []


@pytest.mark.parametrize("name", ["a", "b", "c", "d", "e"])
def test_at_least_one_conversation_is_compared_for_each_version(name: str) -> None:
    samples = [aged(f"s{i}", "1.1") for i in range(40)] + [aged(name, "1.2", "1.3")]
    found = chosen(samples, "1.3")
    assert samples[-1] in found and 11 <= len(found) <= 12
    assert chosen([aged(name, "0.0")], "1.3") == [aged(name, "0.0")]
