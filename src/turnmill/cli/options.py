"""One option per parameter, made from the table in `turnmill.config`.

Values stay the text that was typed: `load_config` parses and checks them, so that a flag, a variable and a file give
the same messages.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from turnmill.config import Parameter, describe, parameter_names

F = TypeVar("F", bound=Callable[..., Any])


def config_options(command: F) -> F:
    """Add `--config FILE` (the keyword `config_file: Path | None`) and an option for each parameter.

    Each parameter arrives as a keyword of its own name, None where it was not given: take them as `**flags` and hand
    `collect_flags(flags)` to `load_config`.
    """
    for parameter in reversed(list(describe())):
        command = _option(parameter)(command)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML file with parameters, one `name = value` a line.",
    )(command)


def collect_flags(values: Mapping[str, object]) -> dict[str, object]:
    """The parameters that the command line sets, out of a command's keyword arguments."""
    return {name: values[name] for name in parameter_names() if values.get(name) is not None}


def _option(parameter: Parameter) -> Callable[[F], F]:
    default = str(parameter.default).lower() if parameter.kind is bool else str(parameter.default)
    limits = f"{parameter.range_text}; " if parameter.range_text else ""
    text = f"{parameter.doc[0].upper()}{parameter.doc[1:]}. [{limits}default: {default}]"
    if parameter.kind is bool:
        declaration = f"{parameter.flag}/--no-{parameter.flag.removeprefix('--')}"
        return click.option(declaration, parameter.name, default=None, help=text)
    metavar = {int: "INTEGER", float: "NUMBER", str: "TEXT", dict: "JSON"}[parameter.kind]
    return click.option(parameter.flag, parameter.name, type=str, default=None, metavar=metavar, help=text)
