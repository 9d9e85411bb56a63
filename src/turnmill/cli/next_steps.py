"""What may be typed next about a run that ended, or lost its process, before it was done."""

from turnmill.records import ErrorClass, Run, RunStatus

# Their errors say themselves what to do.
_SAY_THEMSELVES = (ErrorClass.BUDGET, ErrorClass.INVALID_INPUT)
# As it is, the run would fail once more.
_NEED_OTHERS = (ErrorClass.ENVIRONMENT, ErrorClass.STAGE_FAILED)


def next_step(run: Run, *, num_steps: int, at_root: str) -> str | None:
    """One line with a command; None where nothing is left to do, or the run's error has the command."""
    if run.retried_as is not None:
        return None
    resume = f"go on with it: turnmill resume {run.run_id}{at_root}"
    if run.status is RunStatus.INTERRUPTED:
        return resume if run.upload is None else f"go on with it: turnmill up{at_root}"
    if run.status is RunStatus.CANCELLED:
        return resume
    if run.status is not RunStatus.FAILED or run.refused is not None:
        return None
    why = next((stage.error_class for stage in reversed(run.current_stages) if stage.state == "failed"), None)
    if why in _SAY_THEMSELVES:
        return None
    if why in _NEED_OTHERS and num_steps == 0:
        return f"once more with other parameters: turnmill retry {run.run_id} --NAME VALUE{at_root}"
    return resume
