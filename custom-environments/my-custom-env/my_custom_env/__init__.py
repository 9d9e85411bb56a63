"""An agent gets something done with a small shop's HTTP API, whose endpoints fail now and then."""

from my_custom_env.environment import ApiCalls, load_environment

__all__ = ["ApiCalls", "load_environment"]
