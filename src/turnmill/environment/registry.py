"""From the choice of an environment to what it is, without importing it, and to the environment itself.

    choice -> find -> FoundEnvironment (built in | package: module, folder, digest)     imports nothing
           -> load -> Environment                                       imports the package's code
           -> load_built_in -> Environment                              knows Turnmill's own code alone

A package is found in the first of these places: `<root>/custom-environments/<id>`, `custom-environments/<id>` of the
working directory, the installed modules. Its module is called as its id is, with `_` for `-`. Whoever must not run
other people's code (the control process, a worker) asks `find` and `load_built_in`; `load` is for the process that
plays a package.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from turnmill.environment import wordle
from turnmill.environment.base import Environment
from turnmill.environment.verifiers_adapter import adapt, is_verifiers
from turnmill.errors import InvalidInput, NotFound
from turnmill.records import EnvironmentChoice, EnvironmentOrigin

# Folder of packages: at the root of a deployment, or where a command is given.
PACKAGES = "custom-environments"

_BUILT_IN: dict[str, Callable[..., Environment]] = {"wordle": wordle.load_environment}
# What a package's folder may hold beside its content: made by tools, and different each time.
_MADE_BY_TOOLS = frozenset("__pycache__ build dist venv node_modules".split())
_PIECE_BYTES = 1024 * 1024
# A module that is no environment's is told by this, without importing it.
_FACTORY = "load_environment"


class EnvironmentKind(StrEnum):
    """Whose code it is."""

    # Turnmill's own: may run in any process.
    BUILT_IN = "built_in"
    # Somebody else's: only ever runs in its box.
    PACKAGE = "package"


@dataclass(frozen=True, kw_only=True)
class FoundEnvironment:
    """What is known about an environment without running any of its code."""

    choice: EnvironmentChoice
    kind: EnvironmentKind
    # Name of the module that has `load_environment`.
    module: str
    # Of a package that lies in a folder (pyproject.toml in it); None for a built-in or an installed one.
    folder: Path | None = None

    def digest(self) -> str:
        """SHA-256 hex over names and content of the package's files; "" where it is in no folder. Reads all of them."""
        return "" if self.folder is None else digest_of_folder(self.folder)


def environment_ids() -> list[str]:
    """Ids of the built-in environments."""
    return sorted(_BUILT_IN)


def find(choice: EnvironmentChoice, *, root: Path | None = None) -> FoundEnvironment:
    """What `choice` means for the deployment at `root`; imports nothing.

    Raises `NotFound` where there is no such environment, and `InvalidInput` for one that can't be meant.
    """
    env_id, origin = choice.env_id, choice.origin
    places = [place / PACKAGES / env_id for place in (*([root] if root else []), Path())]
    folder = next((place.absolute() for place in places if place.is_dir()), None)
    if env_id in _BUILT_IN and origin is not EnvironmentOrigin.VERIFIERS:
        if folder is not None:
            raise InvalidInput(
                f"{origin.parameter}: {env_id!r} is the name of a built-in environment and of the package {folder}: "
                "rename the package"
            )
        if origin is EnvironmentOrigin.ANY:
            factory = _BUILT_IN[env_id]
            return FoundEnvironment(choice=choice, kind=EnvironmentKind.BUILT_IN, module=factory.__module__)
    module = module_of(env_id)
    if folder is not None:
        _check_package(choice, folder)
    elif not (origin is not EnvironmentOrigin.CUSTOM and _is_installed(module)):
        raise _not_found(choice, places)
    return FoundEnvironment(choice=choice, kind=EnvironmentKind.PACKAGE, module=module, folder=folder)


def is_built_in(choice: EnvironmentChoice) -> bool:
    """Whether it means one of Turnmill's own, unless `find` says that it may mean two."""
    return choice.origin is EnvironmentOrigin.ANY and choice.env_id in _BUILT_IN


def load_built_in(choice: EnvironmentChoice) -> Environment:
    """A built-in environment; raises `InvalidInput` for a package: it may not run in this process.

    And for an argument that the environment does not have, one that it needs, and one whose value it refuses.
    """
    if not is_built_in(choice):
        raise InvalidInput(f"{choice.origin.parameter}: {choice.env_id!r} is no built-in environment")
    environment: Environment = _make(_BUILT_IN[choice.env_id], choice)
    return environment


def load(found: FoundEnvironment) -> Environment:
    """The environment: of a package, by importing its code into this process.

    Raises `InvalidInput` as `load_built_in` does; with the place where the package's code can't be imported, fails in
    `load_environment`, or where that returns what is no environment.
    """
    if found.kind is EnvironmentKind.BUILT_IN:
        return load_built_in(found.choice)
    factory = getattr(_imported(found), _FACTORY, None)
    if not callable(factory):
        raise InvalidInput(f"{_label(found)}: the module {found.module} has no function {_FACTORY}")
    made = _make(factory, found.choice)
    if found.choice.origin is EnvironmentOrigin.VERIFIERS and not is_verifiers(made):
        raise InvalidInput(
            f"{_label(found)}: {_FACTORY} returned {_kind_of(made)}, no environment of verifiers: name it by env"
        )
    if is_verifiers(made):
        return adapt(made)
    if not isinstance(made, Environment):
        raise InvalidInput(
            f"{_label(found)}: {_FACTORY} must return a turnmill.environment.Environment or an environment of "
            f"verifiers, not {_kind_of(made)}"
        )
    return made


def module_of(env_id: str) -> str:
    """The module of a package, by its id."""
    return env_id.replace("-", "_")


def files_of(folder: Path) -> Iterator[Path]:
    """What a package consists of, in a fixed order: all files but hidden ones and what tools leave there."""
    for path in sorted(folder.rglob("*")):
        if not is_left_by_tools(path.relative_to(folder).parts) and path.is_file():
            yield path


def is_left_by_tools(parts: Iterable[str]) -> bool:
    """Whether a file with these parts of a path, from the package's folder on, is no part of the package."""
    return any(part in _MADE_BY_TOOLS or part.startswith(".") or part.endswith(".egg-info") for part in parts)


def digest_of_folder(folder: Path) -> str:
    """SHA-256 hex over the paths and the content of the package's files."""
    hasher = hashlib.sha256()
    for path in files_of(folder):
        parts = path.relative_to(folder).parts
        hasher.update(f"{'/'.join(parts)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    return hasher.hexdigest()


# ---------------------------------------------------------------- finding


def _check_package(choice: EnvironmentChoice, folder: Path) -> None:
    if not (folder / "pyproject.toml").is_file():
        raise InvalidInput(f"{choice.origin.parameter}: {folder} is no package: it has no pyproject.toml")
    if source_of(choice.env_id, folder) is None:
        module = module_of(choice.env_id)
        raise InvalidInput(
            f"{choice.origin.parameter}: {folder} has no module {module}: write {module}/__init__.py or {module}.py "
            f"with the function {_FACTORY}"
        )


def source_of(env_id: str, folder: Path) -> Path | None:
    """Where the module of a package begins: in its folder, or in `src` of that."""
    module = module_of(env_id)
    candidates = [
        place / name for place in (folder, folder / "src") for name in (f"{module}/__init__.py", f"{module}.py")
    ]
    return next((path for path in candidates if path.is_file()), None)


def _is_installed(module: str) -> bool:
    """Whether there is such a module and it speaks of `load_environment`: looked up and read, not imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    return _FACTORY in Path(spec.origin).read_text(encoding="utf-8", errors="replace")


def _not_found(choice: EnvironmentChoice, places: Iterable[Path]) -> NotFound:
    looked = [str(place) for place in places]
    if choice.origin is not EnvironmentOrigin.CUSTOM:
        looked.append(f"the installed module {module_of(choice.env_id)}")
    known = _BUILT_IN if choice.origin is EnvironmentOrigin.ANY else ()
    names = f"; built in: {_all(known)}" if known else ""
    return NotFound(
        f"{choice.origin.parameter}: there is no environment {choice.env_id!r}{_suggest(choice.env_id, known)}{names}; "
        f"a package of that id was looked for as {', '.join(looked)}"
    )


# ---------------------------------------------------------------- loading


def _mend(error: Exception, found: FoundEnvironment) -> str:
    """What to do about a module that is not there; empty where that is no requirement's."""
    name = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if not name or found.folder is None or name in (found.module, __package__.partition(".")[0]):
        return ""
    return f"; if it is {name} that is missing, add what brings it to [project] dependencies in pyproject.toml"


def _imported(found: FoundEnvironment) -> ModuleType:
    """The module; raises `InvalidInput` with the place in the package's code where it fails."""
    source = None if found.folder is None else source_of(found.choice.env_id, found.folder)
    if source is not None:
        place = source.parent.parent if source.name == "__init__.py" else source.parent
        # For good: a package may import its own parts later, and an installed one of that name must not win.
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    try:
        module = importlib.import_module(found.module)
    except Exception as error:  # the boundary to the package's code
        raise InvalidInput(f"{_label(found)} can't be imported: {_described(error)}{_mend(error, found)}") from error
    if source is not None and Path(module.__file__ or "").resolve() != source.resolve():
        raise InvalidInput(f"{_label(found)}: another module is called {found.module}: {module.__file__}")
    return module


def _make(factory: Callable[..., Any], choice: EnvironmentChoice) -> Any:
    _check_args(factory, choice)
    try:
        return factory(**choice.env_args)
    except InvalidInput:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{choice.origin.args_parameter}: {choice.env_id} refuses its arguments: {error}") from error
    except Exception as error:  # the boundary to the package's code
        raise InvalidInput(
            f"{choice.origin.parameter}: {_FACTORY} of {choice.env_id} fails: {_described(error)}"
        ) from error


def _check_args(factory: Callable[..., Any], choice: EnvironmentChoice) -> None:
    """Raises `InvalidInput` for an argument that `load_environment` does not have, with the closest that it has."""
    allowed = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in allowed.values()):
        return
    for name in choice.env_args:
        if name not in allowed:
            raise InvalidInput(
                f"{choice.origin.args_parameter}: {choice.env_id} has no argument {name!r}{_suggest(name, allowed)}; "
                f"it takes: {_all(allowed) or 'none'}"
            )


def _kind_of(made: object) -> str:
    return "nothing" if made is None else f"a {type(made).__module__}.{type(made).__qualname__}"


def _label(found: FoundEnvironment) -> str:
    place = "" if found.folder is None else f" ({found.folder})"
    return f"{found.choice.origin.parameter}: {found.choice.env_id}{place}"


def _described(error: Exception) -> str:
    """Type, text, and the innermost line of the package's code that was on the way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
