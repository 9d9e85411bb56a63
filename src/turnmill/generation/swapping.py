"""The weights of a replica: the current version is followed, loaded between calls, and proved before it is served.

weight pointer -> [wait for running calls] -> load -> fingerprint of the memory that samples -> served | refused
"""

import asyncio
from pathlib import Path

from turnmill.errors import RecordCorrupt, WeightsUnproved
from turnmill.generation.engine import Engine
from turnmill.generation.presence import Presence
from turnmill.ports import WeightStore
from turnmill.records import WeightVersion


class Swapper:
    """Keeps an engine at the current version; to be called by the one that owns the engine."""

    def __init__(self, weights: WeightStore, engine: Engine, presence: Presence) -> None:
        self._weights = weights
        self._engine = engine
        self._presence = presence
        # What the memory was proved to hold; None: the base model, of which nothing was published yet.
        self._proved: WeightVersion | None = None
        self._has_proved = False

    async def follow(self) -> bool:
        """Load the current version once nothing runs, and prove it; False while that has to be waited for.

        Raises `WeightsUnproved` where the memory is not what was published, and `RecordCorrupt` where that can't be
        loaded.
        """
        current = await self._weights.current()
        if self._has_proved and current in (None, self._proved):
            return True
        if current is not None and current.version != self._engine.version:
            if self._engine.num_running:
                await self._presence.await_swap(current.version)
                return False
            await self._presence.begin_swap(current.version)
            try:
                await asyncio.to_thread(self._engine.load, Path(current.location), current.version)
            except RecordCorrupt:
                if await self._weights.current() == current:
                    raise
                # This process was so slow that the trainer has gone on and removed that version: load the next one.
                return False
        await self._prove(current)
        return True

    async def _prove(self, published: WeightVersion | None) -> None:
        """Compare what is in memory with what was published; of a base model that nobody published, only tell it."""
        found = await asyncio.to_thread(self._engine.fingerprint)
        if published is not None and found != published.digest:
            text = (
                f"its memory does not hold version {published.version}: the fingerprint is {found}, published was "
                f"{published.digest} ({published.location})"
            )
            await self._presence.refuse(text)
            raise WeightsUnproved(text, is_final=self._presence.num_refusals > 1)
        self._proved, self._has_proved = published, True
        await self._presence.serve(self._engine.version, found)
