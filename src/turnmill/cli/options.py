"""One option per parameter, made from the table in `turnmill.config`.

Values stay the text that was typed: `load_config` parses and checks them, so that a flag, a variable and a file give
the same messages.
"""

import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import click

from turnmill.config import Parameter, describe, parameter_names
from turnmill.config.reads import parameters_of
from turnmill.records import RunKind
from turnmill.wiring.variables import UNSAFE_ENV

F = TypeVar("F", bound=Callable[..., Any])
# What an evaluation has no use for.
TRAINING_ALONE = frozenset(parameter_names()) - parameters_of(RunKind.EVAL)
EPILOG = (
    "A parameter comes from the last of: its default, the model's recipe.toml, --config, a variable TURNMILL_NAME, "
    "the command line."
)


class ParameterOption(click.Option):
    """An option that sets a parameter of the run; help lists these under a heading of their own."""


class CommandWithParameters(click.Command):
    """A command whose help keeps its own few options apart from the many parameters."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both lists of options."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for heading, of_parameter in (("Options", False), ("Parameters", True)):
            chosen = [option for option in options if isinstance(option, ParameterOption) is of_parameter]
            with formatter.section(heading):
                formatter.write_dl([record for option in chosen if (record := option.get_help_record(ctx))])


def config_options(*, without: Set[str] = frozenset()) -> Callable[[F], F]:
    """Add `--config FILE` (the keyword `config_file: Path | None`) and an option for each parameter.

    Each parameter but those `without` arrives as a keyword of its own name, None where it was not given: take them as
    `**flags` and hand `collect_flags(flags)` to `load_config`.
    """

    def add(command: F) -> F:
        for parameter in reversed(list(describe())):
            if parameter.name not in without:
                command = _option(parameter)(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML file with parameters, one `name = value` a line.",
        )(command)

    return add


def unsafe_env_option(command: F) -> F:
    """Add `--unsafe-env`, which the processes of the command's runs learn of by their variables."""

    def allow(_: click.Context, __: click.Parameter, is_given: bool) -> None:
        if is_given:
            os.environ[UNSAFE_ENV] = "1"

    return click.option(
        "--unsafe-env",
        is_flag=True,
        expose_value=False,
        callback=allow,
        help="Play an environment's package also where nothing can keep it in a box: it can do what you can do.",
    )(command)


def backend_options(command: F) -> F:
    """Add `--backend` and `--local-compute` (the keywords `backend: str | None` and `local_compute: bool`)."""
    command = click.option(
        "--local-compute",
        is_flag=True,
        help="With --backend aws: worker, replicas, trainer and proxy are processes of this machine.",
    )(command)
    return click.option(
        "--backend",
        metavar="embedded|aws",
        help="Where queues, records and blobs are (or TURNMILL_BACKEND, or [backend] in turnmill.toml). A deployment "
        "keeps what it began with. [default: embedded]",
    )(command)


def collect_flags(values: Mapping[str, object]) -> dict[str, object]:
    """The parameters that the command line sets, out of a command's keyword arguments."""
    return {name: values[name] for name in parameter_names() if values.get(name) is not None}


def _sentence(meaning: str) -> str:
    """With a capital, unless it begins with the name of what reads the parameter, as in `curriculum: lowest ...`."""
    return meaning if meaning.split()[0].endswith(":") else meaning[0].upper() + meaning[1:]


def _option(parameter: Parameter) -> Callable[[F], F]:
    limits = f"{parameter.range_text}; " if parameter.range_text else ""
    text = f"{_sentence(parameter.doc)}. [{limits}default: {parameter.default_text}]"
    if parameter.kind is bool:
        declaration = f"{parameter.flag}/--no-{parameter.flag.removeprefix('--')}"
        return click.option(declaration, parameter.name, cls=ParameterOption, default=None, help=text)
    metavar = {int: "INTEGER", float: "NUMBER", str: "TEXT", dict: "JSON", tuple: "A,B"}[parameter.kind]
    return click.option(
        parameter.flag, parameter.name, cls=ParameterOption, type=str, default=None, metavar=metavar, help=text
    )
