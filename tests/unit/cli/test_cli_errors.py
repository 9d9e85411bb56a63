"""From errors to exit codes, and the options made from the parameter table."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from turnmill.cli.commands import turnmill
from turnmill.cli.errors import SuggestingGroup, run_cli
from turnmill.cli.options import TRAINING_ALONE, CommandWithParameters, collect_flags, config_options
from turnmill.config import describe, load_config
from turnmill.errors import BackendUnavailable, Cancelled, DataError


@click.group(cls=SuggestingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    pass


@group.command()
@click.argument("what")
def fail(what: str) -> None:
    raise {
        "input": DataError("line 3 is bad"),
        "service": BackendUnavailable("the store is busy"),
        "interrupt": KeyboardInterrupt(),
        "cancelled": Cancelled("cancelled by the user"),
        "defect": ZeroDivisionError("a defect"),
    }[what]


@group.command()
@click.pass_context
def leave(ctx: click.Context) -> None:
    ctx.exit(7)


@group.command(cls=CommandWithParameters)
@config_options()
def show(config_file: object, **flags: object) -> None:
    assert config_file is None
    click.echo(repr(collect_flags(flags)))


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["fail", "input"], 2, "Error: line 3 is bad\n"),
        (["fail", "service"], 1, "Error: the store is busy\n"),
        (["fail", "interrupt"], 130, "Interrupted.\n"),
        (["fail", "cancelled"], 130, "Interrupted.\n"),
        (["leave"], 7, ""),
        (["show"], 0, ""),
        (["shw"], 2, "No such command 'shw'; did you mean show? Commands: fail, leave, show"),
        (["zzzzz"], 2, "No such command 'zzzzz'. Commands: fail, leave, show"),
        (["--nope"], 2, "No such option"),
        (["show", "--max-step", "3"], 2, "--max-steps"),
        (["show", "--seed"], 2, "requires an argument"),
    ],
)
def test_each_kind_of_end_has_its_exit_code_and_no_traceback(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(group, argv) == code
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_the_entry_point_imports_the_commands_only_where_ctrl_c_is_caught() -> None:
    code = (
        "import sys, turnmill.cli.main; sys.exit(bool({'click', 'rich', 'turnmill.cli.commands'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cli(group, ["fail", "defect"])


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_every_parameter_with_its_meaning(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(group, ["show", flag]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for parameter in describe():
        assert parameter.flag in text
    assert "Optimizer steps. [at least 1 and at most 100000; default: 100]" in text


def test_help_lists_the_commands_own_options_before_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(group, ["show", "--help"]) == 0
    own, parameters = capsys.readouterr().out.split("Parameters:")
    assert "--config FILE" in own and "--help" in own
    assert not any(f"{parameter.flag} " in own for parameter in describe())
    assert "--config FILE" not in parameters


def test_help_leaves_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(group, ["show", "--help"]) == 0
    text = capsys.readouterr().out
    assert "group_based_per_turn: discount" in text and "Optimizer steps." in text


def test_commands_keep_the_order_in_which_they_were_added() -> None:
    assert group.list_commands(click.Context(group)) == ["fail", "leave", "show"]


def test_what_an_evaluation_has_no_use_for_names_parameters() -> None:
    assert {parameter.name for parameter in describe()} >= TRAINING_ALONE


def test_options_are_collected_as_typed_and_only_where_given(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["show", "--seed", "-1", "--lr", "1e-3", "--no-shuffle", "--env-args", '{"max_turns": 3}']
    assert run_cli(group, argv) == 0
    flags = {"env_args": '{"max_turns": 3}', "seed": "-1", "shuffle": False, "lr": "1e-3"}
    assert capsys.readouterr().out == f"{flags!r}\n"


def test_every_parameter_can_be_set_to_its_default_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["show"]
    for parameter in describe():
        if parameter.kind is bool:
            argv.append(parameter.flag if parameter.default else "--no-" + parameter.flag.removeprefix("--"))
        else:
            argv += [parameter.flag, str(parameter.default)]
    assert run_cli(group, argv) == 0
    flags = {parameter.name: parameter.default for parameter in describe()}
    assert load_config(flags=flags).config == load_config().config


def test_the_help_lists_every_command_once_under_a_heading_and_hidden_ones_nowhere() -> None:
    text = CliRunner().invoke(turnmill, ["--help"]).output
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and "  " in line.strip()]
    shown = [name for name, command in turnmill.commands.items() if not command.hidden]
    assert sorted(name for name in listed if not name.startswith("-")) == sorted(shown)
    assert "..." not in text.partition("Train:")[2] and "Of processes" not in text
    error = CliRunner().invoke(turnmill, ["rolle"]).output
    assert "No such command 'rolle'" in error and ", role" not in error


def test_every_command_has_json_but_those_that_talk() -> None:
    """What `serve` and `chat` print is for people, and HTTP is their machine-readable form."""

    def leaves(group: click.Group, prefix: str = "") -> list[tuple[str, click.Command]]:
        found: list[tuple[str, click.Command]] = []
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                found += leaves(command, f"{name} ")
            elif not command.hidden:
                found.append((prefix + name, command))
        return found

    without = [name for name, command in leaves(turnmill) if not any("--json" in each.opts for each in command.params)]
    assert without == ["serve", "chat"]
