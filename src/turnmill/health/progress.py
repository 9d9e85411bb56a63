"""What counts as progress of a run, and for how long there was none. The only definition of it.

A run makes progress when one of these changes: its stage, a recorded call, a sample that ended with a reward, a batch,
the trainer's step, the weights that a replica serves. Not: a lease that is renewed, a sample that ended as invalid and
was asked for anew, a process that was started again. All of those can go on for ever with nothing learned.

A process that computes alone (a model that is loaded, an optimizer step, a checkpoint) writes nothing until it is done.
It counts as moving while it uses a processor; but not a second process of the same name, started after the last
progress: a role that dies and starts again and again computes, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The stages in which much is told; all others tell nothing until they are done, and may take so long for it, however
# short the limit: the preflight plays for a minute and a half, a model is read from a slow disk.
TELLING_STAGES, QUIET_S = ("SubmitTraining", "Evaluate"), 120.0
# Share of a core below which a process that should compute does nothing.
COMPUTING_CORES = 0.1


def stall_after(limit_s: float, stage: str | None) -> float:
    """Seconds without progress after which a run that is in this stage is stalled, by the limit of the run."""
    return limit_s if stage in TELLING_STAGES else max(limit_s, QUIET_S)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Equal to an earlier one exactly where nothing was achieved in between."""

    # (name, attempt, state, retries) of each stage.
    stages: tuple[tuple[str, int, str, int], ...] = ()
    # The newest call, by the order of recording.
    last_call: int = 0
    # Samples that ended with a reward, among those that were asked for last.
    num_rewarded: int = 0
    # The newest batch, by the order of recording, and the writes of the last ones.
    batches: tuple[int, int] = (0, 0)
    # Writes of the trainer's status.
    num_training_writes: int = 0
    # (replica, version) that is served, where that is the current one.
    served: tuple[tuple[str, str], ...] = ()


@dataclass
class ProgressClock:
    """Tells how long nothing was achieved; `now` is of any clock that only goes up."""

    _seen: Any = None
    _since: float = 0.0
    # By name: the first process that was seen to compute since the last progress.
    _computing: dict[str, int] = field(default_factory=dict)

    def observe(self, now: float, fingerprint: Fingerprint, computing: Mapping[str, int] = {}) -> float:
        """Seconds since the last progress, 0 for the first look. `computing`: pids by name, see the module."""
        if fingerprint != self._seen:
            self._seen, self._since = fingerprint, now
            self._computing = dict(computing)
            return 0.0
        for name, pid in computing.items():
            if self._computing.setdefault(name, pid) == pid:
                self._since = now
        return now - self._since
