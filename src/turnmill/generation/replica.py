"""The replica: answers generate requests.

    generate_request ─▶ [lease] ─▶ records: answered? parent? ─▶ [render] ─▶ engine slots ─▶ [step] ─▶ ended calls
                                                                                                           │
    proxy ◀─ generate_response ◀─ [ack] ◀─ records (first write wins) and their news, in one transaction ◀─┘

Tasks of one replica:
    generate: consumes generate_request and the weight pointer; waits for either when nothing runs; unblocked by a
        message, by new weights or by `stop`; produces ended calls. The only one that touches the engine.
    record (`Recorder`): consumes ended calls; produces call records, responses, acks.
    leases: extends the leases of everything that is leased and not acked.
    beat (`Presence`): gives signs of life.

No call is taken before the memory that samples was proved to hold the current weights (`Swapper`); they are swapped
only while nothing runs, so a call has exactly one version. A request that was answered before (the message came again,
or another replica was faster) is answered from the record; what this replica sampled is discarded.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
from msgspec import structs

from turnmill.config import Config
from turnmill.errors import GenerationFailed, RecordCorrupt, WeightsUnproved
from turnmill.generation.answers import (
    Job,
    Parent,
    Received,
    parent_of,
    received_of,
    refusal_of,
    response_of,
    sampled_of,
)
from turnmill.generation.engine import Engine, EngineCall, EngineResult
from turnmill.generation.presence import Presence
from turnmill.generation.recorder import Ended, Recorder
from turnmill.generation.renderer import Renderer
from turnmill.generation.replies import ends_at, read_reply, reads_calls
from turnmill.generation.stability import warn_of_differences
from turnmill.generation.stored import read_calls, read_paths
from turnmill.generation.swapping import Swapper
from turnmill.ports import Leased, RunPorts
from turnmill.records import Call

logger = logging.getLogger(__name__)

# How long the calls of a replica that was killed wait for its successor at most, which needs some seconds to start.
_LEASE_S = 10.0
# How long one lease waits for messages; bounds how long `stop` takes.
_WAIT_S = 0.5
# How often an idle replica looks at the weight pointer.
_IDLE_S = 0.05
# How long a replica that is told to end lets its running calls go on: less than launchers wait before they force it.
_DRAIN_S = 5.0


async def run_replica(
    ports: RunPorts,
    *,
    run_id: str,
    name: str,
    index: int,
    config: Config,
    engine: Engine,
    renderer: Renderer,
    stop: asyncio.Event,
) -> None:
    """Serve `generate_request[index]` until `stop` is set.

    Calls that run then are given back; where other replicas serve meanwhile, those that end soon are answered first.
    Raises `WeightsUnproved` before it serves weights that are not those that were published, `RecordCorrupt` when a
    stored call does not match its digest, and whatever a port raises: the process ends, its leases run out and others
    answer.
    """
    await asyncio.to_thread(warn_of_differences, renderer)
    replica = _Replica(ports, run_id, name, index, config, engine, renderer, stop)
    await replica.presence.begin()
    serving = asyncio.create_task(replica.generate(), name=f"{name}-generate")
    helpers = [
        asyncio.create_task(replica.recorder.run(), name=f"{name}-record"),
        asyncio.create_task(replica.extend_leases(), name=f"{name}-leases"),
        asyncio.create_task(replica.presence.beat(), name=f"{name}-beat"),
    ]
    try:
        # The helpers return only by raising.
        await asyncio.wait([serving, *helpers], return_when=asyncio.FIRST_COMPLETED)
        for task in helpers:
            if task.done():
                task.result()
        await serving
        await replica.recorder.drain(helpers[0])
        await replica.presence.end()
    except WeightsUnproved as error:
        logger.error("%s stops: %s", name, error)
        # What was sampled before is as good as its version.
        await replica.recorder.drain(helpers[0])
        raise
    except RecordCorrupt as error:
        logger.error("%s stops: %s", name, error)
        await replica.presence.end(str(error))
        raise
    finally:
        for task in (serving, *helpers):
            task.cancel()
        await asyncio.gather(serving, *helpers, return_exceptions=True)


class _Replica:
    """State that the three tasks share; only `generate` touches the engine."""

    def __init__(
        self,
        ports: RunPorts,
        run_id: str,
        name: str,
        index: int,
        config: Config,
        engine: Engine,
        renderer: Renderer,
        stop: asyncio.Event,
    ) -> None:
        self._ports = ports
        self._requests = ports.generate_request[index]
        self._run_id = run_id
        self._name = name
        self._config = config
        self._engine = engine
        self._renderer = renderer
        self._stop = stop
        self.presence = Presence(ports.records, run_id, name, engine.version, config)
        self._swapper = Swapper(ports.weights, engine, self.presence)
        self._inbox: list[Leased] = []
        self._lease: asyncio.Task[list[Leased]] | None = None
        self._jobs: dict[str, Job] = {}
        # Requests that came again while this replica answers them; they stay leased until there is a record.
        self._repeats: list[Received] = []
        # How many messages the last lease asked for, and whether so many came.
        self._num_wanted = 0
        self._is_full = True
        # Messages may wait here that came while nobody served, and that others have answered since.
        self._is_behind = config.generation_replicas > 1
        # Leased and neither acked nor released, with the time of the last extension.
        self._receipts: dict[str, float] = {}
        self.recorder = Recorder(ports, self._requests, self._receipts, run_id=run_id, replica=name)

    # ------------------------------------------------------------ generate

    async def generate(self) -> None:
        stopped = asyncio.create_task(self._stop.wait(), name=f"{self._name}-stop")
        try:
            # Takes no message before.
            while not (self._stop.is_set() or await self._swapper.follow()):
                pass
            while not self._stop.is_set():
                self._collect()
                # Asked whenever calls could be admitted, and otherwise only when idle.
                if (self._engine.num_running and not self._inbox) or await self._swapper.follow():
                    await self._admit()
                if self._engine.num_running:
                    await self._step()
                elif not self._inbox:
                    waiting = {stopped, self._lease} if self._lease else {stopped}
                    await asyncio.wait(waiting, timeout=_IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopped.cancel()
            await self._give_back()

    async def _step(self) -> None:
        for result in await asyncio.to_thread(self._engine.step):
            self._end(result)

    async def _drain(self) -> None:
        """Take nothing any more; what runs goes on for a while, unless it waits for this replica's successor anyway."""
        await self.presence.drain()
        await self._give_back(with_running=False)
        until = time.monotonic() + (_DRAIN_S if self._config.generation_replicas > 1 else 0.0)
        while self._engine.num_running and time.monotonic() < until:
            await self._step()

    def _collect(self) -> None:
        """Take what the pending lease brought, and ask for as much as there is room for."""
        if self._lease is not None and self._lease.done():
            lease, self._lease = self._lease, None
            brought = lease.result()
            self._is_full = len(brought) == self._num_wanted
            self._inbox.extend(brought)
            self._receipts.update(dict.fromkeys((item.receipt for item in brought), time.monotonic()))
        room = self._engine.num_free - len(self._inbox)
        if self._lease is None and room > 0:
            self._num_wanted = room
            self._lease = asyncio.create_task(
                self._requests.lease(max_messages=room, lease_s=_LEASE_S, wait_s=_WAIT_S), name=f"{self._name}-lease"
            )

    async def _admit(self) -> None:
        """Bring the inbox into the engine, as far as it is not answered at once."""
        for kept in self.recorder.take_kept():
            self._engine.keep(kept.key, kept.digest)
        repeats = self._take_settled()
        was_behind, self._is_behind = self._is_behind, self._is_behind and self._is_full
        if not self._inbox and not repeats:
            return
        leased, self._inbox = self._inbox, []
        received = [*repeats, *await self._decode(leased)]
        recorded, parents = await self._look(received, are_old=was_behind)
        missing: list[Job] = []
        claimed = self._jobs.keys() | self.recorder.unrecorded
        for item in received:
            call = recorded.get(item.key)
            if call is not None:
                self.recorder.put(Ended(received=item, response=response_of(call)))
            elif item.key in claimed:
                self._repeats.append(structs.replace(item, is_repeated=True))
            else:
                claimed.add(item.key)
                job = self._prepare(item, parents.get(item.parent_key or ""))
                if job is not None and not self._submit(job):
                    missing.append(job)
        # Caches that are held were taken first, so that these evict none of them.
        last_calls = [(job.parent.key, job.parent.digest) for job in missing if job.parent]
        for job, path in zip(missing, await read_paths(self._ports.records, last_calls), strict=True):
            self._submit(job, path)

    def _take_settled(self) -> list[Received]:
        """Requests that came again, and whose first answer is recorded by now."""
        if not self._repeats:
            return []
        claimed = self._jobs.keys() | self.recorder.unrecorded
        settled = [item for item in self._repeats if item.key not in claimed]
        self._repeats = [item for item in self._repeats if item.key in claimed]
        return settled

    async def _look(self, received: Sequence[Received], *, are_old: bool) -> tuple[dict[str, Call], dict[str, Parent]]:
        """The records of requests that may be answered already, and what the others go on from, by key.

        A request that is new to the queue is not looked up, unless it may have waited here for long: should it be
        answered all the same, its record stands.
        """
        known = self.recorder.parents
        parents = {
            item.parent_key: known[item.parent_key] for item in received if item.parent_key and item.parent_key in known
        }
        answered = {item.key for item in received if are_old or item.is_repeated or item.key in known}
        wanted = {item.parent_key for item in received if item.parent_key and item.parent_key not in parents}
        keys = sorted(answered | wanted)
        if not keys:
            return {}, parents
        found = zip(keys, await read_calls(self._ports.records, keys), strict=True)
        recorded = {key: call for key, call in found if call is not None}
        for key in wanted & recorded.keys():
            parents[key] = parent_of(recorded[key], self._renderer.end_ids)
        return {key: recorded[key] for key in answered & recorded.keys()}, parents

    async def _decode(self, leased: Sequence[Leased]) -> list[Received]:
        """Messages that can't be read go back, until the queue's own limit makes them dead letters."""
        received = []
        for item in leased:
            try:
                received.append(received_of(item))
            except msgspec.DecodeError as error:
                logger.error("a generate request can't be read: %s", error, extra={"at": item.group})
                await self._abandon(item.receipt)
        return received

    def _prepare(self, item: Received, parent: Parent | None) -> Job | None:
        """Render the new messages; None when the request was refused."""
        request = item.request
        try:
            begun = self._renderer.begun(request.tool_choice, request.tools)
            if item.parent_key is None:
                new_ids = self._renderer.opening(request.messages, request.tools, begun)
            elif parent is None:
                raise GenerationFailed(
                    "unknown_parent", f"the call {request.parent} that this one continues is unknown"
                )
            else:
                new_ids = self._renderer.continuation(
                    request.messages, ended=parent.has_ended, tools=request.tools, begun=begun
                )
        except GenerationFailed as error:
            self.recorder.put(Ended(received=item, response=refusal_of(request, error)))
            return None
        return Job(received=item, parent=parent, new_ids=new_ids, begun=begun, version=self._engine.version)

    def _submit(self, job: Job, path: list[int] | None = None) -> bool:
        """Give the job to the engine or refuse it; False when its stored path has to be read first."""
        prefix_key = job.parent.digest if job.parent else None
        held = self._engine.held_length(prefix_key) if prefix_key else 0
        if held is None and path is None:
            return False
        num_prompt = (len(path) if held is None and path is not None else held or 0) + len(job.new_ids)
        request, key = job.received.request, job.received.key
        limit = min(request.max_length or self._config.max_length, self._engine.max_length)
        room = min(request.sampling.max_new_tokens, limit - num_prompt)
        seed = [] if request.sampling.seed is None else [f"seed {request.sampling.seed}"]
        try:
            if room < 1:
                raise GenerationFailed(
                    "context_length_exceeded", f"the prompt has {num_prompt} tokens, the conversation may have {limit}"
                )
            self._engine.submit(
                EngineCall(
                    call_id=key,
                    seed_parts=(str(self._config.seed), str(request.purpose), request.step_id, *seed),
                    prefix_key=prefix_key,
                    new_ids=job.new_ids,
                    context_ids=path,
                    sampling=request.sampling,
                    max_new_tokens=room,
                    end_ids=self._renderer.end_ids,
                    is_over=ends_at(
                        self._renderer,
                        reads_calls(self._renderer, request.tools, request.tool_choice),
                        request.sampling.stop,
                    ),
                )
            )
        except GenerationFailed as error:
            self.recorder.put(Ended(received=job.received, response=refusal_of(request, error)))
        else:
            self._jobs[key] = job
        return True

    def _end(self, result: EngineResult) -> None:
        job = self._jobs.pop(result.call_id)
        received = job.received
        self.recorder.unrecorded.add(received.key)
        if result.error is not None:
            response = refusal_of(received.request, GenerationFailed("generation_failed", result.error))
            self.recorder.put(Ended(received=received, response=response))
            return
        request = received.request
        reply = read_reply(
            self._renderer,
            reads_calls(self._renderer, request.tools, request.tool_choice),
            result.token_ids,
            call_id=request.step_id,
            begun=job.begun,
            stops=request.sampling.stop,
            finish_reason=result.finish_reason,
        )
        sampled = sampled_of(job, result, reply, self._renderer.end_ids)
        self.recorder.put(Ended(received=received, sampled=sampled))

    async def _abandon(self, receipt: str) -> None:
        """Give a message back that this replica can't use now."""
        self._receipts.pop(receipt, None)
        await self._requests.release([receipt], delay_s=1.0)

    async def _give_back(self, *, with_running: bool = True) -> None:
        """Release what is leased and not sampled to its end."""
        if self._lease is not None:
            self._inbox.extend(await self._lease)
            self._lease = None
        receipts = [item.receipt for item in self._inbox] + [item.receipt for item in self._repeats]
        self._inbox, self._repeats = [], []
        if with_running:
            receipts += [job.received.receipt for job in self._jobs.values()]
        for receipt in receipts:
            self._receipts.pop(receipt, None)
        if receipts:
            await self._requests.release(receipts)

    async def extend_leases(self) -> None:
        """A lease that was lost all the same costs a second answer, which the record then discards."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_LEASE_S / 6)
            now = time.monotonic()
            if now - last > _LEASE_S:
                # The process was stopped: others have had its calls meanwhile.
                self._is_behind = self._config.generation_replicas > 1
            last = now
            due = [receipt for receipt, extended in self._receipts.items() if now - extended > _LEASE_S / 3]
            if due:
                await self._requests.extend(due, _LEASE_S)
                self._receipts.update({receipt: now for receipt in due if receipt in self._receipts})
