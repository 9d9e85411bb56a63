"""What runs, and what it stands on: role processes, and a run's infrastructure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A process to run: `turnmill role ROLE --run RUN --name NAME` with `env` added to its environment."""

    role: str
    # Unique within the run, e.g. `replica-0`.
    name: str
    run_id: str
    # Secrets travel here, never in the arguments.
    env: Mapping[str, str] = field(default_factory=dict)
    # How often in a row it is started again after it died (one that lived for long begins anew); 0: its death is final.
    max_restarts: int = 0
    # Exit codes with which it ends for good, without a restart: 0 is an end, any other one a failure.
    final_exit_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """A started role."""

    name: str
    # running | exited | failed (died, and may not be started again)
    state: str
    num_restarts: int
    exit_code: int | None
    pid: int | None
    # Last lines of its log.
    log_tail: tuple[str, ...] = ()


class Launcher(Protocol):
    """Starts roles, watches them, ends only what it started."""

    async def start(self, spec: RoleSpec) -> None:
        """Start; starting a name that runs already does nothing."""
        ...

    async def statuses(self) -> list[RoleStatus]:
        """All roles started so far, in order of their start."""
        ...

    async def stop(self, name: str) -> None:
        """End it (ask, wait, then force) and never start it again; idempotent."""
        ...

    async def close(self) -> None:
        """Stop everything, last started first."""
        ...


class RunInfra(Protocol):
    """What the ports of one run stand on: its queues, records, and places for blobs, weights, logs and checkpoints."""

    @property
    def expected_s(self) -> float:
        """Seconds within which `deploy` is expected to end: what takes longer is worth a look."""
        ...

    async def deploy(self) -> list[str]:
        """Make all of it, so that a later write finds it there; the names of its parts, for people.

        A part that may be there and yet not take a write is written to. May take minutes. Idempotent, also where two
        processes do it at once: what is there stays as it is. Raises `BackendUnavailable` naming what can't be made or
        written, `InvalidInput` where its deployment is not there, `Conflict` where its name is somebody else's.
        """
        ...

    async def free_bytes(self) -> int | None:
        """How much more can be stored; None where nothing limits it."""
        ...

    async def retire(self) -> int:
        """Remove the messages that wait in the queues of a run that has ended; how many.

        Dead letters, records and everything else stay, and so does what is sent afterwards, when the run is resumed.
        What was leased by a process that is gone may come again later. Idempotent; makes nothing.
        """
        ...

    async def delete(self) -> None:
        """Remove all of it, results included, when the ports of the run are closed in every process.

        Idempotent; ended in the middle, it is done again.
        """
        ...
