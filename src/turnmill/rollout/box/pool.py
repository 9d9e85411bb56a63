"""The boxes of a worker: one that all rollouts share, and smaller ones for those whose first box came to a bad end.

take(size) -> a box with a free seat | a new box | wait -> Seat -> leave -> box closed, when it is not needed again
"""

import asyncio
import logging
from dataclasses import dataclass

from turnmill.errors import RoleFailed
from turnmill.rollout.box.box import Box, LoadError
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.box.relay import Relay

logger = logging.getLogger(__name__)
# Boxes at once, the shared one among them.
_MOST_BOXES = 8
# Rollouts after which a box is replaced, so that what an environment leaks does not add up.
_MOST_BEGUN = 2000
# Pauses before a box is tried again that could not be started, seconds.
_PAUSES_S = (0.5, 2.0)


@dataclass(kw_only=True, eq=False)
class Seat:
    """A place for one rollout in a box."""

    box: Box


@dataclass(kw_only=True, eq=False)
class _Boxed:
    box: Box
    # Rollouts that it is for; None: the one that all share.
    size: int | None
    num_seats: int = 0


class BoxPool:
    """Use it on one event loop; `close` ends all boxes."""

    def __init__(self, settings: Settings, relay: Relay, *, shared_size: int) -> None:
        self._settings = settings
        self._relay = relay
        self._shared_size = shared_size
        self._boxes: list[_Boxed] = []
        self._is_starting = False
        # Boxes that are being closed.
        self._closing: set[asyncio.Task[None]] = set()
        # Set, and replaced, when a seat or a place for a box may have become free.
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the shared box. Raises `LoadError`."""
        box = await Box.start(self._settings, self._relay)
        self._boxes.append(_Boxed(box=box, size=None))

    async def take(self, size: int | None) -> Seat:
        """A seat in the shared box (None), or in one that at most `size` rollouts are played in at once.

        Raises `RoleFailed` when no box can be started any more.
        """
        while (boxed := self._with_free_seat(size)) is None:
            self._drop_unused()
            if self._is_starting or len(self._boxes) >= _MOST_BOXES:
                await self._changed.wait()
                continue
            self._is_starting = True
            try:
                self._boxes.append(_Boxed(box=await self._start(), size=size))
            finally:
                self._is_starting = False
                self._tell()
        boxed.num_seats += 1
        return Seat(box=boxed.box)

    def leave(self, seat: Seat) -> None:
        """The rollout is over, or nobody waits for it any more."""
        boxed = next(boxed for boxed in self._boxes if boxed.box is seat.box)
        boxed.num_seats -= 1
        if boxed.num_seats == 0 and boxed.size is not None:
            boxed.box.is_retired = True
        self._drop_unused()
        self._tell()

    async def close(self) -> None:
        """Idempotent."""
        boxes, self._boxes = self._boxes, []
        await asyncio.gather(*self._closing, *(boxed.box.close() for boxed in boxes))

    def _drop_unused(self) -> None:
        """Close the boxes in which nothing is played, and nothing will be."""
        for boxed in [boxed for boxed in self._boxes if not boxed.num_seats and not boxed.box.is_open]:
            self._boxes.remove(boxed)
            closing = asyncio.create_task(boxed.box.close(), name="box-close")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _with_free_seat(self, size: int | None) -> _Boxed | None:
        for boxed in self._boxes:
            if boxed.box.num_begun >= _MOST_BEGUN:
                boxed.box.is_retired = True
            if boxed.size == size and boxed.box.is_open and boxed.num_seats < (size or self._shared_size):
                return boxed
        return None

    async def _start(self) -> Box:
        for pause_s in _PAUSES_S:
            try:
                return await Box.start(self._settings, self._relay)
            except LoadError as error:
                logger.warning("the environment can't be started again: %s", error)
                await asyncio.sleep(pause_s)
        try:
            return await Box.start(self._settings, self._relay)
        except LoadError as error:
            raise RoleFailed(f"worker: the environment was loaded before, and no longer is: {error}") from error
