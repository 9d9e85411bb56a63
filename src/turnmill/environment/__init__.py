"""The world that the agent acts in: `load(id, arguments)` makes an environment."""

from turnmill.environment.base import Chat, Environment, Outcome, RewardError, Score, opening_messages
from turnmill.environment.registry import environment_ids, load

__all__ = ["Chat", "Environment", "Outcome", "RewardError", "Score", "environment_ids", "load", "opening_messages"]
