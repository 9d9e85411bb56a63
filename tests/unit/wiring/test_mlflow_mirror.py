"""What MLflow has of a run: each step once, whatever was killed, and the end that the run had."""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import open_run
from turnmill.backends.mlflow import RUN_TAG, MlflowRuns
from turnmill.config import Config, to_dict
from turnmill.config.deployment import MlflowStore, load_deployment
from turnmill.errors import ConfigError
from turnmill.ports import Write
from turnmill.records import Metric, Run, RunStatus, StageRecord, TrainingStatus, encode, training_key
from turnmill.wiring.mirror_process import Mirror, Sent
from turnmill.wiring.mirroring import check_mirror, mirrored
from turnmill.wiring.reading.runs import began

needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")
EVALUATION = {"before": {"solved": 0.25, "num_valid": 8}, "after": {"solved": 0.75, "num_valid": 8}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowStore:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    found = MlflowStore(tracking_uri=(tmp_path / "mlruns").as_uri(), experiment="agents")
    (tmp_path / "turnmill.toml").write_text(f'[mlflow]\ntracking_uri = "{found.tracking_uri}"\nexperiment = "agents"\n')
    return found


def made_run(status: RunStatus = RunStatus.ACTIVE, **changes: Any) -> Run:
    run = Run(
        run_id="one",
        cause="cause",
        status=status,
        created_at=100.0,
        config=to_dict(Config()),
        sources={"lr": "--lr", "seed": "default"},
        data_path=None,
        ended_at=200.0 if status.is_final else None,
        stages=(StageRecord(name="SubmitTraining", state="running", started_at=100.0),),
        worker_token_hash="a hash",
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )
    return replace(run, **changes)


async def record(root: Path, run: Run, *, steps: dict[int, int] | None = None) -> None:
    """The run, and its steps with the incarnation of each."""
    ports = open_run(root, run.run_id, num_replicas=1)
    await ports.runs.write([Write(key=run.key, value=encode(run), expected=None)])
    for step, made in (steps or {}).items():
        values = {"reward_mean": round(step / 10 + made / 100, 2), "solved": 0.5}
        await ports.metrics.write(
            Metric(run_id=run.run_id, step=step, incarnation=made, time=100.0 + step + made / 10, values=values)
        )
    if steps:
        status = TrainingStatus(
            run_id=run.run_id, state="running", step=max(steps), max_steps=9, incarnation=1, updated_at=1.0
        )
        await ports.records.write([Write(key=training_key(run.run_id), value=encode(status), expected=None)])
    ports.close()


def mirror(root: Path, store: MlflowStore, run_id: str | None = "one") -> Mirror:
    return Mirror(root, run_id, store, lambda: MlflowRuns(store.tracking_uri, store.experiment))


class Seen:
    """What MLflow itself says."""

    def __init__(self, store: MlflowStore) -> None:
        from mlflow import MlflowClient

        self.client: Any = MlflowClient(tracking_uri=store.tracking_uri)
        experiment: Any = self.client.get_experiment_by_name(store.experiment)
        (self.run,) = self.client.search_runs([experiment.experiment_id])

    def steps(self, name: str) -> list[tuple[int, float]]:
        return sorted((item.step, item.value) for item in self.client.get_metric_history(self.run.info.run_id, name))

    def kept(self, name: str, folder: Path) -> str:
        return Path(self.client.download_artifacts(self.run.info.run_id, name, str(folder))).read_text()

    def artifacts(self) -> set[str]:
        return {item.path for item in self.client.list_artifacts(self.run.info.run_id, "turnmill")}


# ---------------------------------------------------------------- how far it has come


def metric(step: int, made: int = 1) -> Metric:
    return Metric(run_id="one", step=step, incarnation=made, time=0.0, values={})


def test_steps_that_were_sent_are_kept_as_ranges() -> None:
    sent = Sent()
    for step in (1, 2, 3):
        sent = sent.with_step(metric(step))
    sent = sent.with_step(metric(4, 2))
    assert sent.steps == ((1, 3, 1), (4, 4, 2))
    assert sent.has(metric(2)) and sent.has(metric(4, 2)) and not sent.has(metric(4)) and not sent.has(metric(5, 2))


def test_a_step_that_is_made_again_and_those_behind_it_were_not_sent() -> None:
    sent = Sent(steps=((1, 9, 1),)).with_step(metric(4, 2))
    assert sent.steps == ((1, 3, 1), (4, 4, 2)) and not sent.has(metric(5)) and not sent.has(metric(5, 2))


# ---------------------------------------------------------------- settings


def test_the_table_is_read_and_its_secrets_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "turnmill.toml"
    file.write_text('[mlflow]\ntracking_uri_env = "URI"\n')
    found = load_deployment(tmp_path, {"URI": "https://user:pass@host"}).mlflow
    assert found == MlflowStore(tracking_uri="https://user:pass@host", experiment="turnmill") and "pass" not in repr(
        found
    )
    assert load_deployment(tmp_path / "nowhere", {}).mlflow is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mlflow = 3", "mlflow: must be a table"),
        ("[mlflow]", "mlflow.tracking_uri: is missing"),
        ('[mlflow]\ntracking_uri = "a"\nexperiment = 3', "mlflow.experiment: must be the name"),
        ('[mlflow]\ntracking_url = "a"', "mlflow.tracking_url: no such key; did you mean tracking_uri?"),
        ('[mlflow]\ntracking_uri_env = "NOT_SET"', "mlflow.tracking_uri_env: the environment variable"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "turnmill.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_deployment(tmp_path, {})
    assert problem in str(caught.value)


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="MLflow is installed")
def test_without_mlflow_the_table_is_refused_and_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text('[mlflow]\ntracking_uri = "http://127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match=r"pip install 'turnmill\[mlflow\]'"):
        check_mirror(tmp_path)


async def test_nothing_is_started_where_nothing_is_configured(tmp_path: Path) -> None:
    async with mirrored(tmp_path) as start:
        start("one")
    assert not (tmp_path / "logs").exists()


# ---------------------------------------------------------------- with a real store


@needs_mlflow
async def test_a_run_is_there_with_parameters_steps_evaluations_and_its_end(tmp_path: Path, store: MlflowStore) -> None:
    await record(tmp_path, made_run(), steps={1: 1, 2: 1})
    mirroring = mirror(tmp_path, store)
    assert mirroring.look()
    seen = Seen(store)
    assert seen.run.info.status == "RUNNING" and seen.run.data.tags[RUN_TAG] == "one"
    assert seen.run.data.params["max_steps"] == str(Config().max_steps)
    assert seen.run.data.tags["turnmill.source.lr"] == "--lr" and "turnmill.source.seed" not in seen.run.data.tags
    assert seen.steps("reward_mean") == [(1, 0.11), (2, 0.21)]
    evaluated = StageRecord(name="Evaluate", state="done", started_at=150.0, ended_at=160.0, result=EVALUATION)
    await record(tmp_path, made_run(RunStatus.SUCCEEDED, stages=(*made_run().stages, evaluated)), steps={3: 1})
    assert mirroring.look() and mirroring.look()
    seen = Seen(store)
    assert (seen.run.info.status, seen.run.info.end_time) == ("FINISHED", 200_000)
    assert [step for step, _ in seen.steps("reward_mean")] == [1, 2, 3]
    assert (seen.steps("eval/before/solved"), seen.steps("eval/after/solved")) == ([(0, 0.25)], [(3, 0.75)])
    assert seen.artifacts() == {"turnmill/config.json", "turnmill/run.json"}
    kept = seen.kept("turnmill/run.json", tmp_path)
    assert json.loads(kept)["status"] == "succeeded" and "worker_token_hash" not in kept


@needs_mlflow
async def test_the_card_and_the_lineage_of_the_published_model_are_artifacts(
    tmp_path: Path, store: MlflowStore
) -> None:
    folder = tmp_path / "bucket" / "models" / "one" / "1.3"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("what it can do")
    (folder / "lineage.json").write_text("{}")
    published = StageRecord(
        name="Publish", state="done", started_at=160.0, ended_at=170.0, result={"location": str(folder)}
    )
    await record(tmp_path, made_run(RunStatus.SUCCEEDED, stages=(*made_run().stages, published)), steps={1: 1})
    assert mirror(tmp_path, store).look()
    seen = Seen(store)
    assert seen.artifacts() == {f"turnmill/{name}" for name in ("config.json", "run.json", "README.md", "lineage.json")}
    assert seen.kept("turnmill/README.md", tmp_path) == "what it can do"


@needs_mlflow
@pytest.mark.parametrize(
    ("status", "expected"),
    [(RunStatus.FAILED, "FAILED"), (RunStatus.CANCELLED, "KILLED"), (RunStatus.DUPLICATE, "FINISHED")],
)
async def test_each_end_has_its_status_and_a_resumed_run_goes_on(
    tmp_path: Path, store: MlflowStore, status: RunStatus, expected: str
) -> None:
    await record(tmp_path, made_run(status), steps={1: 1})
    assert mirror(tmp_path, store).look()
    seen = Seen(store)
    assert seen.run.info.status == expected and seen.run.data.tags["turnmill.status"] == status
    await record(tmp_path, made_run(attempt=2), steps={2: 1})
    assert mirror(tmp_path, store).look()
    assert Seen(store).run.info.status == "RUNNING"
    await record(tmp_path, made_run(RunStatus.SUCCEEDED, attempt=2))
    assert mirror(tmp_path, store, None).look()
    seen = Seen(store)
    assert seen.run.info.status == "FINISHED" and [step for step, _ in seen.steps("reward_mean")] == [1, 2]


@needs_mlflow
async def test_what_was_sent_and_not_written_down_is_not_sent_again(tmp_path: Path, store: MlflowStore) -> None:
    """As after a kill between the two: the state is that of an earlier moment, or gone."""
    await record(tmp_path, made_run(), steps={1: 1})
    assert mirror(tmp_path, store).look()
    state = tmp_path / "runs" / "one" / "mlflow.json"
    earlier = state.read_bytes()
    await record(tmp_path, made_run(), steps={2: 1, 3: 1})
    assert mirror(tmp_path, store).look()
    for content in (earlier, None):
        state.unlink() if content is None else state.write_bytes(content)
        assert mirror(tmp_path, store).look()
        assert [step for step, _ in Seen(store).steps("reward_mean")] == [1, 2, 3], "and one run only"


@needs_mlflow
async def test_steps_that_are_made_again_come_after_those_that_were_given_up(
    tmp_path: Path, store: MlflowStore
) -> None:
    await record(tmp_path, made_run(), steps={1: 1, 2: 1, 3: 1})
    mirroring = mirror(tmp_path, store)
    assert mirroring.look()
    await record(tmp_path, made_run(attempt=2), steps={2: 2})
    assert mirroring.look()
    await record(tmp_path, made_run(attempt=2), steps={3: 2})
    assert mirroring.look()
    seen = Seen(store)
    assert seen.steps("reward_mean") == [(1, 0.11), (2, 0.21), (2, 0.22), (3, 0.31), (3, 0.32)]
    assert seen.run.data.metrics["reward_mean"] == 0.32 and seen.run.data.tags["turnmill.resumed_from"] == "1"


@needs_mlflow
async def test_a_run_that_somebody_deleted_there_is_made_anew(tmp_path: Path, store: MlflowStore) -> None:
    await record(tmp_path, made_run(), steps={1: 1})
    assert mirror(tmp_path, store).look()
    seen = Seen(store)
    seen.client.delete_run(seen.run.info.run_id)
    await record(tmp_path, made_run(), steps={2: 1})
    assert mirror(tmp_path, store).look()
    assert [step for step, _ in Seen(store).steps("reward_mean")] == [1, 2]


@needs_mlflow
async def test_a_deployments_mirror_takes_up_what_was_left_and_leaves_what_was_never_wanted(
    tmp_path: Path, store: MlflowStore
) -> None:
    await record(tmp_path, made_run(RunStatus.SUCCEEDED), steps={1: 1})
    await record(tmp_path, made_run(RunStatus.SUCCEEDED, run_id="old"), steps={1: 1})
    (tmp_path / "runs" / "one" / "mlflow.json").write_text(json.dumps({"steps": [], "evaluations": []}))
    assert mirror(tmp_path, store, None).look()
    assert Seen(store).run.data.tags[RUN_TAG] == "one"


@needs_mlflow
async def test_a_server_that_is_away_is_told_of_once_and_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    await record(tmp_path, made_run(), steps={1: 1})
    away = MlflowStore(tracking_uri="http://user:a-password-of-mine@127.0.0.1:1", experiment="agents")
    mirroring = mirror(tmp_path, away)
    assert not mirroring.look() and not mirroring.look()
    assert caplog.text.count("is tried again until it can") == 1 and "a-password-of-mine" not in caplog.text
    assert (tmp_path / "runs" / "one" / "mlflow.json").exists(), "so that it is found later"


@needs_mlflow
async def test_a_run_whose_files_are_damaged_holds_up_no_other_one(tmp_path: Path, store: MlflowStore) -> None:
    for name in ("a", "one", "z"):
        await record(tmp_path, made_run(run_id=name), steps={1: 1})
    for name in ("a", "z"):
        (tmp_path / "runs" / name / "metrics.jsonl").unlink()
        (tmp_path / "runs" / name / "metrics.jsonl").mkdir()
    (tmp_path / "runs" / "one" / "mlflow.json").write_text("[1")
    mirroring = mirror(tmp_path, store, None)
    assert [mirroring.look() for _ in range(3)] == [False] * 3
    await record(tmp_path, made_run(), steps={2: 1})
    assert not mirroring.look()
    seen = Seen(store)
    assert seen.run.data.tags[RUN_TAG] == "one" and [step for step, _ in seen.steps("reward_mean")] == [1, 2]


@needs_mlflow
async def test_nothing_of_a_run_that_was_cleaned_up_comes_back(tmp_path: Path, store: MlflowStore) -> None:
    await record(tmp_path, made_run(), steps={1: 1})
    mirroring = mirror(tmp_path, store)
    shutil.rmtree(tmp_path / "runs" / "one")
    mirroring.look()
    assert not (tmp_path / "runs" / "one").exists()
    shutil.rmtree(tmp_path / "records")
    assert mirroring.look()


@needs_mlflow
@pytest.mark.slow
async def test_the_process_ends_when_control_does_and_has_sent_the_rest_by_then(
    tmp_path: Path, store: MlflowStore
) -> None:
    await record(tmp_path, made_run(), steps={1: 1})
    async with mirrored(tmp_path) as start:
        start("one")
        start("one")
        state = tmp_path / "runs" / "one" / "mlflow.json"
        for _ in range(600):
            if state.exists() and json.loads(state.read_bytes())["status"]:
                break
            await asyncio.sleep(0.1)
        await record(tmp_path, made_run(RunStatus.SUCCEEDED), steps={2: 1})
    seen = Seen(store)
    assert seen.run.info.status == "FINISHED" and [step for step, _ in seen.steps("reward_mean")] == [1, 2]


@needs_mlflow
async def test_evaluations_while_a_run_trains_are_there_at_their_steps(tmp_path: Path, store: MlflowStore) -> None:
    run = made_run()
    await record(tmp_path, run, steps={1: 1, 2: 1})
    ports = open_run(tmp_path, "one", num_replicas=1)
    for step, solved in ((0, 0.125), (2, 0.25)):
        values = {"val_solved": solved, "val_pass_at_4": 2 * solved}
        await ports.metrics.write(Metric(run_id="one", step=step, time=100.0 + step, values=values))
    ports.close()
    assert await asyncio.to_thread(mirror(tmp_path, store).look)
    seen = Seen(store)
    assert seen.steps("val_solved") == [(0, 0.125), (2, 0.25)] and seen.steps("val_pass_at_4") == [(0, 0.25), (2, 0.5)]
