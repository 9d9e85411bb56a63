"""Turnmill: open, event-driven, multi-turn reinforcement learning for LLM agents.

Read `records`, `errors`, `config` and `ports` first; the folders are the way of one record (docs/index.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnmill.api import QueueStatus as QueueStatus
    from turnmill.api import check_all_queues as check_all_queues

__version__ = "0.1.0"
__all__ = ["QueueStatus", "__version__", "check_all_queues"]


def __getattr__(name: str) -> Any:
    """Loads `turnmill.api` when it is asked for: a role of a run, which imports this package too, has no use for it."""
    if name in ("QueueStatus", "check_all_queues"):
        from turnmill import api

        return getattr(api, name)
    raise AttributeError(f"module 'turnmill' has no attribute {name!r}")
