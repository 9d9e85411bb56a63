"""Who plays which sample: leases, chats and reports of attempts. Knows no HTTP (`proxy` does).

    lease -> LEASED(attempt) in the sample record -> chat* (calls recorded) -> report -> REPORTED | INVALID -> news

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| listen | generate_response | a message | a replica | answers of waiting calls |
| look | Call records | a second | the clock | answers whose message was lost |

A sample record is only ever changed by compare-and-set. Secrets exist as SHA-256 hashes only: in the sample record
(which attempt is current) and in a pointer from the attempt's name, in which they begin, to the sample, so that a
restarted proxy finds it again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnmill.config import Config
from turnmill.conversation.attempts import Answer, Attempt, Entry
from turnmill.conversation.calls import Calls
from turnmill.conversation.history import ended_message, write_samples
from turnmill.conversation.leases import CALL_RANGE, Lease, Leases
from turnmill.conversation.registry import Registry, SecretKind, hash_secret, name_in, same_hash
from turnmill.conversation.requests import ChatRequest, Report, parse_chat
from turnmill.errors import (
    BackendUnavailable,
    Conflict,
    GenerationFailed,
    InvalidRequest,
    LeaseLost,
    ShuttingDown,
    Unauthorized,
)
from turnmill.ports import Leased, RunPorts, Write
from turnmill.records import Call, Run, SampleRecord, SampleState, Sampling, StopReason, WorkerStatus, encode

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


class Sessions:
    """The conversations of one run: `async with Sessions(...)` serves them until it is left.

    `base_url` is where workers reach the chat route; set it before the first lease.
    """

    def __init__(self, ports: RunPorts, *, run: Run, config: Config) -> None:
        self.base_url = ""
        self.counts = SessionCounts()
        self.sampling = Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        self.calls = Calls(
            ports.records, ports.generate_request, ports.generate_response, timeout_s=config.call_timeout_s
        )
        self._ports = ports
        self._run = run
        self._registry = Registry(ports.records, run.run_id)
        self._leases = Leases(ports, config, self._registry)
        self._workers: set[str] = set()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # What nobody can be served any more for.
        self._failure: BackendUnavailable | None = None

    @property
    def num_attempts(self) -> int:
        """Attempts in memory: about as many as are being played."""
        return len(self._registry)

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> "Sessions":
        for name, job in (("listen", self.calls.listen()), ("look", self.calls.look())):
            task = asyncio.create_task(job, name=f"sessions-{name}")
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.calls.close()

    def stop(self) -> None:
        """Send away everybody who waits: calls fail with `ShuttingDown`, lease requests come back empty. Idempotent."""
        self._stopping.set()
        self.calls.stop()

    @property
    def is_healthy(self) -> bool:
        return not self._stopping.is_set() and not any(task.done() for task in self._tasks)

    def fail(self, error: BackendUnavailable) -> None:
        """Stop serving: the backend has made its own retries, and workers that try again would wait without end."""
        if self._failure is None and not self._stopping.is_set():
            logger.critical("no conversation can go on: %s", error)
            self._failure = error
            self.stop()

    def check(self) -> None:
        """Raise what ended a background task or the serving, for a supervisor: nobody is answered any more."""
        if self._failure is not None:
            raise self._failure
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Without its tasks nobody is answered: say so at once instead of letting calls time out.
            logger.critical("%s ended: %r", task.get_name(), task.exception())
            self.stop()

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

    # ------------------------------------------------------------ chat

    def parse(self, secret: str, body: bytes) -> ChatRequest:
        """A chat body as the attempt of this secret may send it; raises `InvalidRequest` naming the key."""
        return parse_chat(body, self.sampling, self._registry.heard(secret))

    async def chat(
        self, secret: str, request: ChatRequest, *, key: str | None = None, is_retry: bool = False
    ) -> Answer:
        """Answer one chat request: a transport retry with the same call, any other with a call of its own.

        Raises `Unauthorized`, `LeaseLost`, `InvalidRequest`, `GenerationFailed`, `CallTimeout`, `ShuttingDown`.
        """
        attempt = await self._registry.attempt_of(secret)
        self._check_sample_id(attempt.sample, request.sample_id)
        while attempt.is_current and attempt.next_call >= attempt.call_bound:
            await self._reserve(attempt)
        # No await until the entry is known to `attempt`: two tries of one request must meet there.
        if not attempt.is_current:
            raise LeaseLost(f"the attempt is over; sample {attempt.sample.sample_id} is no longer played by it")
        self.counts.num_chats += 1
        entry = attempt.retry_of(request, key, is_retry)
        if entry is not None:
            self.counts.num_retries += 1
            return await self._answer_again(attempt, entry)
        num_forks = attempt.num_forks
        entry, recorded = attempt.begin(request, key)
        if attempt.num_forks > num_forks:
            self.counts.num_forks += 1
            if attempt.num_forks == 1:
                # Once an attempt: an agent that forks at all tends to do it at each turn.
                logger.warning("a request does not go on from what was said: it forks", extra={"at": entry.key})
        if recorded is not None:
            self.counts.num_replayed += 1
            return attempt.deliver(entry, recorded)
        try:
            call = await self.calls.ask(attempt.generate_request(entry, request.sampling))
        except GenerationFailed as error:
            entry.error = error
            raise
        return self._deliver_current(attempt, entry, call)

    async def _answer_again(self, attempt: Attempt, entry: Entry) -> Answer:
        if entry.answer is not None:
            return entry.answer
        if entry.error is not None:
            raise GenerationFailed(entry.error.code, str(entry.error))
        return self._deliver_current(attempt, entry, await self.calls.ask_again(entry.key))

    @staticmethod
    def _deliver_current(attempt: Attempt, entry: Entry, call: Call) -> Answer:
        if not attempt.is_current:
            raise LeaseLost(f"the attempt ended before its call {entry.call_id} was answered")
        return attempt.deliver(entry, call)

    @staticmethod
    def _check_sample_id(sample: SampleRecord, sample_id: str | None) -> None:
        if sample_id is not None and sample_id != sample.sample_id:
            raise InvalidRequest(
                f"this secret belongs to sample {sample.sample_id}, not {sample_id}", param="sample_id"
            )

    async def _reserve(self, attempt: Attempt) -> None:
        """Reserve more call numbers in the sample record."""
        async with attempt.lock:
            if attempt.next_call < attempt.call_bound:
                return
            sample, version = await self._registry.read_sample(attempt.sample.key)
            if sample.state is not SampleState.LEASED or sample.chat_secret_hash != attempt.sample.chat_secret_hash:
                self._registry.retire(sample.key)
                return
            reserved = replace(sample, call_bound=max(attempt.next_call, sample.call_bound) + CALL_RANGE)
            (ok,) = await write_samples(self._ports.records, [(reserved, version)])
            if ok:
                attempt.call_bound = reserved.call_bound
                attempt.sample, attempt.version = reserved, version + 1

    # ------------------------------------------------------------ report

    async def report(self, secret: str, report: Report) -> None:
        """End the sample with a worker's report; saying the same once more is no error.

        Raises `Unauthorized`, `LeaseLost` (not the current attempt), `Conflict` (reported otherwise before),
        `InvalidRequest`.
        """
        secret_hash = hash_secret(secret)
        key = await self._registry.sample_key(secret, SecretKind.REPORT)
        while True:
            sample, version = await self._latest(key, name_in(secret))
            self._check_sample_id(sample, report.sample_id)
            report.check_range(sample.request.rewards)
            if not same_hash(sample.report_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {sample.sample_id} was leased again")
            if sample.state is not SampleState.LEASED:
                self._check_same(sample, report)
                break
            attempt = await self._registry.restore(sample, name_in(secret))
            ended = self._reported(sample, report, tuple(attempt.consumed))
            (ok,) = await write_samples(self._ports.records, [(ended, version)])
            if ok:
                sample = ended
                self.counts.num_reports += 1
                break
        self._registry.retire(key)
        # The news first: if this process dies in between, the message comes back and the news is told again.
        await self._ports.rollout_response.send([ended_message(sample)])
        if sample.receipt is not None:
            await self._ports.rollout_request.ack([sample.receipt])

    async def _latest(self, key: str, name: str) -> tuple[SampleRecord, int]:
        """The sample to report and its version: as written here the first time, as recorded from then on."""
        attempt = self._registry.get(key)
        # Another proxy may have leased a later attempt than the one that is in memory.
        if attempt is None or attempt.version is None or attempt.name != name:
            return await self._registry.read_sample(key)
        version, attempt.version = attempt.version, None
        return attempt.sample, version

    @staticmethod
    def _reported(sample: SampleRecord, report: Report, calls: tuple[str, ...]) -> SampleRecord:
        ended = replace(
            sample,
            state=SampleState.REPORTED if report.score is not None else SampleState.INVALID,
            reward=report.score,
            metrics=report.metrics,
            stop_reason=report.stop_reason or (StopReason.END_OF_CONVERSATION if report.reason is None else None),
            calls=calls,
            reason=report.reason,
            detail=report.detail,
        )
        return replace(ended, report_digest=ended.expected_report_digest())

    @staticmethod
    def _check_same(sample: SampleRecord, report: Report) -> None:
        if sample.report_digest is None:
            raise LeaseLost(f"the attempt is over; sample {sample.sample_id} is {sample.state}")
        if (sample.reward, sample.reason, sample.metrics) != (report.score, report.reason, report.metrics):
            raise Conflict(f"sample {sample.sample_id} was reported otherwise before")
