"""Which fields of a row an environment reads, seen from outside: its mappings write down what is asked of them.

task -> recorded -> task whose metadata is watched -> (the environment plays it) -> Fields: read, missed
"""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from typing import Any

from turnmill.records import Task

_INFO = "info"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Of one row, as in `metadata.answer` or `metadata.info.query`."""

    present: frozenset[str]
    read: set[str] = field(default_factory=set)
    # Asked for in a way that needs them, and not there; in order.
    missed: dict[str, None] = field(default_factory=dict)


def recorded(task: Task) -> tuple[Task, Fields]:
    """The task with metadata that tell what is read of them, down to the keys of `info`; it is a dict all the same."""
    metadata, info = task.metadata, task.metadata.get(_INFO)
    below = [f"metadata.{_INFO}.{key}" for key in info] if isinstance(info, dict) else []
    fields = Fields(present=frozenset([*(f"metadata.{key}" for key in metadata), *below]))
    watched = dict(metadata)
    if isinstance(info, dict):
        watched[_INFO] = _Watched(info, f"metadata.{_INFO}", fields)
    return replace(task, metadata=_Watched(watched, "metadata", fields)), fields


class _Watched(dict[str, Any]):
    """A dict; a look at all of it counts for each key."""

    def __init__(self, content: Mapping[str, Any], path: str, fields: Fields) -> None:
        super().__init__(content)
        self._path = path
        self._fields = fields

    def _note(self, key: object) -> None:
        if super().__contains__(key):
            self._fields.read.add(f"{self._path}.{key}")

    def _note_all(self) -> None:
        self._fields.read.update(f"{self._path}.{key}" for key in super().__iter__())

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __missing__(self, key: object) -> Any:
        self._fields.missed[f"{self._path}.{key}"] = None
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._note_all()
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._note_all()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._note_all()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._note_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        # Copied, or sent to another process, it is a plain one.
        return dict, (dict(self),)
