"""A role that dies again and again is told of before it is given up."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from turnmill.ports import Launcher, RoleStatus
from turnmill.records import AlertKind
from turnmill.wiring.watching.evidence import command, last_lines
from turnmill.wiring.watching.monitor import Finding

# So many restarts within so long are a crash loop; it is over when there was none for as long.
NUM_RESTARTS, WITHIN_S = 3, 120.0


class Restarts:
    """When a role was started again, as its count tells that is looked at now and then."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._times: deque[float] = deque()
        self._is_loop = False

    def is_loop(self, num_restarts: int, now: float) -> bool:
        """Whether it is in a crash loop. `num_restarts`: so far; `now`: seconds on a clock that only rises."""
        self._times.extend([now] * (num_restarts - self._num_seen))
        self._num_seen = num_restarts
        while self._times and now - self._times[0] > WITHIN_S:
            self._times.popleft()
        self._is_loop = len(self._times) >= NUM_RESTARTS or (self._is_loop and bool(self._times))
        return self._is_loop


class CrashLoops:
    """Implements `Check` for the roles that a launcher has started."""

    def __init__(
        self, root: Path, run_id: str, launcher: Launcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._run_id = run_id
        self._launcher = launcher
        self._clock = clock
        self._restarts: dict[str, Restarts] = {}

    async def look(self) -> list[Finding]:
        """See `Check.look`."""
        now = self._clock()
        looping = [
            role
            for role in await self._launcher.statuses()
            if self._restarts.setdefault(role.name, Restarts()).is_loop(role.num_restarts, now)
        ]
        return [await self._finding(role) for role in looping]

    async def _finding(self, role: RoleStatus) -> Finding:
        ended = "" if role.exit_code is None else f", last with exit code {role.exit_code}"
        return Finding(
            kind=AlertKind.CRASH_LOOP,
            summary=f"{role.name} of run {self._run_id} dies again and again: {role.num_restarts} restarts{ended}",
            command=command(self._root, "logs", self._run_id, "--role", role.name),
            # Each role is a trouble of its own.
            stage=role.name,
            error=f"{role.name} was started again {role.num_restarts} times{ended}",
            log_lines=tuple(await asyncio.to_thread(last_lines, self._root, self._run_id, [role.name, "control"])),
        )
