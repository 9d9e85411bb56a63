"""Which environment is played."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EnvironmentOrigin(StrEnum):
    """Where an environment may come from, by the parameter that names it."""

    # `env`: a built-in one, else a package.
    ANY = "any"
    # `custom_env_id`: a package in custom-environments.
    CUSTOM = "custom"
    # `vf_env_id`: a package whose environment is one of verifiers.
    VERIFIERS = "verifiers"

    @property
    def parameter(self) -> str:
        """The parameter that names it, and in the messages of errors."""
        return {"any": "env", "custom": "custom_env_id", "verifiers": "vf_env_id"}[self]

    @property
    def args_parameter(self) -> str:
        """The parameter with its arguments."""
        return "vf_env_args" if self is EnvironmentOrigin.VERIFIERS else "env_args"


@dataclass(frozen=True, kw_only=True)
class EnvironmentChoice:
    """An environment by its id, and what it is made with."""

    env_id: str
    env_args: dict[str, Any] = field(default_factory=dict)
    origin: EnvironmentOrigin = EnvironmentOrigin.ANY

    @property
    def name(self) -> str:
        """By which it is told from all others: a verifiers package may be called as a built-in environment is."""
        return f"verifiers:{self.env_id}" if self.origin is EnvironmentOrigin.VERIFIERS else self.env_id
