"""The world that the agent acts in: what environments are written with. `registry` finds and loads that of a run."""

from turnmill.environment.base import (
    Chat,
    Environment,
    ScriptedChat,
    ScriptedTurn,
    opening_messages,
)
from turnmill.environment.games import End, Game, Observation, Opening, Step
from turnmill.environment.judges import Judge, judge
from turnmill.environment.outcomes import Message, Outcome, RewardError, Rollout, Score, Turn
from turnmill.environment.rewards import RewardFunction, metric, reward
from turnmill.environment.tools import Talk, Tool, ToolError, ToolLimits, call_of, talk
from turnmill.environment.watching import JudgeUnavailable

__all__ = [
    "Chat",
    "End",
    "Environment",
    "Game",
    "Judge",
    "JudgeUnavailable",
    "Message",
    "Observation",
    "Opening",
    "Outcome",
    "RewardError",
    "RewardFunction",
    "Rollout",
    "Score",
    "ScriptedChat",
    "ScriptedTurn",
    "Step",
    "Talk",
    "Tool",
    "ToolError",
    "ToolLimits",
    "Turn",
    "call_of",
    "judge",
    "metric",
    "opening_messages",
    "reward",
    "talk",
]
