"""From an error to its class: the one place that decides what may be tried again."""

from turnmill.errors import (
    AuditFailed,
    BackendUnavailable,
    BudgetExceeded,
    Cancelled,
    Conflict,
    Duplicate,
    EnvironmentFailed,
    InvalidInput,
    RecordCorrupt,
    RoleFailed,
    StageTimeout,
    TurnmillError,
)
from turnmill.records import ErrorClass

# The first that fits counts: what is derived comes before what it is derived from.
_CLASSES: tuple[tuple[type[Exception], ErrorClass], ...] = (
    (BudgetExceeded, ErrorClass.BUDGET),
    (EnvironmentFailed, ErrorClass.ENVIRONMENT),
    (InvalidInput, ErrorClass.INVALID_INPUT),
    (BackendUnavailable, ErrorClass.INFRASTRUCTURE),
    (StageTimeout, ErrorClass.TIMEOUT),
    (RoleFailed, ErrorClass.ROLE_FAILED),
    (AuditFailed, ErrorClass.INTEGRITY),
    (RecordCorrupt, ErrorClass.INTEGRITY),
    (Conflict, ErrorClass.CONFLICT),
    (Duplicate, ErrorClass.DUPLICATE),
    (Cancelled, ErrorClass.CANCELLED),
    (TurnmillError, ErrorClass.STAGE_FAILED),
)


def classify(error: BaseException) -> ErrorClass:
    """What kind of failure it is; whatever is not raised on purpose is a defect."""
    return next((found for kind, found in _CLASSES if isinstance(error, kind)), ErrorClass.DEFECT)


def text_of(error: BaseException) -> str:
    """What a history says of it."""
    return str(error) or type(error).__name__
