"""How coroutines are run."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# Allocations before the collector of cycles looks at the youngest objects (Python's own figure is 700), and how many
# of its rounds promote to the older generations. A role makes many short-lived objects and hardly a cycle, so the
# usual figures have it look at each decoded request for nothing: about a twentieth of a turn.
_GC_THRESHOLDS = (20_000, 20, 50)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where there is one, with a garbage collector tuned for a role."""
    # What is imported by now lives as long as the process.
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
