"""Time in the suites: a test lets some of it go by, at once where the clock can be moved."""

from collections.abc import Awaitable, Callable

# Seconds to go by.
Later = Callable[[float], Awaitable[None]]
