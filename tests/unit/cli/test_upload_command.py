"""`turnmill upload`: what it places, and what it says of what was there before."""

from pathlib import Path

from click.testing import CliRunner

from turnmill.cli.commands import turnmill

ROW = '{"id": "a", "metadata": {"prompt": "go"}}\n'


def test_parameters_of_an_earlier_upload_that_hold_for_this_one_are_told(tmp_path: Path) -> None:
    data, config = tmp_path / "a.jsonl", tmp_path / "more.toml"
    data.write_text(ROW)
    config.write_text("seed = 3\n")
    root = tmp_path / "my root"
    command = ["upload", str(data), "--root", str(root)]
    first = CliRunner().invoke(turnmill, [*command, "--config", str(config)])
    assert (first.exit_code, first.stderr) == (0, "")
    assert f"`turnmill runs --root '{root}'`" in first.stdout
    again = CliRunner().invoke(turnmill, command)
    left = root / "bucket" / "training-data" / "a.config.toml"
    assert (again.exit_code, again.stderr) == (0, f"warning: {left} was there before, and comes with it\n")
