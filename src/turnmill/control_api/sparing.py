"""Looking that is not done more often than it is worth."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Sparing(Generic[T]):
    """The result of `look`, which is called again once it is older than `fresh_s`, and longer where looking takes long.

    `share`: of one core's time that looking may take, however often it is asked for. Safe to call from many threads:
    those that come while one looks wait for what it finds.
    """

    def __init__(self, look: Callable[[], T], *, fresh_s: float, share: float) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._share = share
        self._lock = threading.Lock()
        self._found: T | None = None
        # On the monotonic clock.
        self._good_until = 0.0

    def __call__(self) -> T:
        """Raises what `look` raises, and then looks again the next time."""
        with self._lock:
            if self._found is None or time.monotonic() >= self._good_until:
                began = time.thread_time()
                self._found = self._look()
                took_s = time.thread_time() - began
                self._good_until = time.monotonic() + max(self._fresh_s, took_s / self._share)
            return self._found
