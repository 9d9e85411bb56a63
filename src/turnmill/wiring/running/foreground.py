"""A deployment that is not removed under a run in the foreground, and no such run that begins while it is removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnmill.backends.embedded import one_of_many, only_one


@contextmanager
def using(root: Path) -> Iterator[None]:
    """Of a process that walks a run; raises `Conflict` while the deployment is removed."""
    with one_of_many(_lock(root), f"{root} is being removed by `turnmill cleanup --all`"):
        yield


@contextmanager
def removing(root: Path) -> Iterator[None]:
    """Of the process that removes the deployment; raises `Conflict` while somebody uses it."""
    with only_one(_lock(root), f"a run in the foreground still uses {root}: clean up again to end it"):
        yield


def _lock(root: Path) -> Path:
    return root / "locks" / "foreground.lock"
