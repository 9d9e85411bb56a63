"""Handing rollouts to workers: from a message in rollout_request to an attempt with secrets of its own.

    rollout_request message + sample record -> LEASED(attempt + 1) -> Lease for the worker
                                            -> INVALID(infra) + dead letter, where all attempts were used up
                                            -> nothing, where the sample is over: the message is acked

A message that comes back means that the worker before stopped its heartbeats.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from turnmill.config import Config
from turnmill.conversation.attempts import Attempt
from turnmill.conversation.history import checked_sample, dead_sample, failed_by_infra, is_given_up, tell_ended
from turnmill.conversation.registry import (
    Registry,
    SecretKind,
    hash_in,
    hash_secret,
    name_in,
    new_name,
    new_secret,
    same_hash,
)
from turnmill.ports import Leased, RunPorts, Stored, Write
from turnmill.records import RolloutRequest, SampleRecord, SampleState, decode, encode, sample_key

logger = logging.getLogger(__name__)
# Told of each sample that was given up, once its dead letter is written; perhaps more than once.
OnDead = Callable[[SampleRecord], Awaitable[None]]
# How many c are reserved by one write of the sample record.
CALL_RANGE = 64


@dataclass(frozen=True, kw_only=True)
class Lease:
    """An attempt as the worker gets it; the only place where its secrets are readable."""

    request: RolloutRequest
    attempt: int
    chat_secret: str = field(repr=False)
    report_secret: str = field(repr=False)
    lease_token: str = field(repr=False)
    # Unix seconds; the worker ends its rollout by then.
    deadline: float
    # Seconds that the lease holds without a heartbeat.
    lease_s: float


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A sample that a leased message changes."""

    sample: SampleRecord
    # Of the record that was read.
    version: int
    receipt: str
    # None: all attempts were used up, the sample is dead.
    lease: Lease | None


@dataclass(kw_only=True)
class _Round:
    """What is decided about the messages of one lease call."""

    changes: list[_Change] = field(default_factory=list)
    # Samples whose end is told once more, in case the process that ended them died before it could.
    ended: list[SampleRecord] = field(default_factory=list)
    # Receipts of messages with nothing to do.
    done: list[str] = field(default_factory=list)


class Leases:
    """Leases from rollout_request on behalf of workers."""

    def __init__(
        self,
        ports: RunPorts,
        config: Config,
        registry: Registry,
        *,
        call_range: int = CALL_RANGE,
        on_dead: OnDead | None = None,
    ) -> None:
        """`call_range`: call numbers that a lease reserves; 0 where each is taken by a record of its own."""
        self._records = ports.records
        self._requests = ports.rollout_request
        self._responses = ports.rollout_response
        self._config = config
        self._registry = registry
        self._call_range = call_range
        self._on_dead = on_dead

    async def take(self, max_rollouts: int, wait_s: float) -> list[Leased]:
        """Messages to be handed out; cancelled while waiting, nothing is used up but their lease time."""
        return await self._requests.lease(max_messages=max_rollouts, lease_s=self._config.worker_lease_s, wait_s=wait_s)

    async def hand_out(self, messages: Sequence[Leased]) -> list[Lease]:
        """Decide about each message, write it down, and return what the worker is to play."""
        decided = await self._decide(messages)
        applied: list[_Change] = []
        if decided.changes:
            applied = await self._write(decided.changes)
        leases = [self._start(change, change.lease) for change in applied if change.lease is not None]
        num_again = sum(lease.attempt > 1 for lease in leases)
        if num_again:
            # One line: a worker that died had dozens.
            logger.warning("%d rollouts are played again: their leases ran out without a report", num_again)
        dead = [change for change in applied if change.lease is None]
        for change in dead:
            self._registry.retire(change.sample.key)
            logger.error("%s", change.sample.detail, extra={"at": change.sample.key})
        # A foreign trainer's sample that has no score was given up; who ended it may have died before it could say so.
        untold = [sample for sample in decided.ended if is_given_up(sample) and not sample.is_told]
        await self._bury([*untold, *(change.sample for change in dead)])
        ended = [*decided.ended, *(change.sample for change in dead)]
        if ended:
            await tell_ended(self._records, self._responses, ended)
        done = [*decided.done, *(change.receipt for change in dead)]
        if done:
            await self._requests.ack(done)
        return leases

    async def give_up(self, sample: SampleRecord) -> None:
        """Write the dead letter of a sample, and say so; done again, it says the same."""
        logger.error("no attempt was scored: %s", sample.detail or sample.reason, extra={"at": sample.key})
        await self._bury([sample])

    async def _bury(self, samples: Sequence[SampleRecord]) -> None:
        if samples:
            await self._records.write([dead_sample(sample) for sample in samples])
        if self._on_dead is not None:
            for sample in samples:
                await self._on_dead(sample)

    async def _write(self, changes: Sequence[_Change]) -> list[_Change]:
        """Write the samples; those that were changed since they were read (e.g. dropped) are looked at again later."""
        # Pointers first: an attempt whose secrets nobody finds must not exist.
        pointers = [
            self._registry.pointer_write(name_in(change.lease.chat_secret), change.sample)
            for change in changes
            if change.lease is not None
        ]
        writes = [
            Write(key=change.sample.key, value=encode(change.sample), expected=change.version) for change in changes
        ]
        results = (await self._records.write([*pointers, *writes]))[len(pointers) :]
        lost = [change.receipt for change, ok in zip(changes, results, strict=True) if not ok]
        if lost:
            await self._requests.release(lost)
        return [change for change, ok in zip(changes, results, strict=True) if ok]

    async def renew(self, tokens: Sequence[str]) -> list[str]:
        """Extend the leases behind lease tokens; returns those that are lost."""
        keys = await self._registry.sample_keys(tokens, SecretKind.LEASE)
        wanted = [key for key in dict.fromkeys(keys) if key is not None]
        samples: dict[str, SampleRecord] = {}
        for name, stored in zip(wanted, await self._records.get(wanted) if wanted else (), strict=True):
            if stored is not None:
                samples[name] = checked_sample(stored)
        good: dict[str, str] = {}
        for token, key in zip(tokens, keys, strict=True):
            sample = samples.get(key or "")
            if sample is None:
                continue
            if sample.state is SampleState.LEASED and same_hash(sample.lease_token_hash, hash_secret(token)):
                good[token] = sample.receipt or ""
            else:
                self._forget_stale(sample)
        extended = await self._requests.extend(list(good.values()), self._config.worker_lease_s) if good else []
        held = {token for token, ok in zip(good, extended, strict=True) if ok}
        return [token for token in tokens if token not in held]

    def _forget_stale(self, sample: SampleRecord) -> None:
        """Stop serving an attempt that the record says is over (dropped, or leased by another proxy)."""
        attempt = self._registry.get(sample.key)
        if attempt is not None and (
            sample.state is not SampleState.LEASED
            or hash_in(attempt.sample, SecretKind.CHAT) != hash_in(sample, SecretKind.CHAT)
        ):
            self._registry.retire(sample.key)

    async def _decide(self, messages: Sequence[Leased]) -> _Round:
        decided = _Round()
        keys: list[str] = []
        readable: list[Leased] = []
        for message in messages:
            try:
                request = decode(message.body, RolloutRequest)
            except msgspec.DecodeError as error:
                logger.error("a message in rollout_request is unreadable and was dropped: %s", error)
                decided.done.append(message.receipt)
                continue
            keys.append(sample_key(request.run_id, request.purpose, request.sample_id))
            readable.append(message)
        stored = await self._records.get(keys) if keys else []
        for message, key, record in zip(readable, keys, stored, strict=True):
            self._decide_one(decided, message, key, record)
        return decided

    def _decide_one(self, decided: _Round, message: Leased, key: str, stored: Stored | None) -> None:
        if stored is None:
            logger.error("a rollout request without a sample record was dropped", extra={"at": key})
            decided.done.append(message.receipt)
            return
        sample = checked_sample(stored)
        if not sample.state.is_open:
            self._registry.retire(sample.key)
            if sample.state in (SampleState.REPORTED, SampleState.INVALID):
                decided.ended.append(sample)
            decided.done.append(message.receipt)
        elif (num_attempts := sample.attempt - sample.redriven_after) >= self._config.max_attempts:
            detail = f"{num_attempts} attempts were leased and none was reported: workers died or stopped answering"
            ended = failed_by_infra(sample, detail)
            decided.changes.append(_Change(sample=ended, version=stored.version, receipt=message.receipt, lease=None))
        else:
            leased, lease = self._next_attempt(sample, message.receipt)
            decided.changes.append(_Change(sample=leased, version=stored.version, receipt=message.receipt, lease=lease))

    def _next_attempt(self, sample: SampleRecord, receipt: str) -> tuple[SampleRecord, Lease]:
        first_call = sample.call_bound
        before = self._registry.get(sample.key)
        if before is not None and before.sample.attempt == sample.attempt:
            # From here on it takes no c any more, so that the count can go on without a gap.
            before.is_current = False
            first_call = before.next_call
        name, now = new_name(), time.time()
        lease = Lease(
            request=sample.request,
            attempt=sample.attempt + 1,
            chat_secret=new_secret(name),
            report_secret=new_secret(name),
            lease_token=new_secret(name),
            deadline=now + self._config.training_timeout,
            lease_s=self._config.worker_lease_s,
        )
        leased = replace(
            sample,
            state=SampleState.LEASED,
            attempt=lease.attempt,
            leased_at=now,
            chat_secret_hash=hash_secret(lease.chat_secret),
            report_secret_hash=hash_secret(lease.report_secret),
            lease_token_hash=hash_secret(lease.lease_token),
            receipt=receipt,
            first_call=first_call,
            call_bound=first_call + self._call_range,
            reason=None,
            detail=None,
        )
        return leased, lease

    def _start(self, change: _Change, lease: Lease) -> Lease:
        sample = change.sample
        attempt = Attempt(
            sample=sample,
            name=name_in(lease.chat_secret),
            next_call=sample.first_call,
            call_bound=sample.call_bound,
            version=change.version + 1,
        )
        # The first attempt has nothing to read.
        attempt.is_loaded = sample.attempt == 1
        self._registry.add(attempt)
        return lease
