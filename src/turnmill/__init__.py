"""Turnmill: open, event-driven, multi-turn reinforcement learning for LLM agents.

Read `records`, `errors`, `config` and `ports` first; the folders are the way of one record (docs/index.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnmill.api import QueueStatus as QueueStatus
    from turnmill.api import check_all_queues as check_all_queues
    from turnmill.conversation.openai_client import AsyncTurnmillClient as AsyncTurnmillClient
    from turnmill.conversation.openai_client import PollingHttpClient as PollingHttpClient
    from turnmill.rollout.endpoint import openai_endpoint as openai_endpoint

__version__ = "0.1.0"
__all__ = [
    "AsyncTurnmillClient",
    "PollingHttpClient",
    "QueueStatus",
    "__version__",
    "check_all_queues",
    "openai_endpoint",
]


def __getattr__(name: str) -> Any:
    """Loads what is asked for, when it is: a role of a run, which imports this package too, needs none of it."""
    if name in ("QueueStatus", "check_all_queues"):
        from turnmill import api

        return getattr(api, name)
    if name in ("AsyncTurnmillClient", "PollingHttpClient"):
        try:
            from turnmill.conversation import openai_client
        except ModuleNotFoundError as error:
            raise ImportError(f"{name} needs the openai package: pip install 'turnmill[client]'") from error
        return getattr(openai_client, name)
    if name == "openai_endpoint":
        from turnmill.rollout.endpoint import openai_endpoint

        return openai_endpoint
    raise AttributeError(f"module 'turnmill' has no attribute {name!r}")
