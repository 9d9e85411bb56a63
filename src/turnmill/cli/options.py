"""One option per parameter, made from the table in `turnmill.config`.

Values stay the text that was typed: `load_config` parses and checks them, so that a flag, a variable and a file give
the same messages.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from turnmill.assets import model_folder, shipped_models
from turnmill.config import Parameter, Resolved, base_model_of, describe, load_config, parameter_names
from turnmill.config.values import suggest
from turnmill.errors import ConfigError

R = TypeVar("R")


def config_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add `--config FILE` and an option for each parameter.

    The command receives `config_file: Path | None` and `flags: dict[str, object]`, which holds the options that were
    given, by parameter name; hand both to `resolve_config`.
    """

    @functools.wraps(command)
    def with_flags(**values: Any) -> R:
        flags = collect_flags(values)
        others = {name: value for name, value in values.items() if name not in _NAMES}
        return command(flags=flags, **others)

    wrapped: Callable[..., R] = with_flags
    for parameter in reversed(list(describe())):
        wrapped = _option(parameter)(wrapped)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML file with parameters, one `name = value` a line.",
    )(wrapped)


_NAMES = frozenset(parameter_names())


def collect_flags(values: Mapping[str, object]) -> dict[str, object]:
    """The parameters that the command line sets, out of all keyword arguments of a command."""
    return {name: value for name, value in values.items() if name in _NAMES and value is not None}


def resolve_config(
    config_file: Path | None,
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    sidecar: Path | None = None,
) -> Resolved:
    """All layers of this command: the base model is found first, since its `recipe.toml` is the lowest one.

    Raises `ConfigError`, also for a base model that is neither shipped nor a folder with a model.
    """
    environ = os.environ if environ is None else environ
    base_model, place = base_model_of(file=config_file, environ=environ, sidecar=sidecar, flags=flags)
    folder = model_folder(base_model)
    recipe = folder / "recipe.toml"
    is_model = base_model != "" and (folder / "config.json").is_file()
    try:
        resolved = load_config(
            recipe=recipe if is_model and recipe.is_file() else None,
            file=config_file,
            environ=environ,
            sidecar=sidecar,
            flags=flags,
        )
    except ConfigError as error:
        if is_model:
            raise
        raise ConfigError(f"{_no_model(base_model, place)}\n{error}") from error
    if not is_model:
        raise ConfigError(_no_model(base_model, place))
    return resolved


def _no_model(base_model: str, place: str) -> str:
    names = shipped_models()
    return (
        f'base_model = "{base_model}" ({place}): must be a shipped model ({", ".join(names)}) '
        f"or a folder with a config.json{suggest(base_model, names)}"
    )


def _option(parameter: Parameter) -> Callable[[Callable[..., R]], Callable[..., R]]:
    limits = f"{parameter.range_text}; " if parameter.range_text else ""
    text = f"{parameter.doc[0].upper()}{parameter.doc[1:]}. [{limits}default: {_default_text(parameter)}]"
    if parameter.kind is bool:
        declaration = f"{parameter.flag}/--no-{parameter.flag.removeprefix('--')}"
        return click.option(declaration, parameter.name, default=None, help=text)
    metavar = {int: "INTEGER", float: "NUMBER", str: "TEXT", dict: "JSON"}[parameter.kind]
    return click.option(parameter.flag, parameter.name, type=str, default=None, metavar=metavar, help=text)


def _default_text(parameter: Parameter) -> str:
    return str(parameter.default).lower() if parameter.kind is bool else str(parameter.default)
