"""Which keys a blob may have: what a file system holds, and an object store below a prefix of its own."""

from turnmill.errors import InvalidInput

# Most file systems allow names of 255 bytes; a file of a blob has a suffix.
MAX_SEGMENT_BYTES = 200
# Object stores allow 1024; 256 of them are left for a prefix.
MAX_KEY_BYTES = 768
# In a folder a blob `a/b` is the file `a/b.blob`, so that it may stand beside blobs `a/b/...`.
BLOB_SUFFIX = ".blob"


def check_blob_key(key: str) -> str:
    """`key`, or `InvalidInput` that says what is wrong with it."""
    segments = key.split("/")
    for segment in segments:
        if segment in ("", ".", "..") or "\0" in segment:
            raise InvalidInput(f"blob key {key!r} has an empty, '.', '..' or NUL segment; use a/b/c")
        try:
            size = len(segment.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput(f"blob key {key!r} is no valid Unicode text: {error.reason}") from error
        if size > MAX_SEGMENT_BYTES:
            raise InvalidInput(f"blob key {key!r} has a segment over {MAX_SEGMENT_BYTES} bytes")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidInput(f"blob key {key[:60]!r}... is longer than {MAX_KEY_BYTES} bytes")
    if any(segment.endswith(BLOB_SUFFIX) for segment in segments[:-1]):
        raise InvalidInput(f"blob key {key!r}: only the last segment may end with {BLOB_SUFFIX}")
    return key
