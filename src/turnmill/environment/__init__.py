"""The world that the agent acts in; `registry` finds and loads the environment that a run plays."""

from turnmill.environment.base import Chat, Environment, Outcome, RewardError, Score, opening_messages

__all__ = ["Chat", "Environment", "Outcome", "RewardError", "Score", "opening_messages"]
