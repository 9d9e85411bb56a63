"""What both forms of a run's sessions have in common: workers and leases, the form of reports, the end of the serving.

Service -+- Sessions         one process serves a run: its attempts are in memory (`sessions`)
         '- SharedSessions   any number of processes do: all that is known lies in the records (`shared`)
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnmill.config import Config
from turnmill.conversation.attempts import Answer, Pending
from turnmill.conversation.leases import Lease, Leases
from turnmill.conversation.registry import Registry, SecretKind, hash_secret, same_hash
from turnmill.conversation.reports import Report
from turnmill.conversation.requests import ChatRequest, Offer, offers_of
from turnmill.errors import BackendUnavailable, Conflict, InvalidRequest, LeaseLost, ShuttingDown, Unauthorized
from turnmill.ports import Leased, RunPorts, Write
from turnmill.records import Run, SampleRecord, SampleState, StopReason, WorkerStatus, encode

logger = logging.getLogger(__name__)
# Returns when the client has gone away.
Gone = Callable[[], Awaitable[None]]


@dataclass(kw_only=True)
class SessionCounts:
    """What happened so far."""

    num_chats: int = 0
    # Chats that repeated an earlier one as a transport retry.
    num_retries: int = 0
    # Chats answered from an earlier attempt's records.
    num_replayed: int = 0
    # Chats that continue no call of their attempt, or hold assistant text that none made.
    num_forks: int = 0
    num_reports: int = 0


class Service(ABC):
    """The conversations of one run, as the routes of the proxy use them.

    `base_url` is where workers reach the chat route; set it before the first lease.
    """

    # One process serves the run: whoever comes back comes back to it.
    is_lone = False
    _registry: Registry

    def __init__(self, ports: RunPorts, run: Run, config: Config, leases: Leases) -> None:
        self.base_url = ""
        self.counts = SessionCounts()
        self._offers = offers_of(config, run.kind)
        # All rollouts are offered the same, whatever they are for.
        self._is_alike = all(offer == self.offer for offer in self._offers.values())
        self._ports = ports
        self._run = run
        self._leases = leases
        self._workers: set[str] = set()
        self._stopping = asyncio.Event()
        # What nobody can be served any more for.
        self._failure: BackendUnavailable | None = None

    @property
    def offer(self) -> Offer:
        """What is offered to rollouts that are trained; where none is, to all."""
        return next(iter(self._offers.values()))

    # ------------------------------------------------------------ what differs

    @abstractmethod
    async def parse(self, secret: str, body: bytes, *, is_text: bool = False) -> ChatRequest:
        """A body of chat completions, or of completions, as the attempt of this secret may send it.

        Raises `InvalidRequest` naming the key; where evaluations sample otherwise than training, `Unauthorized` and
        `LeaseLost` as `chat` does: what is offered depends on what the attempt is for.
        """

    @abstractmethod
    async def chat(
        self,
        secret: str,
        request: ChatRequest,
        *,
        key: str | None = None,
        is_retry: bool = False,
        hold_s: float | None = None,
    ) -> tuple[Answer, ...] | Pending:
        """Answer one chat request, each of its choices: a transport retry with the same calls, any other with new ones.

        `hold_s`: how long the client is kept waiting; what is not answered by then is `Pending`. None: until the answer
        is there, or the call's time is over.

        Raises `Unauthorized`, `LeaseLost`, `InvalidRequest`, `GenerationFailed`, `CallTimeout`, `ShuttingDown`.
        """

    @abstractmethod
    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...] | Pending:
        """What has become of a chat that was `Pending`. Raises like `chat`, or `NotFound` for another step."""

    async def models(self, secret: str) -> tuple[Sequence[str], float]:
        """The names of the run's model, and since when it is there (Unix seconds), for whoever has a chat secret.

        Raises `Unauthorized`.
        """
        await self._registry.sample_key(secret, SecretKind.CHAT)
        return self.offer.models, self._run.created_at

    @abstractmethod
    async def report(self, secret: str, report: Report) -> None:
        """End the sample with a worker's report; saying the same once more is no error.

        Raises `Unauthorized`, `LeaseLost` (not the current attempt), `Conflict` (reported otherwise before),
        `InvalidRequest`.
        """

    # ------------------------------------------------------------ life

    def stop(self) -> None:
        """Send away everybody who waits: calls fail with `ShuttingDown`, lease requests come back empty. Idempotent."""
        self._stopping.set()

    @property
    def is_healthy(self) -> bool:
        return not self._stopping.is_set()

    def fail(self, error: BackendUnavailable) -> None:
        """Stop serving: the backend has made its own retries, and workers that try again would wait without end."""
        if self._failure is None and not self._stopping.is_set():
            logger.critical("no conversation can go on: %s", error)
            self._failure = error
            self.stop()

    def check(self) -> None:
        """Raise what ended the serving, for a supervisor: nobody is answered any more."""
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ workers

    def check_worker(self, token: str) -> None:
        """Raises `Unauthorized` unless it is the run's worker token."""
        if not same_hash(self._run.worker_token_hash, hash_secret(token)):
            raise Unauthorized("unknown worker token")

    async def lease(self, worker: str, max_rollouts: int, wait_s: float, *, gone: Gone | None = None) -> list[Lease]:
        """Up to `max_rollouts` attempts for a worker; waits up to `wait_s` for the first one.

        `gone` ends the wait early when the worker has gone away, so that no attempt is given to nobody.
        """
        if worker not in self._workers:
            status = WorkerStatus(run_id=self._run.run_id, worker=worker, since=time.time())
            await self._ports.records.write([Write(key=status.key, value=encode(status), expected=None)])
            self._workers.add(worker)
        messages = await self._take(max_rollouts, wait_s, gone)
        return await self._leases.hand_out(messages) if messages else []

    async def _take(self, max_rollouts: int, wait_s: float, gone: Gone | None) -> Sequence[Leased]:
        if self._stopping.is_set():
            raise ShuttingDown("the proxy is closing")
        take = asyncio.create_task(self._leases.take(max_rollouts, wait_s), name="sessions-take")
        enders: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stopping.wait())]
        if gone is not None:
            enders.append(asyncio.ensure_future(gone()))
        try:
            await asyncio.wait([take, *enders], return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() and not any(ender.done() for ender in enders) else ()
        finally:
            for task in (take, *enders):
                task.cancel()
            await asyncio.gather(take, *enders, return_exceptions=True)

    async def heartbeat(self, tokens: Sequence[str]) -> list[str]:
        """Renew leases by their tokens; returns the tokens whose attempt is over."""
        return await self._leases.renew(tokens)


# ---------------------------------------------------------------- reports


def check_sample_id(sample: SampleRecord, sample_id: str | None) -> None:
    """Raises `InvalidRequest` where a client believes to play another sample."""
    if sample_id not in (None, sample.sample_id, sample.wire_id):
        raise InvalidRequest(f"this secret belongs to sample {sample.sample_id}, not {sample_id}", param="sample_id")


def reported(sample: SampleRecord, report: Report, calls: tuple[str, ...]) -> SampleRecord:
    """The sample as a report ends it; raises `InvalidRequest` where it is about a call that is none of these."""
    report.check_turns(calls)
    ended = replace(
        sample,
        state=SampleState.REPORTED if report.score is not None else SampleState.INVALID,
        reward=report.score,
        metrics=report.metrics,
        turn_rewards=report.turn_rewards,
        stop_reason=report.stop_reason or (StopReason.END_OF_CONVERSATION if report.reason is None else None),
        calls=calls,
        reason=report.reason,
        detail=report.detail,
    )
    return replace(ended, report_digest=ended.expected_report_digest())


def check_same(sample: SampleRecord, report: Report) -> None:
    """Raises `LeaseLost` or `Conflict` unless the sample ended as the report says."""
    if sample.report_digest is None:
        raise LeaseLost(f"the attempt is over; sample {sample.sample_id} is {sample.state}")
    was = (sample.reward, sample.reason, sample.metrics, sample.turn_rewards)
    if was != (report.score, report.reason, report.metrics, report.turn_rewards):
        raise Conflict(f"sample {sample.sample_id} was reported otherwise before")
