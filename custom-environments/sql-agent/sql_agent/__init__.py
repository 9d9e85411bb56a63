"""An agent that answers questions about a small SQLite database with tools."""

from sql_agent.environment import SqlAgent

__all__ = ["SqlAgent", "load_environment"]


def load_environment(*, max_turns: int = 6) -> SqlAgent:
    """The environment with its arguments; raises as `SqlAgent` does."""
    return SqlAgent(max_turns=max_turns)
