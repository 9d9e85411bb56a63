"""The side of a replica that writes: ended calls become records, news and acks.

    ended calls -> [records (the first write wins) + generate_response + token counts, one transaction] -> [ack]

One task (`run`) consumes everything that ended since its last round at once, waits for the storage and nothing else,
and produces call records, responses and acks. It runs beside the engine's next step, so that no step waits for storage.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from turnmill.generation.answers import Parent, Received, Sampled, news_of, response_of
from turnmill.generation.stored import read_calls
from turnmill.ports import Count, Message, RunPorts, WorkQueue, Write
from turnmill.records import GenerateResponse, Purpose, encode, token_count_key

# Recorded calls that are remembered, so that their children need no read: the last one of each open conversation.
_NUM_PARENTS = 4096


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that needs nothing more from the engine: a call to record, or an answer that is ready."""

    received: Received
    sampled: Sampled | None = None
    response: GenerateResponse | None = None


class Recorder:
    """Records what a replica sampled."""

    def __init__(
        self, ports: RunPorts, requests: WorkQueue, receipts: dict[str, float], *, run_id: str, replica: str
    ) -> None:
        """`receipts` are the replica's leases; those that are acked are taken out."""
        self._ports = ports
        self._requests = requests
        self._receipts = receipts
        self._counters = {purpose: token_count_key(run_id, purpose, replica) for purpose in Purpose}
        # What the next round takes up.
        self._ended: list[Ended] = []
        self._has_ended = asyncio.Event()
        # Nothing is being recorded, or waits for it.
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        # Keys of calls that ended and are not recorded yet.
        self.unrecorded: set[str] = set()
        # Calls whose record is this replica's, by key, the longest known first.
        self.parents: OrderedDict[str, Parent] = OrderedDict()
        self._kept: list[Parent] = []

    def put(self, item: Ended) -> None:
        self._ended.append(item)
        self._has_ended.set()
        self._is_settled.clear()

    def take_kept(self) -> list[Parent]:
        """Calls whose record turned out to be this replica's since the last time: their caches may be continued."""
        kept, self._kept = self._kept, []
        return kept

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            batch, self._ended = self._ended, []
            await self._record(batch)
            if not self._ended:
                self._is_settled.set()

    async def drain(self, running: "asyncio.Task[None]") -> None:
        """Wait until everything that ended is recorded; raises what `running`, the task of `run`, raised."""
        settled = asyncio.create_task(self._is_settled.wait(), name="recorder-drain")
        await asyncio.wait([settled, running], return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        if running.done():
            running.result()

    async def _record(self, batch: Sequence[Ended]) -> None:
        """Write and tell, then ack: whatever dies in between is answered from the record later."""
        lost = await self._write([(item.received, item.sampled) for item in batch if item.sampled is not None])
        messages = [_message(item.received, encode(item.response)) for item in batch if item.response is not None]
        # Another answer was first: it is the truth, and what was sampled here is discarded.
        truth = await read_calls(self._ports.records, [item.key for item in lost]) if lost else []
        messages += [_message(item, encode(response_of(call))) for item, call in zip(lost, truth, strict=True) if call]
        if messages:
            await self._ports.generate_response.send(messages)
        self.unrecorded.difference_update(item.received.key for item in batch)
        receipts = [item.received.receipt for item in batch]
        await self._requests.ack(receipts)
        for receipt in receipts:
            self._receipts.pop(receipt, None)

    async def _write(self, sampled: Sequence[tuple[Received, Sampled]]) -> list[Received]:
        """Record calls and send the news of them; those that were recorded by another before."""
        entries = [
            (Write(key=received.key, value=call.value, expected=0), _message(received, news_of(received.request, call)))
            for received, call in sampled
        ]
        counts = [
            Count(key=self._counters[received.request.purpose], amount=call.num_sampled) for received, call in sampled
        ]
        lost: list[Received] = []
        for (received, call), is_ours in zip(sampled, await self._ports.answers.write(entries, counts), strict=True):
            if not is_ours:
                lost.append(received)
                continue
            parent = Parent(key=received.key, digest=call.digest, has_ended=call.has_ended)
            self._kept.append(parent)
            self.parents[parent.key] = parent
            if len(self.parents) > _NUM_PARENTS:
                self.parents.popitem(last=False)
        return lost


def _message(received: Received, body: bytes) -> Message:
    """An answer's message. Whoever waits takes the first of several."""
    return Message(body=body, group=received.key, dedup_id=None)
