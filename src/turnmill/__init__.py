"""Turnmill: open, event-driven, multi-turn reinforcement learning for LLM agents.

Read `records`, `errors`, `config` and `ports` first; the folders are the way of one record (docs/index.md).
"""

__version__ = "0.1.0"
