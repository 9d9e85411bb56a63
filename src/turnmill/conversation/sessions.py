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
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from turnmill.config import Config
from turnmill.conversation.attempts import Answer, Attempt, Entry, Pending
from turnmill.conversation.calls import Calls
from turnmill.conversation.history import ended_message, write_samples
from turnmill.conversation.leases import CALL_RANGE, Leases
from turnmill.conversation.registry import Registry, SecretKind, hash_secret, name_in, same_hash
from turnmill.conversation.reports import Report
from turnmill.conversation.requests import ChatRequest, parse_chat, parse_text
from turnmill.conversation.routing import Asked, Routes
from turnmill.conversation.service import Service, check_same, check_sample_id, reported
from turnmill.conversation.tokens import with_tokens
from turnmill.errors import GenerationFailed, InvalidInput, LeaseLost, NotFound
from turnmill.ports import RunPorts
from turnmill.records import Call, Run, RunKind, SampleRecord, SampleState

logger = logging.getLogger(__name__)


class Sessions(Service):
    """One process serves the run: `async with Sessions(...)` does until it is left."""

    is_lone = True

    def __init__(self, ports: RunPorts, *, run: Run, config: Config) -> None:
        if run.kind is RunKind.EXTERNAL:
            raise InvalidInput(
                f"run {run.run_id} has a foreign trainer: its conversations are served by SharedSessions"
            )
        self.calls = Calls(
            ports.records,
            ports.generate_request,
            ports.generate_response,
            Routes(ports.records, run.run_id, len(ports.generate_request)),
            timeout_s=config.call_timeout_s,
        )
        self._registry = Registry(ports.records, run.run_id)
        super().__init__(ports, run, config, Leases(ports, config, self._registry))
        self._tasks: list[asyncio.Task[None]] = []
        # Calls of clients that may come back for the answer.
        self._held: set[asyncio.Task[tuple[Answer, ...]]] = set()

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

    async def parse(self, secret: str, body: bytes, *, is_text: bool = False) -> ChatRequest:
        """See `Service.parse`."""
        offer = self.offer
        if not self._is_alike:
            offer = self._offers[(await self._registry.attempt_of(secret)).sample.purpose]
        return parse_text(body, offer) if is_text else parse_chat(body, offer, self._registry.heard(secret))

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
        while attempt.is_current and attempt.next_call + request.num_choices > attempt.call_bound:
            await self._reserve(attempt, request.num_choices)
        # No await until the entry is known to `attempt`: two tries of one request must meet there.
        if not attempt.is_current:
            raise LeaseLost(f"the attempt is over; sample {attempt.sample.sample_id} is no longer played by it")
        self.counts.num_chats += 1
        entry = attempt.retry_of(request, key, is_retry)
        if entry is not None:
            self.counts.num_retries += 1
            entry.has_logprobs, entry.has_token_ids = request.has_logprobs, request.has_token_ids
            asking = self._answer_again(attempt, entry)
            return await asking if hold_s is None else await self._within(hold_s, attempt, entry, asking)
        num_forks = attempt.num_forks
        entry, recorded = attempt.begin(request, key)
        if attempt.num_forks > num_forks:
            self.counts.num_forks += 1
            if attempt.num_forks == 1:
                # Once an attempt: an agent that forks at all tends to do it at each turn.
                at = attempt.key_of(entry.step_id)
                logger.warning("a request does not go on from what was said: it forks", extra={"at": at})
        self.counts.num_replayed += None not in recorded
        asking = self._ask(attempt, entry, request, recorded)
        return await asking if hold_s is None else await self._within(hold_s, attempt, entry, asking)

    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...] | Pending:
        """See `Service.step`. After a restart of this process, a step that had no answer yet is not known any more."""
        attempt = await self._registry.attempt_of(secret)
        entry = attempt.steps.get(step_id)
        if entry is None:
            raise NotFound(f"the attempt has no step {step_id}")
        return await self._within(hold_s, attempt, entry, self._answer_again(attempt, entry))

    async def _within(
        self, hold_s: float, attempt: Attempt, entry: Entry, asking: Coroutine[Any, Any, tuple[Answer, ...]]
    ) -> tuple[Answer, ...] | Pending:
        """The answers if they are there after `hold_s`; whatever becomes of the client, `asking` goes on to its end."""
        attempt.steps[entry.step_id] = entry
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
            return Pending(step_id=entry.step_id)
        if entry.asking is held:
            entry.asking = None
        return held.result()

    def _let_go(self, held: "asyncio.Task[tuple[Answer, ...]]") -> None:
        self._held.discard(held)
        if not held.cancelled():
            # Told to whoever asks next; an error that nobody asks for is no unhandled one.
            held.exception()

    async def _ask(
        self, attempt: Attempt, entry: Entry, request: ChatRequest, recorded: Sequence[Call | None]
    ) -> tuple[Answer, ...]:
        """Have the choices generated that no earlier attempt has recorded."""
        entry.asked = tuple(
            Asked(request=attempt.generate_request(entry, request, choice), begun_at=attempt.sample.leased_at)
            for choice, call in enumerate(recorded)
            if call is None
        )
        try:
            generated = iter(await _all([self.calls.ask(asked) for asked in entry.asked]))
        except GenerationFailed as error:
            entry.error = error
            raise
        return await self._deliver(attempt, entry, [call or next(generated) for call in recorded])

    async def _answer_again(self, attempt: Attempt, entry: Entry) -> tuple[Answer, ...]:
        if entry.error is not None:
            raise GenerationFailed(entry.error.code, str(entry.error))
        calls: list[Call] = []
        if entry.answers is None:
            asked = {item.request.step_id: item for item in entry.asked}
            calls = await _all(
                [self.calls.ask_again(attempt.key_of(call_id), asked.get(call_id)) for call_id in entry.call_ids]
            )
        return await self._deliver(attempt, entry, calls)

    async def _deliver(self, attempt: Attempt, entry: Entry, calls: Sequence[Call]) -> tuple[Answer, ...]:
        """The answers, which are there already or are these calls."""
        if entry.answers is None and not attempt.is_current:
            raise LeaseLost(f"the attempt ended before its call {entry.step_id} was answered")
        answers = attempt.deliver(entry, calls)
        entry.asked = ()
        if entry.has_logprobs or entry.has_token_ids:
            return await with_tokens(self._ports.records, attempt, answers, has_prompt=entry.has_token_ids)
        return answers

    async def _reserve(self, attempt: Attempt, num: int) -> None:
        """Reserve more call numbers in the sample record, at least `num` that nobody has."""
        async with attempt.lock:
            if attempt.next_call + num <= attempt.call_bound:
                return
            sample, version = await self._registry.read_sample(attempt.sample.key)
            if sample.state is not SampleState.LEASED or sample.chat_secret_hash != attempt.sample.chat_secret_hash:
                self._registry.retire(sample.key)
                return
            bound = max(attempt.next_call, sample.call_bound) + max(num, CALL_RANGE)
            reserved = replace(sample, call_bound=bound)
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


async def _all(asking: Sequence[Awaitable[Call]]) -> list[Call]:
    """The calls, once all of them have ended; raises what one ended with, an error of its own before all others."""
    if len(asking) <= 1:
        return [await asking[0]] if asking else []
    ended = await asyncio.gather(*asking, return_exceptions=True)
    errors = [item for item in ended if isinstance(item, BaseException)]
    if errors:
        raise next((error for error in errors if isinstance(error, GenerationFailed)), errors[0])
    return [item for item in ended if not isinstance(item, BaseException)]
