"""How the layers of sources combine; every problem on the way is collected and all are reported at once."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnmill.config.combinations import (
    ALGORITHM_PARAMETERS,
    RULES,
    algorithm_problems,
    compared_with,
    environment_problems,
    precision_problems,
    temperature_problems,
)
from turnmill.config.parameters import ENVIRONMENT_CHOICES, ENVIRONMENT_PARAMETERS, PREFIX, Config, describe
from turnmill.config.reads import reads
from turnmill.config.recording import READS, config_of
from turnmill.config.values import Unfit, check, parse, shown, suggest
from turnmill.errors import ConfigError, printable
from turnmill.records import RunKind

DEFAULT = "default"
RECIPE = "recipe.toml"
# Variables that are no parameters: everything else that starts with the prefix must name one.
OTHER_VARIABLES = (
    "TURNMILL_ROOT",
    "TURNMILL_BACKEND",
    "TURNMILL_WORKER_TOKEN",
    "TURNMILL_WORKER_CONFIG",
    "TURNMILL_JUDGE_SETTINGS",
    "TURNMILL_PROXY_URL",
    "TURNMILL_PROXY_AUTH",
    "TURNMILL_PROXY_LISTEN",
    "TURNMILL_SERVE_TOKEN",
    "TURNMILL_LOG_FORMAT",
    "TURNMILL_UNSAFE_ENV",
    "TURNMILL_FAILPOINTS",
    READS,
)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration and where each value came from."""

    config: Config
    # By parameter: `default`, `recipe.toml`, a file's name, `TURNMILL_LR`, `sidecar NAME`, `--lr`.
    sources: dict[str, str]


def load_config(
    *,
    recipe: Path | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = {},
    sidecar: Path | None = None,
    flags: Mapping[str, object] = {},
    kind: RunKind | None = None,
) -> Resolved:
    """Combine the layers, later ones over earlier ones. Flags that are text are parsed like the environment.

    Raises `ConfigError` with one line for each thing that is wrong: in any layer, in a combination of two values, or
    for a parameter that was set and that a run of this `kind` with these parameters does not read (None: not asked).
    """
    return _collect(recipe=recipe, file=file, environ=environ, sidecar=sidecar, flags=flags).resolve(kind)


def base_model_of(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = {},
    sidecar: Path | None = None,
    flags: Mapping[str, object] = {},
) -> str:
    """The base model that these layers choose: it must be known before its recipe can be a layer below them.

    Problems of the layers are left for `load_config` to report.
    """
    layers = _collect(recipe=None, file=file, environ=environ, sidecar=sidecar, flags=flags)
    given = layers.given.get("base_model")
    return Config().base_model if given is None else str(given.value)


def to_dict(config: Config) -> dict[str, Any]:
    """The parameters as JSON values, as a run's record keeps them."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any], *, source: str = "run record") -> Config:
    """The inverse of `to_dict`, checked like a file; a key that is missing takes its default. Raises `ConfigError`."""
    layers = _Layers()
    for key, value in values.items():
        # A record holds all parameters, and so not only what was set.
        if not layers.is_default(key, value):
            layers.add(_Given(key=key, value=value, source=source, place=source))
    return layers.resolve().config


# ---------------------------------------------------------------- layers


@dataclass(frozen=True, kw_only=True)
class _Given:
    """One key as some source gives it."""

    key: str
    value: Any
    # Short, kept with the run.
    source: str
    # Exact, for messages: a file with its line.
    place: str


class _Layers:
    """The values of all layers, later ones over earlier ones, and every problem on the way."""

    def __init__(self) -> None:
        self.parameters = {parameter.name: parameter for parameter in describe()}
        self.given: dict[str, _Given] = {}
        self.problems: list[str] = []
        self._bad: set[str] = set()

    def is_default(self, key: str, value: Any) -> bool:
        """Whether it is what the parameter is anyway: in its type, too."""
        parameter = self.parameters.get(key)
        return parameter is not None and type(value) is parameter.kind and value == parameter.default

    def add(self, given: _Given) -> None:
        """Take a value that has a type already."""
        parameter = self.parameters.get(given.key)
        if parameter is None:
            hint = suggest(given.key, self.parameters) or "; `turnmill run --help` lists all parameters"
            self.problems.append(
                f"{printable(given.key)} = {shown(given.value)} ({given.place}): no such parameter{hint}"
            )
            return
        try:
            self.given[given.key] = dataclasses.replace(given, value=check(parameter, given.value))
        except Unfit as unfit:
            self._refuse(given, unfit)

    def add_text(self, given: _Given) -> None:
        """Take a value that is written as text, parsed by the type of its parameter."""
        parameter = self.parameters.get(given.key)
        try:
            value = given.value if parameter is None else parse(parameter, given.value)
        except Unfit as unfit:
            self._refuse(given, unfit)
        else:
            self.add(dataclasses.replace(given, value=value))

    def _refuse(self, given: _Given, unfit: Unfit) -> None:
        self._bad.add(given.key)
        self.problems.append(f"{given.key} = {shown(given.value)} ({given.place}): {unfit}")

    def add_file(self, path: Path, source: str) -> None:
        """Take the keys of a TOML file."""
        try:
            text = path.read_bytes().decode("utf-8-sig")
            values = tomllib.loads(text)
        except OSError as error:
            self.problems.append(
                f"{path}: can't read this configuration file: {(error.strerror or str(error)).lower()}"
            )
            return
        except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, an endless number, or nested without end
            self.problems.append(_bad_toml(path, error))
            return
        for key, value in values.items():
            place = f"{path}:{_line_of(text, key)}"
            if source == RECIPE and key == "base_model":
                self.problems.append(f"{key} = {shown(value)} ({place}): a model's recipe can't choose the model")
            else:
                self.add(_Given(key=key, value=value, source=source, place=place))

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Take the TURNMILL_* variables; one that names nothing is a problem."""
        by_variable = {parameter.variable: parameter.name for parameter in self.parameters.values()}
        for variable, text in sorted(environ.items()):
            if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
                continue
            if variable in by_variable:
                self.add_text(_Given(key=by_variable[variable], value=text, source=variable, place=variable))
            else:
                hint = suggest(variable, [*by_variable, *OTHER_VARIABLES])
                self.problems.append(f"{printable(variable)} = {shown(text)} (environment): no such parameter{hint}")

    def add_flags(self, flags: Mapping[str, object]) -> None:
        """Take what the command line sets, by parameter name."""
        for key, value in flags.items():
            flag = ("--no-" if value is False else "--") + key.replace("_", "-")
            given = _Given(key=key, value=value, source=flag, place=flag)
            if isinstance(value, str):
                self.add_text(given)
            else:
                self.add(given)

    def resolve(self, kind: RunKind | None = None) -> Resolved:
        """The configuration; raises `ConfigError` with all problems, those of combinations included."""
        self._drop_recipe_environment()
        values = {name: parameter.default for name, parameter in self.parameters.items()}
        values |= {key: given.value for key, given in self.given.items()}
        places = {name: self.given[name].place if name in self.given else DEFAULT for name in values}
        chosen = {key for key, given in self.given.items() if given.source != RECIPE}
        for rule in RULES:
            if not self._bad & {rule.left, rule.right} and (problem := rule.problem(values, places, chosen)):
                self.problems.append(problem)
        if "val_temperature" not in self._bad:
            self.problems += temperature_problems(values, places)
        if not self._bad & set(ENVIRONMENT_PARAMETERS):
            self.problems += environment_problems(values, places, chosen)
        if not self._bad & set(ALGORITHM_PARAMETERS):
            self.problems += algorithm_problems(values, places)
        if "precision" not in self._bad:
            self.problems += precision_problems(values, places)
        # While it is watched who reads what, that is not known.
        if kind is not None and READS not in os.environ:
            self.problems += self._unread(kind, values, chosen)
        if self.problems:
            many = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            raise ConfigError("\n  ".join([f"{many} in the configuration:", *self.problems]))
        sources = {name: self.given[name].source if name in self.given else DEFAULT for name in values}
        return Resolved(config=config_of(values), sources=sources)

    def _unread(self, kind: RunKind, values: Mapping[str, Any], chosen: Set[str]) -> Iterator[str]:
        """What was set and does nothing; which environment is played has rules of its own, and no entry."""
        for key, entry in reads().items():
            # Nothing is said on the ground of a value that is wrong itself.
            if key not in chosen or self._bad & {key, *entry.conditions(kind)}:
                continue
            # A rule that compares it with another one that counts may leave no other way than to set it.
            if not any(reads()[other].is_read(kind, values) for other in compared_with(key) & chosen):
                given = self.given[key]
                told = f"{key} = {shown(given.value)} ({given.place})"
                is_from_file = given.place != given.source
                if problem := entry.problem(kind, values, told=told, is_from_file=is_from_file):
                    yield problem

    def _drop_recipe_environment(self) -> None:
        """A recipe's environment and its arguments belong together: who plays another one gets none of them."""
        names = [name for name in ENVIRONMENT_PARAMETERS if name in self.given]
        is_recipes = {name: self.given[name].source == RECIPE for name in names}
        if any(self.given[name].value and not is_recipes[name] for name in names if name in ENVIRONMENT_CHOICES):
            for name in names:
                if is_recipes[name]:
                    del self.given[name]


def _collect(
    *,
    recipe: Path | None,
    file: Path | None,
    environ: Mapping[str, str],
    sidecar: Path | None,
    flags: Mapping[str, object],
) -> _Layers:
    layers = _Layers()
    if recipe is not None:
        layers.add_file(recipe, RECIPE)
    if file is not None:
        layers.add_file(file, file.name)
    layers.add_environment(environ)
    layers.add_flags(flags)
    if sidecar is not None:
        # Over the flags, which are those of the deployment: it is about one upload.
        layers.add_file(sidecar, f"sidecar {sidecar.name}")
    return layers


def _bad_toml(path: Path, error: Exception) -> str:
    """The message for a file that is not TOML: path, line and column as far as the parser tells them."""
    if isinstance(error, RecursionError):
        return f"{path}: not valid TOML: nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: not valid TOML: not UTF-8 at byte {error.start}"
    found = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
    if found is None:
        return f"{path}: not valid TOML: {error}"
    return f"{path}:{found[1]}:{found[2]}: not valid TOML: {str(error)[: found.start()]}"


def _line_of(text: str, key: str) -> int:
    """Line of a top-level key or table; 1 where it is written in an unusual way."""
    found = re.search(rf"^[ \t]*(\[[ \t]*)?[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", text, re.MULTILINE)
    return 1 if found is None else text.count("\n", 0, found.start()) + 1
