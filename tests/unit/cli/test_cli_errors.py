"""From errors to exit codes, and the options made from the parameter table."""

import click
import pytest

from turnmill.cli.errors import SuggestingGroup, run_cli
from turnmill.cli.options import collect_flags, config_options
from turnmill.config import describe, load_config
from turnmill.errors import BackendUnavailable, DataError


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
        "defect": ZeroDivisionError("a defect"),
    }[what]


@group.command()
@click.pass_context
def leave(ctx: click.Context) -> None:
    ctx.exit(7)


@group.command()
@config_options
def show(config_file: object, **flags: object) -> None:
    assert config_file is None
    click.echo(repr(collect_flags(flags)))


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["fail", "input"], 2, "Error: line 3 is bad\n"),
        (["fail", "service"], 1, "Error: the store is busy\n"),
        (["fail", "interrupt"], 130, "Interrupted.\n"),
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
