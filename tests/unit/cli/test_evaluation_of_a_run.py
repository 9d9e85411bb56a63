"""An evaluation of a run's model is played as the run was."""

from turnmill.cli.run import as_played
from turnmill.config import Resolved, load_config, to_dict
from turnmill.records import Run, RunKind, RunStatus


def trained(resolved: Resolved) -> Run:
    return Run(
        run_id="r1",
        cause="test",
        kind=RunKind.TRAIN,
        status=RunStatus.SUCCEEDED,
        created_at=0.0,
        config=to_dict(resolved.config),
        sources=resolved.sources,
        data_path="tasks.jsonl",
    )


def test_what_was_set_about_playing_is_taken_with_its_source() -> None:
    run = trained(load_config(flags={"env_args": {"max_turns": 3}, "val_temperature": 0.5, "lr": 0.1, "seed": 7}))
    played = as_played(load_config(), run)
    assert played.config.env_args == {"max_turns": 3} and played.config.val_temperature == 0.5
    assert played.sources["env_args"] == "run r1" and played.sources["max_length"] == "default"
    assert (played.config.lr, played.config.seed) == (load_config().config.lr, 0)


def test_what_is_set_anew_wins() -> None:
    run = trained(load_config(flags={"env_args": {"max_turns": 3}, "val_temperature": 0.5}))
    played = as_played(load_config(environ={"TURNMILL_VAL_TEMPERATURE": "0.7"}, flags={"env_args": {}}), run)
    assert played.config.env_args == {} and played.sources["env_args"] == "--env-args"
    assert played.config.val_temperature == 0.7


def test_the_environment_of_the_run_is_taken_as_a_whole_or_not_at_all() -> None:
    run = trained(load_config(flags={"env": "sql-agent", "env_args": {"depth": 2}}))
    taken = as_played(load_config(flags={"env_args": {"depth": 3}}), run).config.environment
    assert (taken.env_id, taken.env_args) == ("sql-agent", {"depth": 3})
    another = as_played(load_config(flags={"vf_env_id": "x"}), run).config.environment
    assert (another.env_id, another.env_args) == ("x", {})
