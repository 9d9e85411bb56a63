"""What may be typed next about a run that ended, or lost its process, before it was done."""

from turnmill.health.remedies import Remedy, remedies_of
from turnmill.records import Run, RunStatus


def next_step(run: Run, *, num_steps: int, at_root: str) -> str | None:
    """One line with a command; None where nothing is left to do, or the run's error has the command."""
    if run.retried_as is not None:
        return None
    resume = f"go on with it: turnmill resume {run.run_id}{at_root}"
    if run.status is RunStatus.INTERRUPTED:
        return resume if run.upload is None else f"go on with it: turnmill up{at_root}"
    if run.status is RunStatus.CANCELLED:
        return resume
    if run.status is not RunStatus.FAILED:
        return None
    again = f"once more with other parameters: turnmill retry {run.run_id} --NAME VALUE{at_root}"
    texts = {Remedy.RESUME: resume, Remedy.RETRY: again}
    return next((texts[remedy] for remedy in remedies_of(run, has_steps=num_steps > 0)), None)
