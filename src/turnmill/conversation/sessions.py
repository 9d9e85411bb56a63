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
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from turnmill.config import Config
from turnmill.conversation.attempts import Answer, Attempt, Entry, Pending
from turnmill.conversation.calls import Calls
from turnmill.conversation.history import ended_message, write_samples
from turnmill.conversation.leases import CALL_RANGE, Leases
from turnmill.conversation.registry import Registry, SecretKind, hash_secret, name_in, same_hash
from turnmill.conversation.requests import ChatRequest, Report, parse_chat
from turnmill.conversation.service import Service, check_same, check_sample_id, reported
from turnmill.errors import GenerationFailed, InvalidInput, LeaseLost, NotFound
from turnmill.ports import RunPorts
from turnmill.records import Call, Run, RunKind, SampleRecord, SampleState, Sampling

logger = logging.getLogger(__name__)


class Sessions(Service):
    """One process serves the run: `async with Sessions(...)` does until it is left."""

    def __init__(self, ports: RunPorts, *, run: Run, config: Config) -> None:
        if run.kind is RunKind.EXTERNAL:
            raise InvalidInput(
                f"run {run.run_id} has a foreign trainer: its conversations are served by SharedSessions"
            )
        self.calls = Calls(
            ports.records, ports.generate_request, ports.generate_response, timeout_s=config.call_timeout_s
        )
        self._registry = Registry(ports.records, run.run_id)
        super().__init__(ports, run, config, Leases(ports, config, self._registry))
        self._tasks: list[asyncio.Task[None]] = []
        # Calls of clients that may come back for the answer.
        self._held: set[asyncio.Task[Answer]] = set()

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
        await asyncio.gather(*self._tasks, *self._held, return_exceptions=True)
        await self.calls.close()

    def stop(self) -> None:
        """See `Service.stop`."""
        super().stop()
        self.calls.stop()

    async def until_stopped(self) -> None:
        """Until nobody is served any more; `check` then says why, if it was not asked for."""
        await self._stopping.wait()

    @property
    def is_healthy(self) -> bool:
        return super().is_healthy and not any(task.done() for task in self._tasks)

    def check(self) -> None:
        """See `Service.check`; raises what ended a background task, too."""
        super().check()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Without its tasks nobody is answered: say so at once instead of letting calls time out.
            logger.critical("%s ended: %r", task.get_name(), task.exception())
            self.stop()

    # ------------------------------------------------------------ chat

    def parse(self, secret: str, body: bytes) -> ChatRequest:
        """See `Service.parse`."""
        return parse_chat(body, self.sampling, self._registry.heard(secret))

    async def chat(
        self,
        secret: str,
        request: ChatRequest,
        *,
        key: str | None = None,
        is_retry: bool = False,
        hold_s: float | None = None,
    ) -> tuple[Answer, ...] | Pending:
        """See `Service.chat`."""
        attempt = await self._registry.attempt_of(secret)
        check_sample_id(attempt.sample, request.sample_id)
        while attempt.is_current and attempt.next_call >= attempt.call_bound:
            await self._reserve(attempt)
        # No await until the entry is known to `attempt`: two tries of one request must meet there.
        if not attempt.is_current:
            raise LeaseLost(f"the attempt is over; sample {attempt.sample.sample_id} is no longer played by it")
        self.counts.num_chats += 1
        entry = attempt.retry_of(request, key, is_retry)
        if entry is not None:
            self.counts.num_retries += 1
            if hold_s is not None:
                return await self._within(hold_s, attempt, entry, self._answer_again(attempt, entry))
            return (await self._answer_again(attempt, entry),)
        num_forks = attempt.num_forks
        entry, recorded = attempt.begin(request, key)
        if attempt.num_forks > num_forks:
            self.counts.num_forks += 1
            if attempt.num_forks == 1:
                # Once an attempt: an agent that forks at all tends to do it at each turn.
                logger.warning("a request does not go on from what was said: it forks", extra={"at": entry.key})
        if recorded is not None:
            self.counts.num_replayed += 1
            return (attempt.deliver(entry, recorded),)
        asking = self._ask(attempt, entry, request.sampling)
        return (await asking,) if hold_s is None else await self._within(hold_s, attempt, entry, asking)

    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...] | Pending:
        """See `Service.step`. After a restart of this process, a step that had no answer yet is not known any more."""
        attempt = await self._registry.attempt_of(secret)
        entry = attempt.steps.get(step_id)
        if entry is None:
            raise NotFound(f"the attempt has no step {step_id}")
        return await self._within(hold_s, attempt, entry, self._answer_again(attempt, entry))

    async def _within(
        self, hold_s: float, attempt: Attempt, entry: Entry, asking: Coroutine[Any, Any, Answer]
    ) -> tuple[Answer, ...] | Pending:
        """The answer if it is there after `hold_s`; whatever becomes of the client, `asking` goes on to its end."""
        attempt.steps[entry.call_id] = entry
        if entry.asking is None:
            entry.asking = asyncio.create_task(asking, name="sessions-held")
            self._held.add(entry.asking)
            entry.asking.add_done_callback(self._let_go)
        else:
            asking.close()
        held = entry.asking
        # An answer that is there already needs a turn of the loop.
        done, _ = await asyncio.wait([held], timeout=max(hold_s, 0.001))
        if not done:
            return Pending(step_id=entry.call_id)
        if entry.asking is held:
            entry.asking = None
        return (held.result(),)

    def _let_go(self, held: "asyncio.Task[Answer]") -> None:
        self._held.discard(held)
        if not held.cancelled():
            # Told to whoever asks next; an error that nobody asks for is no unhandled one.
            held.exception()

    async def _ask(self, attempt: Attempt, entry: Entry, sampling: Sampling) -> Answer:
        try:
            call = await self.calls.ask(attempt.generate_request(entry, sampling))
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
        """See `Service.report`."""
        secret_hash = hash_secret(secret)
        key = await self._registry.sample_key(secret, SecretKind.REPORT)
        while True:
            sample, version = await self._latest(key, name_in(secret))
            check_sample_id(sample, report.sample_id)
            report.check_range(sample.request.rewards)
            if not same_hash(sample.report_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {sample.sample_id} was leased again")
            if sample.state is not SampleState.LEASED:
                check_same(sample, report)
                break
            attempt = await self._registry.restore(sample, name_in(secret))
            ended = reported(sample, report, tuple(attempt.consumed))
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
