"""What may help a run that failed, by the class of its failure: the one rule for all who give advice."""

from enum import StrEnum

from turnmill.records import ErrorClass, Run

# Their errors say themselves what to do.
_SAY_THEMSELVES = (ErrorClass.BUDGET, ErrorClass.INVALID_INPUT)
# As it is, the run would fail once more, unless it has made steps by now.
_NEED_OTHERS = (ErrorClass.ENVIRONMENT, ErrorClass.STAGE_FAILED)


class Remedy(StrEnum):
    """The command that may help."""

    # From its last step.
    RESUME = "resume"
    # From its beginning, with other parameters.
    RETRY = "retry"


def remedies_of(run: Run, *, has_steps: bool | None) -> tuple[Remedy, ...]:
    """The likelier one first; none where nothing helps or the error has the command.

    `has_steps`: whether the run has made optimizer steps; None where nobody knows.
    """
    why = next((stage.error_class for stage in reversed(run.current_stages) if stage.state == "failed"), None)
    if run.refused is not None or why in _SAY_THEMSELVES:
        return ()
    if why not in _NEED_OTHERS or has_steps:
        return (Remedy.RESUME,)
    return (Remedy.RETRY,) if has_steps is False else (Remedy.RESUME, Remedy.RETRY)
