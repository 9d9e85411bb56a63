"""A new environment: a whole package to begin with, that is valid, passes its check and can be trained on as it is.

name, style -> templates (assets) -> folder aside -> check_package -> rename
"""

import importlib.util
import keyword
import shutil
import string
import tempfile
from enum import StrEnum
from pathlib import Path

from turnmill import assets
from turnmill.environment.packaging import check_package
from turnmill.environment.registry import environment_ids, module_of
from turnmill.errors import InvalidInput

_ENDING = ".template"


class Style(StrEnum):
    """What is written."""

    # `play` talks with the model, which has a tool.
    AGENT = "agent"
    # `reset` and `step`.
    GAME = "game"
    # A single-turn environment of verifiers.
    VERIFIERS = "verifiers"


_REQUIREMENTS = {
    Style.AGENT: '"turnmill"',
    Style.GAME: '"turnmill"',
    Style.VERIFIERS: '"turnmill", "verifiers>=0.3,<0.4", "datasets"',
}
# Of a template: where its copy goes.
_PLACES = {
    "pyproject.toml.template": "pyproject.toml",
    "README.md.template": "README.md",
    "init.py.template": "{module}/__init__.py",
    "environment.py.template": "{module}/environment.py",
    "test.py.template": "tests/test_{module}.py",
    "train.jsonl": "data/train.jsonl",
    "eval.jsonl": "data/eval.jsonl",
}


def new_package(env_id: str, style: Style, packages: Path) -> Path:
    """Make the package `env_id` in the folder `packages`; it appears as a whole, or not at all.

    Raises `InvalidInput` for a name that can't be used, and where something is there already.
    """
    check_name(env_id)
    target = packages / env_id
    if target.exists() or target.is_symlink():
        raise InvalidInput(f"{target} is there already: remove it, or take another name")
    try:
        packages.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=packages))
    except OSError as error:
        raise InvalidInput(f"{packages}: can't write there: {error.strerror}") from error
    try:
        folder = aside / env_id
        _write(folder, _values(env_id, style), style)
        check_package(folder, env_id)
        folder.rename(target)
    finally:
        shutil.rmtree(aside)
    return target


def check_name(env_id: str) -> None:
    """Raises `InvalidInput` for what is no good name of a new package: its module must be an identifier, and new."""
    module = module_of(env_id)
    if not module.isidentifier() or not module.isascii() or len(env_id) > 100:
        raise InvalidInput(f"{env_id!r} is no name for an environment: letters, digits, - and _, and a letter first")
    if env_id in environment_ids():
        raise InvalidInput(f"{env_id!r} is the name of a built-in environment: take another one")
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise InvalidInput(f"{env_id!r}: Python knows {module} as something else here: take another name")


def _values(env_id: str, style: Style) -> dict[str, str]:
    module = module_of(env_id)
    return {
        "env_id": env_id,
        "module": module,
        "class_name": "".join(part[:1].upper() + part[1:] for part in module.split("_")),
        "title": f"The environment {env_id}.",
        "requirements": _REQUIREMENTS[style],
    }


def _write(folder: Path, values: dict[str, str], style: Style) -> None:
    for template in ("common", style):
        for source in sorted(assets.environment_template(template).iterdir()):
            place = folder / _PLACES[source.name].format(module=values["module"])
            place.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            if source.suffix == _ENDING:
                text = string.Template(text).substitute(values)
            place.write_text(text, encoding="utf-8")
