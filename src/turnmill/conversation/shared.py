"""The sessions of a run that many processes serve at once: instances of a function, containers behind a balancer.

    chat -> pointer of the secret -> sample record -> log of its asks + recorded calls -> the branch that goes on
         -> Ask appended under the next index, if nobody was faster -> generate_request -> Call -> answer a choice

Nothing is taken from this process's memory that another one may have changed, and nothing outlives a request, since a
function may be frozen between two of them. So there is no task here and nobody listens to generate_response: who waits
looks at the records, where `responses` puts a foreign generator's answers and all errors. The log puts the decisions of
all processes one after the other: an entry counts only if it was decided on all entries before it. All choices of a
request are one entry, so that there are all of them or none.

A process that dies between its claim and its send leaves an ask that nobody was asked. Whoever asks for the answer next
sends once more what has waited for too long; of two answers the first record stands.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from msgspec import structs

from turnmill import failpoints
from turnmill.config import Config
from turnmill.conversation.asks import messages_of, new_ask
from turnmill.conversation.attempts import Answer, Attempt, Entry, Pending, failure_of
from turnmill.conversation.foreign import check_wire, is_to_be_played_again, played_again
from turnmill.conversation.history import (
    checked_ask,
    checked_call,
    checked_sample,
    is_given_up,
    read_asks,
    read_calls,
    tell_ended,
    write_samples,
)
from turnmill.conversation.leases import Leases, OnDead
from turnmill.conversation.messages import Heard
from turnmill.conversation.registry import Registry, SecretKind, hash_secret, name_in, same_hash
from turnmill.conversation.reports import Report
from turnmill.conversation.requests import ChatRequest, parse_chat, parse_text
from turnmill.conversation.routing import Routes
from turnmill.conversation.service import Service, check_same, check_sample_id, reported
from turnmill.conversation.tokens import with_tokens
from turnmill.errors import BackendUnavailable, CallTimeout, LeaseLost, NotFound, RecordCorrupt, ShuttingDown
from turnmill.ports import RunPorts, Stored, Write
from turnmill.records import Ask, Call, Purpose, Run, SampleRecord, SampleState, encode

logger = logging.getLogger(__name__)
# Seconds between two looks at a call that is waited for: the first, and the longest.
LOOK_S, MAX_LOOK_S = 0.02, 0.5
# Seconds after which a lost race for an index is run again, at most.
RACE_S = 0.05
# The part of a call's time after which its request is sent once more.
RESEND_PART = 0.25


class _Directory(Registry):
    """Finds attempts in the records and keeps none: another process may have the next word about it."""

    def add(self, attempt: Attempt) -> None:
        """See `Registry.add`: here it is not served from memory."""


@dataclass(kw_only=True)
class _View:
    """A leased sample as its records say it stands."""

    attempt: Attempt
    asks: list[Ask]
    calls: list[Call]

    def ask_of(self, entry: Entry) -> Ask:
        """The latest one of the attempt: a call may be replayed by several attempts, one after the other."""
        return next(ask for ask in reversed(self.asks) if ask.step_id == entry.step_id)


class SharedSessions(Service):
    """What one of the processes does for the requests that come to it; there is nothing to enter or to leave."""

    def __init__(
        self,
        ports: RunPorts,
        *,
        run: Run,
        config: Config,
        resend_s: float | None = None,
        on_dead: OnDead | None = None,
    ) -> None:
        """`resend_s`: how long an ask waits before it is sent once more; None: a quarter of a call's time.

        `on_dead` is told of each sample that was given up.
        """
        self._registry = _Directory(ports.records, run.run_id)
        super().__init__(ports, run, config, Leases(ports, config, self._registry, call_range=0, on_dead=on_dead))
        self._config = config
        self._routes = Routes(ports.records, run.run_id, len(ports.generate_request))
        self._resend_s = config.call_timeout_s * RESEND_PART if resend_s is None else resend_s
        # Requests of one sample that come to this process wait for one another instead of racing.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def fail(self, error: BackendUnavailable) -> None:
        """Serve on: the request was answered with it, and the next one may find the backend again."""
        logger.error("a request could not be served: %s", error)

    # ------------------------------------------------------------ chat

    async def parse(self, secret: str, body: bytes, *, is_text: bool = False) -> ChatRequest:
        """See `Service.parse`."""
        offer = self.offer
        if not self._is_alike:
            sample, _ = await self._registry.read_sample(await self._registry.sample_key(secret, SecretKind.CHAT))
            offer = self._offers[sample.purpose]
        return parse_text(body, offer) if is_text else parse_chat(body, offer, Heard())

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
        sample_key = await self._registry.sample_key(secret, SecretKind.CHAT)
        lock = self._turns.setdefault(sample_key, asyncio.Lock())
        async with lock:
            attempt, entry, ask = await self._begin(sample_key, secret, request, key, is_retry)
        if entry.error is not None:
            raise entry.error
        calls: list[Call] | None = []
        if entry.answers is None:
            give_up_at = time.time() + self._config.call_timeout_s
            calls = await self._wait(attempt.sample, ask, hold_s=hold_s, give_up_at=give_up_at)
        return Pending(step_id=ask.step_id) if calls is None else await self._answers(attempt, entry, calls)

    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...] | Pending:
        """See `Service.step`."""
        sample = await self._played(await self._registry.sample_key(secret, SecretKind.CHAT), secret)
        asks = [checked_ask(stored) for stored in await read_asks(self._ports.records, *place_of(sample))]
        ask = next((ask for ask in asks if (ask.attempt, ask.step_id) == (sample.attempt, step_id)), None)
        if ask is None:
            raise NotFound(f"the attempt has no step {step_id}")
        give_up_at = ask.created_at + self._config.call_timeout_s
        if await self._wait(sample, ask, hold_s=hold_s, give_up_at=give_up_at) is None:
            return Pending(step_id=step_id)
        # What it goes on from is read only now: most of those who ask for a step ask too early.
        view = await self._view(sample, name_in(secret))
        entry = view.attempt.steps[step_id]
        if entry.answers is None:
            raise RecordCorrupt(f"a call of {ask.key} was removed while it was read")
        return await self._answers(view.attempt, entry, [])

    async def _answers(self, attempt: Attempt, entry: Entry, calls: Sequence[Call]) -> tuple[Answer, ...]:
        """What the client is told: answers that are there already, or these calls."""
        answers = attempt.deliver(entry, calls)
        if entry.has_logprobs or entry.has_token_ids:
            return await with_tokens(self._ports.records, attempt, answers, has_prompt=entry.has_token_ids)
        return answers

    async def _begin(
        self, sample_key: str, secret: str, request: ChatRequest, key: str | None, is_retry: bool
    ) -> tuple[Attempt, Entry, Ask]:
        """The entry of a request and its ask, which was there, or is now, and was sent."""
        while True:
            view = await self._view(await self._played(sample_key, secret), name_in(secret))
            attempt = view.attempt
            check_sample_id(attempt.sample, request.sample_id)
            check_wire(attempt.sample, request)
            entry = attempt.retry_of(request, key, is_retry)
            if entry is not None:
                self.counts.num_chats += 1
                self.counts.num_retries += 1
                entry.has_logprobs, entry.has_token_ids = request.has_logprobs, request.has_token_ids
                return attempt, entry, view.ask_of(entry)
            num_forks = attempt.num_forks
            entry, recorded = attempt.begin(request, key)
            await self._routes.refresh()
            replica = self._routes.replica_of(attempt.sample.sample_id, attempt.sample.leased_at)
            ask = new_ask(attempt, entry, request, key, recorded, index=len(view.asks), replica=replica)
            if not await self._claim(ask):
                await asyncio.sleep(random.uniform(0, RACE_S))
                continue
            failpoints.hit("ask-claimed")
            self.counts.num_chats += 1
            if attempt.num_forks > num_forks:
                self.counts.num_forks += 1
                if attempt.num_forks == 1:
                    at = attempt.key_of(entry.step_id)
                    logger.warning("a request does not go on from what was said: it forks", extra={"at": at})
            replayed = [call for call in recorded if call is not None]
            if len(replayed) == len(recorded):
                self.counts.num_replayed += 1
                attempt.deliver(entry, replayed)
            else:
                await self._send(attempt.sample, ask, view.calls)
            return attempt, entry, ask

    async def _claim(self, ask: Ask) -> bool:
        """Append to the log; False where another ask has taken the index."""
        (ok,) = await self._ports.records.write([Write(key=ask.key, value=encode(ask), expected=0)])
        return ok

    async def _send(self, sample: SampleRecord, ask: Ask, calls: Sequence[Call]) -> None:
        """Ask for what is missing, of these recorded calls."""
        if messages := messages_of(sample, ask, calls):
            await self._ports.generate_request[ask.replica].send(messages)

    # ------------------------------------------------------------ waiting

    async def _wait(
        self, sample: SampleRecord, ask: Ask, *, hold_s: float | None, give_up_at: float
    ) -> list[Call] | None:
        """Look at the records until all calls are there; None after `hold_s`. `give_up_at`: Unix seconds."""
        let_go_at = None if hold_s is None else time.monotonic() + hold_s
        look_s = LOOK_S
        while True:
            found = await self._look(sample, ask)
            if isinstance(found, list):
                return found
            await self._send_again(sample, found)
            if time.time() >= give_up_at:
                raise CallTimeout(f"the call was not answered within {self._config.call_timeout_s:g} s")
            if not self.is_healthy:
                raise ShuttingDown("the proxy is closing")
            left_s = look_s if let_go_at is None else let_go_at - time.monotonic()
            if left_s <= 0:
                return None
            await asyncio.sleep(min(look_s, left_s))
            look_s = min(2 * look_s, MAX_LOOK_S)

    async def _look(self, sample: SampleRecord, ask: Ask) -> list[Call] | Stored:
        """The calls, if all are recorded; else the ask as it stands. Raises what one of them failed with."""
        latest, stored, *found = await self._ports.records.get([sample.key, ask.key, *ask.call_keys])
        if latest is None or not is_played_by(checked_sample(latest), sample.chat_secret_hash):
            raise LeaseLost(f"the attempt ended before its call {ask.step_id} was answered")
        calls = [checked_call(call) for call in found if call is not None]
        if len(calls) == len(found):
            return calls
        if stored is None:
            raise RecordCorrupt(f"{ask.key} was removed while its call was waited for")
        for asked, call in zip(checked_ask(stored).calls, found, strict=True):
            if call is None and asked.error is not None:
                raise failure_of(asked.error)
        return stored

    async def _send_again(self, sample: SampleRecord, stored: Stored) -> None:
        """Send the request of an ask once more, if it has waited for too long since, or its replica is gone."""
        ask, now = checked_ask(stored), time.time()
        await self._routes.refresh()
        replica = self._routes.new_replica_of(
            sample.sample_id, sample.leased_at, replica=ask.replica, sent_at=ask.sent_at
        )
        if replica is None:
            if now - ask.sent_at < self._resend_s:
                return
            replica = self._routes.replica_of(sample.sample_id, sample.leased_at)
        again = structs.replace(ask, epoch=ask.epoch + 1, sent_at=now, replica=replica)
        (ok,) = await self._ports.records.write([Write(key=ask.key, value=encode(again), expected=stored.version)])
        # Else somebody does it in this moment.
        if ok:
            at = ask.call_keys[0]
            logger.warning("a call is sent once more after %.0f s", now - ask.created_at, extra={"at": at})
            await self._send(sample, again, await read_calls(self._ports.records, *place_of(sample)))

    # ------------------------------------------------------------ records

    async def _played(self, sample_key: str, secret: str) -> SampleRecord:
        """The sample whose current attempt a chat secret opens; raises `LeaseLost` where that is over."""
        sample, _ = await self._registry.read_sample(sample_key)
        if not is_played_by(sample, hash_secret(secret)):
            raise LeaseLost(f"the attempt is over; sample {sample.sample_id} is no longer played by it")
        return sample

    async def _view(self, sample: SampleRecord, name: str) -> _View:
        # First what was asked, then what is recorded: whatever an ask goes on from was recorded before it.
        asks = [checked_ask(stored) for stored in await read_asks(self._ports.records, *place_of(sample))]
        calls = await read_calls(self._ports.records, *place_of(sample)) if asks else []
        attempt = Attempt(sample=sample, name=name, next_call=sample.call_bound, call_bound=sample.call_bound)
        attempt.load_log(asks, calls)
        return _View(attempt=attempt, asks=asks, calls=calls)

    # ------------------------------------------------------------ report

    async def report(self, secret: str, report: Report) -> None:
        """See `Service.report`. For a foreign trainer a sample without a score is played again, while it may be."""
        secret_hash = hash_secret(secret)
        key = await self._registry.sample_key(secret, SecretKind.REPORT)
        while True:
            sample, version = await self._registry.read_sample(key)
            check_sample_id(sample, report.sample_id)
            report.check_range(sample.request.rewards)
            if not same_hash(sample.report_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {sample.sample_id} was leased again")
            if sample.state is SampleState.REQUESTED and (sample.reason, report.score) == (report.reason, None):
                break
            if sample.state is not SampleState.LEASED:
                check_same(sample, report)
                break
            view = await self._view(sample, name_in(secret))
            if is_to_be_played_again(sample, report.score, self._config.max_attempts):
                ended = played_again(sample, report)
            else:
                ended = reported(sample, report, tuple(view.attempt.consumed))
            (ok,) = await write_samples(self._ports.records, [(ended, version)])
            if ok:
                sample = ended
                self.counts.num_reports += 1
                failpoints.hit("sample-reported")
                break
        await self._tell(sample)

    async def _tell(self, sample: SampleRecord) -> None:
        """Say how a report ended an attempt; done again, it says the same."""
        receipts = [] if sample.receipt is None else [sample.receipt]
        if sample.state is SampleState.REQUESTED:
            await self._ports.rollout_request.release(receipts)
            return
        if is_given_up(sample) and not sample.is_told:
            await self._leases.give_up(sample)
        # The news first: if this process dies in between, the message comes back and the news is told again.
        await tell_ended(self._ports.records, self._ports.rollout_response, [sample])
        await self._ports.rollout_request.ack(receipts)


def is_played_by(sample: SampleRecord, chat_secret_hash: str | None) -> bool:
    """Whether the attempt of a chat secret is the current one, and not over."""
    is_leased = sample.state is SampleState.LEASED
    return is_leased and chat_secret_hash is not None and same_hash(sample.chat_secret_hash, chat_secret_hash)


def place_of(sample: SampleRecord) -> tuple[str, Purpose, str]:
    """Where the records of a sample's asks and calls lie."""
    return sample.run_id, sample.purpose, sample.sample_id
