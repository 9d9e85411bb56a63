"""Uploads, and what became of each."""

from dataclasses import dataclass

from turnmill.records.codec import digest_of
from turnmill.records.keys import segment


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
