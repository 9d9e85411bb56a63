"""`turnmill env`: environments apart from any run: write one, check it, pack it, put it where runs find it.

The code of a package runs in its box alone, here as in a run.
"""

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnmill.backends.embedded.files import write_atomically
from turnmill.cli.errors import EXIT_FAILED, EXIT_INVALID_INPUT, SuggestingGroup
from turnmill.cli.options import (
    EPILOG,
    CommandWithParameters,
    collect_flags,
    config_options,
    unsafe_env_option,
)
from turnmill.cli.show import at_root, json_option, root_option
from turnmill.cli.view import PlainConsole, command, say
from turnmill.config import ENVIRONMENT_CHOICES, ENVIRONMENT_PARAMETERS, Config, load_config, parameter_names
from turnmill.environment.packaging import pack, unpack
from turnmill.environment.registry import PACKAGES, EnvironmentKind, digest_of_folder
from turnmill.environment.scaffold import Style, new_package
from turnmill.errors import InvalidInput, printable
from turnmill.records import CheckState, PreflightReport
from turnmill.rollout.box.log import without_time
from turnmill.wiring import environments
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.running.control import resolve

# Those that Preflight reads.
_READ = {*ENVIRONMENT_PARAMETERS, *"base_model judges seed max_length training_timeout group_rewards".split()}
_STYLES = {
    CheckState.OK: "green",
    CheckState.FAILED: "bold red",
    CheckState.WARNING: "yellow",
    CheckState.NOT_CHECKED: "dim",
}
# Last lines of the log that are shown where a check fails, and their length.
_TAIL_LINES, _TAIL_WIDTH = 15, 500
name_argument = click.argument("given", metavar="NAME|PATH")


@click.group(cls=SuggestingGroup, short_help="Write, check, pack and list environments.")
def env() -> None:
    """Write, check, pack and list environments.

    NAME is one that a run would find: built in, a package in custom-environments, or installed. A PATH (with a / in
    it, or .) is the folder of a package, called as the environment is.
    """


# ---------------------------------------------------------------- new


@env.command("new", short_help="Write a new environment that works at once.")
@click.argument("name")
@click.option(
    "--style",
    type=click.Choice([style.value for style in Style]),
    default=Style.AGENT.value,
    show_default=True,
    help="agent: a program that talks with the model and has a tool; game: turns of a state; verifiers: for verifiers.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help=f"Folder to make it in. [default: {PACKAGES} in the deployment]",
)
@root_option
@json_option("Print what was made as one object.")
def new_command(name: str, style: str, into: Path | None, root: Path, as_json: bool) -> None:
    """Write a package NAME with an environment, data and tests, to be changed into your own.

    As it is it can be validated, checked and trained on.
    """
    folder = new_package(name, Style(style), into or root / PACKAGES)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if as_json:
        click.echo(json.dumps({"env_id": name, "style": style, "folder": str(folder), "files": files}))
        return
    console = PlainConsole()
    say(console, Text.assemble(("made ", "bold green"), f"{folder}: {', '.join(files)}"))
    data = shlex.quote(str(folder / "data" / "train.jsonl"))
    given = name if into is None else _as_path(folder)
    say(console, "next:")
    for line in (
        f"turnmill env validate {given}{at_root(root)}",
        f"turnmill env preflight {given} --data {data}{at_root(root)}",
        f"turnmill run --use-custom-env --custom-env-id {name} --data {data} --base-model MODEL{at_root(root)}",
    ):
        say(console, command(f"  {line}"))
    if into is not None and into.name != PACKAGES:
        say(console, f"(runs find it in {PACKAGES}, of the deployment or where they are started)")


def _as_path(folder: Path) -> str:
    """As `locate` knows it for a path."""
    return shlex.quote(str(folder) if os.sep in str(folder) else f"{os.curdir}{os.sep}{folder}")


# ---------------------------------------------------------------- checks


@env.command("validate", short_help="Check a package, and that it loads.")
@name_argument
@click.option("--env-args", default="{}", metavar="JSON", help="Keyword arguments of load_environment. [default: {}]")
@unsafe_env_option
@root_option
@json_option("Print the report as one object.")
@click.pass_context
def validate_command(ctx: click.Context, given: str, env_args: str, root: Path, as_json: bool) -> None:
    """Check that an environment is a whole package, what it needs, and that it loads: exit code 0 if so, 2 if not.

    Files are read first; then its code is loaded in the box that a run would give it. `env preflight` plays it.
    """
    found = environments.locate(given, root=root, env_args=_arguments(env_args))
    with _work(f"loading {found.choice.env_id}") as (log, _):
        report = run_loop(environments.validate(found, root, log=log))
        _show(report, as_json, log)
    if report.failed:
        ctx.exit(EXIT_INVALID_INPUT)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--env-args {printable(text)}: is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise InvalidInput(f"--env-args {printable(text)}: must be a JSON object")
    return arguments


@env.command("preflight", cls=CommandWithParameters, epilog=EPILOG, short_help="Play an environment without a model.")
@click.argument("given", metavar="[NAME|PATH]", required=False)
@click.option(
    "--data", "data_path", type=click.Path(path_type=Path), metavar="FILE", required=True, help="Tasks (.jsonl)."
)
@unsafe_env_option
@root_option
@json_option("Print the report as one object.")
@config_options(without=frozenset(parameter_names()) - _READ)
def preflight_command(
    given: str | None,
    data_path: Path,
    config_file: Path | None,
    root: Path,
    as_json: bool,
    **flags: object,
) -> None:
    """Do what the stage Preflight of a run does: play some tasks without a model, and see what they earn.

    The environment is NAME|PATH, or what --env, --custom-env-id or --vf-env-id say. The exit code is 1 where a check
    fails, 2 where the data or a parameter can't be used.
    """
    config = _config(config_file, collect_flags(flags), is_given=given is not None)
    found = None if given is None else environments.locate(given, root=root, env_args=config.env_args)
    with _work("playing without a model") as (log, playing):
        report = run_loop(environments.preflight_of(config, data_path, root, found=found, log=log, playing=playing))
        _show(report, as_json, log)
    if report.failed:
        click.get_current_context().exit(EXIT_FAILED)


def _config(file: Path | None, flags: dict[str, object], *, is_given: bool) -> Config:
    """The recipe of a base model bounds its conversations; where none is named, none does."""
    resolved = load_config(file=file, environ=os.environ, flags=flags)
    if resolved.sources["base_model"] != "default":
        resolved = resolve(file=file, environ=os.environ, flags=flags)
    others = [name for name in ENVIRONMENT_CHOICES if resolved.sources[name] not in ("default", "recipe.toml")]
    if is_given and others:
        where = resolved.sources[others[0]]
        raise InvalidInput(f"NAME|PATH and {others[0]} ({where}) each name an environment: give one of them")
    return resolved.config


@contextmanager
def _work(what: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A file for what is logged meanwhile, and whom to tell what is going on: a line in a terminal that goes again."""
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="turnmill-env-") as folder,
        environments.logged(Path(folder) / "log"),
        console.status(Text(what)) as status,
    ):
        yield Path(folder) / "log", lambda text: status.update(Text(f"{what}: {text}"))


def _show(report: PreflightReport, as_json: bool, log: Path) -> None:
    if as_json:
        click.echo(msgspec.json.encode({"ok": not report.failed, **msgspec.to_builtins(report)}))
        return
    console = PlainConsole()
    if console.is_terminal:
        console.print(_table(report))
    else:
        # One check a line, for grep and logs.
        for check in report.checks:
            click.echo(f"{check.state.replace('_', ' '):11} {check.name:12} {check.detail}")
    for line in _figures(report):
        say(console, line)
    if report.failed and (tail := _tail(log)):
        say(Console(stderr=True), Text("\n".join(["its log ends so:", *(f"  {line}" for line in tail)]), style="dim"))


def _table(report: PreflightReport) -> Table:
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for check in report.checks:
        state = Text(check.state.replace("_", " "), style=_STYLES[check.state])
        table.add_row(Text(check.name), state, Text(check.detail))
    return table


def _figures(report: PreflightReport) -> Iterator[str]:
    if report.tasks:
        means = ", ".join(f"{script} {mean:.3g}" for script, mean in report.mean_rewards.items()) or "none"
        yield f"{len(report.tasks)} tasks, {report.num_turns} turns; mean reward: {means}"
    num_failed, num_warnings = len(report.failed), len(report.warnings)
    warned = f", {num_warnings} with a warning" if num_warnings else ""
    yield f"{num_failed} of {len(report.checks)} checks failed{warned}" if num_failed else f"no check failed{warned}"


def _tail(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [printable(without_time(line), limit=_TAIL_WIDTH) for line in lines[-_TAIL_LINES:]]


# ---------------------------------------------------------------- archives


@env.command("package", short_help="Pack a package into one file.")
@name_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[default: NAME.tar.gz]"
)
@root_option
@json_option("Print the file and its digests as one object.")
def package_command(given: str, output: Path | None, root: Path, as_json: bool) -> None:
    """Pack a package into one .tar.gz: the same bytes for the same files, wherever it is made."""
    found = environments.locate(given, root=root)
    if found.folder is None:
        what = "is built in" if found.kind is EnvironmentKind.BUILT_IN else "is an installed module"
        raise InvalidInput(f"{given} {what}: there is no folder to pack")
    archive = pack(found.folder, found.choice.env_id)
    target = output or Path(f"{found.choice.env_id}.tar.gz")
    if not target.parent.is_dir():
        raise InvalidInput(f"{target}: can't be written: there is no folder {target.parent}")
    try:
        write_atomically(target, archive)
    except OSError as error:
        raise InvalidInput(f"{target}: can't be written: {error.strerror}") from error
    digests = {"sha256": hashlib.sha256(archive).hexdigest(), "digest": found.digest()}
    if as_json:
        click.echo(json.dumps({"file": str(target), "num_bytes": len(archive), **digests}))
        return
    say(PlainConsole(), Text.assemble(("packed ", "bold green"), f"{found.folder} as {target}, {len(archive)} bytes"))
    click.echo(f"SHA-256 of the file: {digests['sha256']}")
    click.echo(f"digest of the package: {digests['digest']}")


@env.command("install", short_help="Unpack a package for the runs of a deployment.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a package of that name.")
@root_option
@json_option("Print the folder and its digest as one object.")
def install_command(file: Path, force: bool, root: Path, as_json: bool) -> None:
    """Unpack FILE, made by `env package`, into the custom-environments of the deployment.

    Anything odd in it is refused, and nothing of it is run.
    """
    folder = unpack(file, root / PACKAGES, replace=force)
    digest = digest_of_folder(folder)
    if as_json:
        click.echo(json.dumps({"env_id": folder.name, "folder": str(folder), "digest": digest}))
        return
    console = PlainConsole()
    say(console, Text.assemble(("installed ", "bold green"), f"{folder}, digest {digest}"))
    say(console, command(f"next: turnmill env validate {folder.name}{at_root(root)}"))


# ---------------------------------------------------------------- list


@env.command("list", short_help="List what can be played.")
@root_option
@json_option("Print a list of objects, one an environment.")
def list_command(root: Path, as_json: bool) -> None:
    """List the built-in environments, and the packages of the deployment and of the working directory.

    None of them is run: what is wrong with one beyond its files, `env validate` finds.
    """
    found = environments.listed(root)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
        return
    table = Table()
    for title in ("environment", "kind", "digest", "state"):
        table.add_column(title, no_wrap=title != "state", overflow="fold")
    for each in found:
        state = Text("whole", style="green")
        if each.problem is not None:
            state = Text(each.problem, style="bold red")
        elif each.missing:
            state = Text(f"whole; installed for it when it is played: {', '.join(each.missing)}", style="green")
        kind = each.kind.replace("_", " ")
        table.add_row(Text(each.env_id), Text(kind), Text((each.digest or "")[:16]), state)
    PlainConsole().print(table)
