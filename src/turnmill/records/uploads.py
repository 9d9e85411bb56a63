"""Uploads, and what became of each."""

from dataclasses import dataclass, field
from typing import Any

from turnmill.records.codec import digest_of
from turnmill.records.keys import retry_key, segment, trigger_dead_letter_key


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One finished object of a bucket, as an object event tells it."""

    bucket: str
    # Segments with slashes between them, below the folder that is watched.
    key: str
    # Another one for other content: of a file inode, time of the last change and size, of an S3 object its version id.
    version: str
    num_bytes: int
    # Why it can't become a run, whatever is in it; None: it may.
    ignored: str | None = None

    @property
    def cause(self) -> str:
        """What a run is made of at most once."""
        return f"{self.bucket}/{self.key}@{self.version}"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Written before the run that it names: so that doubled events, and a crash in between, make one run."""

    cause: str
    bucket: str
    created_at: float
    # None where it was ignored.
    run_id: str | None = None
    ignored: str | None = None

    @property
    def key(self) -> str:
        return cause_key(self.bucket, self.cause)


def cause_key(bucket: str, cause: str) -> str:
    """A cause is as long as an object's key may be, so its digest stands for it."""
    return f"{cause_prefix(bucket)}{digest_of(cause.encode())}"


def cause_prefix(bucket: str) -> str:
    """Of all causes that are uploads to a bucket."""
    return f"causes/{segment(bucket)}/"


@dataclass(frozen=True, kw_only=True)
class DeadTrigger:
    """The dead letter of an upload that came to nothing for its own sake: refused, or gone before it was taken."""

    # Opaque: the run's id, or of an upload that never became a run the digest of its cause.
    name: str
    upload: Upload
    error: str
    dead_at: float
    # None where its content was gone before there was a run.
    run_id: str | None = None
    # SHA-256 hex of the content; empty where it is unknown.
    digest: str = ""
    # Where it lies now, below the bucket; None where nothing is left of it.
    place: str | None = None
    # How often it was tried: an upload that is put back is one of its own.
    attempts: int = 1
    code_version: str = ""
    # Values that it would have been trained with.
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return trigger_dead_letter_key(self.name)


@dataclass(frozen=True, kw_only=True)
class RetryClaim:
    """The last run that does a run again; written before that one, so that there is one at a time."""

    run_id: str
    # How often it was done again.
    num: int
    retried_as: str

    @property
    def key(self) -> str:
        return retry_key(self.run_id)
