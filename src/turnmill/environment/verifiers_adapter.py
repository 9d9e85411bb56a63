"""From what a package's `load_environment()` returned to an environment, where it is one of verifiers.

    object -> is_verifiers -> adapt -> Environment

Importing this module loads nothing of verifiers, which takes seconds: only `adapt` does.
"""

from importlib.metadata import PackageNotFoundError, version

from turnmill.environment.base import Environment
from turnmill.errors import InvalidInput

# The last releases whose packages have `load_environment()`.
SUPPORTED = "verifiers>=0.3,<0.4"


def is_verifiers(obj: object) -> bool:
    """Whether the class of `obj`, or one that it is made from, comes from verifiers."""
    return any(cls.__module__.partition(".")[0] == "verifiers" for cls in type(obj).__mro__)


def adapt(obj: object) -> Environment:
    """The environment that plays tasks with the verifiers environment `obj`.

    Raises `InvalidInput` where the installed verifiers is of another line, and where `obj` can't be played exactly:
    the text says why.
    """
    try:
        from turnmill.environment.verifiers_environment import VerifiersEnvironment
    except ImportError as error:
        raise InvalidInput(
            f"a verifiers environment needs {SUPPORTED}, the last line with load_environment(), and here is "
            f"{_installed()}: pip install 'turnmill[verifiers]' ({error})"
        ) from error
    return VerifiersEnvironment(obj)


def _installed() -> str:
    try:
        return f"verifiers {version('verifiers')}"
    except PackageNotFoundError:
        return "none"
