"""Which processes of a run are told of its judges."""

import time
from pathlib import Path

import pytest

from turnmill.config import load_config, to_dict
from turnmill.environment.judges import JUDGES, known_judges
from turnmill.errors import ConfigError, InvalidInput
from turnmill.records import Run, RunKind, RunStatus
from turnmill.wiring import variables
from turnmill.wiring.running.control import Order, check_order, open_control

TABLE = '[[judges]]\nname = "{}"\nbase_url = "https://judge.example/v1"\nmodel = "m"\napi_key_env = "JUDGE_KEY"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a deployment with two judges."""
    (tmp_path / "turnmill.toml").write_text(TABLE.format("strict") + TABLE.format("mild"))
    return tmp_path


async def test_worker_and_preflight_are_told_of_the_judges_that_the_run_names(root: Path) -> None:
    config = load_config(flags={"judges": "strict"}).config
    run = Run(
        run_id="r1",
        cause="test",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config=to_dict(config),
        sources={},
        data_path="tasks.jsonl",
    )
    async with open_control(root, run, config, "token") as ctx:
        for environ in (ctx.worker_env, ctx.judges_env):
            assert [judge.name for judge in known_judges(environ)] == ["strict"]
        assert set(ctx.judges_env) == {JUDGES} and variables.WORKER_TOKEN in ctx.worker_env
        assert "JUDGE_KEY" not in ctx.worker_env


def test_a_run_is_refused_before_it_begins_where_a_judge_or_its_secret_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(judges: str) -> Order:
        return Order(kind=RunKind.TRAIN, resolved=load_config(flags={"judges": judges}), data=None, eval_data=None)

    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InvalidInput, match="JUDGE_KEY with its secret is not set"):
        check_order(root, order("strict"))
    with pytest.raises(ConfigError, match="has no judge 'harsh'"):
        check_order(root, order("harsh"))
    monkeypatch.setenv("JUDGE_KEY", "sk-something")
    check_order(root, order("strict,mild"))
