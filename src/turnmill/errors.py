"""Errors, named for the boundary that was crossed. They know no HTTP and no exit code.

A bad rollout is data (an INVALID sample with a reason) and never one of these; a broken invariant is one, and stops
the run with evidence.
"""


class TurnmillError(Exception):
    """Base of every error that Turnmill raises on purpose; its text is meant for a user."""


class InvalidInput(TurnmillError):
    """What a user gave can't be used: the text says what, where and what to do (CLI: exit code 2)."""


class ConfigError(InvalidInput):
    """A configuration key or value is wrong; names the key, the value, its source and what is allowed."""


class DataError(InvalidInput):
    """A data file has bad rows; names file, line, column, field and rule."""


class EnvironmentFailed(InvalidInput):
    """An environment can't be trained on as it is: the text names each check that failed, and on which tasks."""


class NotFound(InvalidInput):
    """A run, blob, version or file that was named does not exist."""


class NotDeployed(NotFound):
    """What a run or a deployment stands on is not there, or not any more: a queue, a table."""


class Conflict(TurnmillError):
    """A compare-and-set lost: the record changed since it was read."""


class Duplicate(TurnmillError):
    """An upload has the content of another run, `run_id`, which is on its way or has succeeded: no failure."""

    def __init__(self, run_id: str, message: str) -> None:
        super().__init__(message)
        self.run_id = run_id


class VersionConflict(Conflict):
    """A weight version was published before with other content."""


class LeaseLost(TurnmillError):
    """A lease ran out and its message or sample belongs to somebody else now."""


class RolloutGivenBack(TurnmillError):
    """An attempt ended by no fault of its own and is not reported: its lease runs out, and it is leased again."""


class BackendUnavailable(TurnmillError):
    """The storage or queue service can't be reached or is busy; transient, its adapter is the retry owner."""


class RecordCorrupt(TurnmillError):
    """A stored record does not match its digest or its key; the run stops and this text is the evidence."""


class AuditFailed(TurnmillError):
    """Trainer and sampler disagree about the same tokens, or a replica serves other weights than it says."""


class WeightsUnproved(AuditFailed):
    """A replica's memory is not what was published as the version that it was to serve; it takes no call.

    `is_final`: the process before it found the same, so that another one is not worth a start.
    """

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class NoProgress(TurnmillError):
    """Training can't go on: too many invalid samples or too many steps without signal; the text is the diagnosis."""


class RoleFailed(TurnmillError):
    """A role process ended too often; carries its name, exit codes and last log lines."""


class StageFailed(TurnmillError):
    """A pipeline stage ended in failure; carries its name and the error."""


class StageTimeout(StageFailed):
    """A pipeline stage did not end in its time."""


class BudgetExceeded(TurnmillError):
    """A run has used up what it may use: it stopped in order; the text says what, how much, and how to go on."""


class BudgetUsedUp(BudgetExceeded, InvalidInput):
    """A run is to go on with a budget that it has used up already."""


class GenerationFailed(TurnmillError):
    """The answer to one call is an error; `code` is the OpenAI error code (e.g. context_length_exceeded)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequest(InvalidInput):
    """A client's request can't be served as it is; `param` names the key, `code` the rule (OpenAI error fields)."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unauthorized(TurnmillError):
    """A secret or token is missing or unknown."""


class DeliveryFailed(TurnmillError):
    """Somebody else's server did not take a message, an alert or a judge's question.

    `is_final`: it never will; else wait at least `retry_after_s`, if given.
    """

    def __init__(self, message: str, *, is_final: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.retry_after_s = retry_after_s


class CallTimeout(TurnmillError):
    """One generation call was not answered in time; its answer may still be recorded later."""


class ShuttingDown(TurnmillError):
    """The service is closing; whoever waits should ask its successor."""


class Cancelled(TurnmillError):
    """The user asked the run to stop."""


def printable(text: str, *, limit: int = 60) -> str:
    """`text` of unknown origin as a message may show it: cut, and without characters that a terminal acts on."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
