"""The token audit where trainer and replicas are not in step: older tokens against the weights of their own version.

    samples with older tokens -> some of them -> by version -> its kept weights, proved -> passes -> TokenAudit

What the current weights sampled is compared in the passes that make the gradients. For the rest, a second policy takes
on one kept version after the other: that of the trainer belongs to the passes of other threads. So this need not wait
for the steps before: it begins when the batch is closed.

Each version costs a forward pass over all that comes before its last token, and a conversation has tokens of two or
three: all conversations would cost half of what the gradients do. Compared are a quarter of them, at least one for each
version. Weights that are not those of their version show in any of their tokens; what is wrong with one conversation in
a hundred is found within a few steps. Which ones they are follows from their ids alone: a step that is made again
compares the same.
"""

import asyncio
import hashlib
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from turnmill.errors import AuditFailed, NotFound
from turnmill.ports import WeightStore
from turnmill.records import Version
from turnmill.training.algorithms.logprobs import token_logprobs
from turnmill.training.audit import TokenAudit
from turnmill.training.microbatches import collate, plan
from turnmill.training.passes import one_thread
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, TrainingSample
from turnmill.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)
# Of the conversations of a batch that have older tokens, those whose older tokens are compared.
SHARE = 0.25


class StaleTokens(TokenAudit):
    """What was found of the tokens of older versions of one batch."""

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with these tokens in its audit."""
        if not self.num_tokens:
            return result
        num_current = round(result.audit_share * result.num_tokens)
        num = num_current + self.num_tokens
        mean = (result.audit_mean * num_current + self.mean * self.num_tokens) / num
        share = num / result.num_tokens
        return replace(result, audit_mean=mean, audit_max=max(result.audit_max, self.max), audit_share=share)


class StaleAudit:
    """Audits for one trainer, one batch after the other."""

    def __init__(self, trainer: Trainer, weights: WeightStore) -> None:
        self._trainer = trainer
        self._weights = weights
        # Made before other threads run passes of the trainer's.
        self._policy = trainer.policy.frozen_twin()
        # Whose weights it holds.
        self._version = ""
        # One batch at a time.
        self._lock = asyncio.Lock()

    async def check(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        current: Version,
        fingerprints: Mapping[str, str],
        *,
        may_be_gone: bool,
    ) -> StaleTokens:
        """Raise `AuditFailed` unless tokens of other versions than `current` have the log-probs of their weights.

        Compared are those of `chosen` samples.

        `fingerprints` are the trainer's, by version text. With `may_be_gone` (a step that is made again) versions whose
        weights are no longer kept are left out: of their tokens the digests of the records are what is checked.
        Cancelled, it ends after the pass that is being made.
        """
        async with self._lock:
            return await self._check(groups, current, fingerprints, may_be_gone=may_be_gone)

    async def _check(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        current: Version,
        fingerprints: Mapping[str, str],
        *,
        may_be_gone: bool,
    ) -> StaleTokens:
        found = StaleTokens()
        samples = [sample for group in groups for sample in group]
        rows = [row for sample in chosen(samples, str(current)) for row in sample.rows]
        versions = {version for row in rows for version in row.trained_versions} - {str(current)}
        # That whose weights are loaded already comes first.
        for version in sorted(versions, key=lambda text: (text != self._version, Version.parse(text).n)):
            try:
                stored = await self._weights.get(Version.parse(version))
            except NotFound:
                if not may_be_gone:
                    raise AuditFailed(f"tokens of version {version} are trained, whose weights are not kept") from None
                logger.warning("tokens of version %s are not compared with its weights, which are gone", version)
                continue
            cut = [row.only(version) for row in rows if version in row.trained_versions]
            is_given_up = threading.Event()
            args = (found, cut, version, Path(stored.location), fingerprints[version], is_given_up)
            passes = asyncio.create_task(asyncio.to_thread(self._add, *args), name=f"passes with version {version}")
            try:
                await asyncio.shield(passes)
            except asyncio.CancelledError:
                is_given_up.set()
                # The policy is in use until then.
                await asyncio.wait({passes})
                raise
        found.check(self._trainer.config)
        return found

    def _add(
        self,
        found: StaleTokens,
        rows: Sequence[Row],
        version: str,
        folder: Path,
        fingerprint: str,
        is_given_up: threading.Event,
    ) -> None:
        with one_thread(), torch.no_grad():
            policy = self._loaded(version, folder, fingerprint)
            for bundles in plan(rows, self._trainer.config.micro_batch_tokens, is_sharing=policy.is_sharing):
                if is_given_up.is_set():
                    return
                batch = collate(rows, [0] * len(rows), bundles)
                logprobs_n, _ = token_logprobs(policy.logits(batch), batch.tokens_n, batch.temperature_n)
                found.add(rows, batch, logprobs_n)

    def _loaded(self, version: str, folder: Path, fingerprint: str) -> Policy:
        """The second policy with the weights of `version`, which must be those that the trainer published."""
        if self._version == version:
            return self._policy
        self._version = ""
        self._policy.load_weights(folder)
        if (held := self._policy.fingerprint()) != fingerprint:
            raise AuditFailed(f"the kept weights of version {version} are {held}, published were {fingerprint}")
        self._version = version
        return self._policy


def chosen(samples: Sequence[TrainingSample], current: str) -> list[TrainingSample]:
    """Of those with trained tokens of other versions than `current`: a `SHARE`, and at least one for each version."""
    by_sample = [(sample, _older(sample, current)) for sample in samples]
    aged = sorted((each for each in by_sample if each[1]), key=lambda each: _place(each[0]))
    num = math.ceil(SHARE * len(aged))
    picked, seen = [], set[str]()
    for index, (sample, versions) in enumerate(aged):
        if index < num or versions - seen:
            picked.append(sample)
            seen |= versions
    return picked


def _older(sample: TrainingSample, current: str) -> set[str]:
    return {version for row in sample.rows for version in row.trained_versions} - {current}


def _place(sample: TrainingSample) -> bytes:
    """Where a sample comes when they are drawn by chance, the same each time."""
    return hashlib.sha256(sample.key.encode()).digest()
