"""What users do to a deployment while it is up must not bring it down."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnmill.backends.embedded import only_one, open_root_records
from turnmill.backends.embedded.locks import lock_path
from turnmill.config import to_dict
from turnmill.errors import Conflict, InvalidInput
from turnmill.ports import Write
from turnmill.records import Run, RunKind, RunStatus, StageRecord, cancel_key, encode
from turnmill.wiring.deployment import Deployment, Layers, News
from turnmill.wiring.reading.runs import began, look_at_run
from turnmill.wiring.running.control import Order, begin, check_order

ROW = '{"id": "a"}\n'
LAYERS = Layers(file=None, environ={}, flags={})


async def record_active(root: Path, pid: int | None, *stages: StageRecord) -> Run:
    """The run of an upload that the process `pid` has; one that is gone, where that is None."""
    resolved = LAYERS.resolve(None)
    run = Run(
        run_id="one",
        cause="cause",
        upload="a.jsonl",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config=to_dict(resolved.config),
        sources=resolved.sources,
        data_path=None,
        stages=stages,
        pid=pid or os.getpid(),
        pid_began=began(pid) if pid else 0,
    )
    records = open_root_records(root)
    await records.write([Write(key=run.key, value=encode(run), expected=0)])
    records.close()
    return run


async def test_a_configuration_that_is_spoiled_later_fails_the_upload_and_not_the_deployment(tmp_path: Path) -> None:
    root, file = tmp_path / "root", tmp_path / "all.toml"
    file.write_text("seed = 3\n")
    stop, told = asyncio.Event(), list[News]()

    def tell(news: News) -> None:
        told.append(news)
        stop.set()

    layers = Layers(file=file, environ={}, flags={})
    deployment = Deployment(root, layers, max_parallel_runs=1, tell=tell)

    def ready() -> None:
        file.write_text("seed = = 3\n")
        deployment.folder.mkdir(parents=True)
        (deployment.folder / "a.jsonl").write_text(ROW)

    async with asyncio.timeout(30):
        await deployment.up(stop, ready)
    (news,) = told
    assert news.run is not None and news.run.status is RunStatus.FAILED
    assert "all.toml:1" in str(news.run.error)


async def test_an_upload_that_can_not_be_copied_now_is_told_once_and_taken_later(tmp_path: Path) -> None:
    blocked = tmp_path / "runs"
    blocked.write_text("where a folder should be\n")
    stop, told = asyncio.Event(), list[str]()
    layers = Layers(file=None, environ={}, flags={})

    def tell(news: News) -> None:
        told.append(news.text)
        if news.run is not None:
            stop.set()
        elif news.text.startswith("upload b"):
            # An event makes it look again.
            (deployment.folder / "event.txt").write_text("")
        elif "event.txt" in news.text:
            blocked.unlink()
            (deployment.folder / "event.md").write_text("")

    deployment = Deployment(tmp_path, layers, max_parallel_runs=1, tell=tell)
    deployment.folder.mkdir(parents=True)
    for name in ("a", "b"):
        (deployment.folder / f"{name}.jsonl").write_text(ROW)
    async with asyncio.timeout(30):
        await deployment.up(stop, lambda: None)
    put_off = [text for text in told if "is tried again" in text]
    assert [text.partition(" can't")[0] for text in put_off] == ["upload a.jsonl", "upload b.jsonl"]
    assert any(text.startswith("upload a.jsonl: run ") and text.endswith(" queued") for text in told)


async def test_stopping_while_the_processes_of_an_earlier_start_end_leaves_the_run_for_the_next(tmp_path: Path) -> None:
    await record_active(tmp_path, None, StageRecord(name="ValidateData", state="done", started_at=1.0))
    stop, told = asyncio.Event(), list[str]()

    def tell(news: News) -> None:
        told.append(news.text)
        asyncio.get_running_loop().call_later(0.5, stop.set)

    with only_one(lock_path(tmp_path, "one", "trainer"), "an orphan"):
        async with asyncio.timeout(30):
            await Deployment(tmp_path, LAYERS, max_parallel_runs=1, tell=tell).up(stop, lambda: None)
    assert told == ["run one goes on: a.jsonl"]
    assert look_at_run(tmp_path, "one").status is RunStatus.INTERRUPTED


async def test_a_run_that_another_process_has_taken_up_is_not_begun(tmp_path: Path) -> None:
    await record_active(tmp_path, os.getppid())
    with pytest.raises(Conflict, match="it is active"):
        await begin(tmp_path, "one", cancel=asyncio.Event(), when_cancelled=RunStatus.QUEUED)
    assert look_at_run(tmp_path, "one").pid == os.getppid()


async def test_a_closed_pipe_ends_the_deployment_and_fails_no_run(tmp_path: Path) -> None:
    await record_active(tmp_path, None)
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turnmill", "up", "--json", "--root", str(tmp_path)),
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    try:
        async with asyncio.timeout(30):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 1 and b"Traceback" not in err, err
    assert look_at_run(tmp_path, "one").status is RunStatus.QUEUED, "stopped, so that the next one begins it"


@pytest.mark.parametrize("base_model", ["~nobody-of-this-name/model", "x" * 300])
def test_a_base_model_that_can_not_be_a_folder_is_refused_like_one_that_is_none(
    tmp_path: Path, base_model: str
) -> None:
    sidecar = tmp_path / "a.config.toml"
    sidecar.write_text(f'base_model = "{base_model}"\n')
    order = Order(kind=RunKind.TRAIN, resolved=LAYERS.resolve(sidecar), data=None, eval_data=None)
    with pytest.raises(InvalidInput, match="neither a shipped model"):
        check_order(tmp_path, order)


async def test_held_out_tasks_are_copied_with_their_upload_and_nothing_changes_under_the_run(tmp_path: Path) -> None:
    stop, runs = asyncio.Event(), dict[str, Run]()

    def tell(news: News) -> None:
        if news.run is not None:
            runs[str(news.run.upload)] = news.run
        if len(runs) == 2:
            stop.set()

    deployment = Deployment(tmp_path, LAYERS, max_parallel_runs=1, tell=tell)
    deployment.folder.mkdir(parents=True)
    held_out = deployment.folder / "a.eval.jsonl"
    held_out.write_text(2 * ROW)
    for name in ("a", "b"):
        (deployment.folder / f"{name}.jsonl").write_text(ROW)
    async with asyncio.timeout(30):
        await deployment.up(stop, lambda: None)
    held_out.write_text("something else\n")
    copy = tmp_path / "runs" / runs["a.jsonl"].run_id / "data" / "a.eval.jsonl"
    assert runs["a.jsonl"].eval_path == str(copy) and copy.read_text() == 2 * ROW
    assert runs["b.jsonl"].eval_path is None


async def test_records_that_can_not_be_read_for_a_moment_do_not_end_the_deployment(tmp_path: Path) -> None:
    blocked = tmp_path / "records" / "runs.db"
    blocked.mkdir(parents=True)
    stop, told = asyncio.Event(), list[str]()

    def tell(news: News) -> None:
        told.append(news.text)
        if "is tried again" in news.text:
            # An event makes it look again.
            blocked.rmdir()
            (deployment.folder / "b.jsonl").write_text(ROW)
        elif " begins" in news.text:
            stop.set()

    deployment = Deployment(tmp_path, LAYERS, max_parallel_runs=1, tell=tell)
    deployment.folder.mkdir(parents=True)

    def ready() -> None:
        (deployment.folder / "a.jsonl").write_text(ROW)

    async with asyncio.timeout(30):
        await deployment.up(stop, ready)
    assert any(" begins" in text for text in told), told


async def test_a_run_of_which_nobody_sent_word_gets_its_turn(tmp_path: Path) -> None:
    """`turnmill retry` was killed before it did, or `turnmill resume` before the run had ended."""
    stop, told = asyncio.Event(), list[str]()

    def tell(news: News) -> None:
        told.append(news.text)
        stop.set()

    def ready() -> None:
        # After the first look.
        asyncio.get_running_loop().call_later(
            0.3, lambda: left.append(asyncio.create_task(record_active(tmp_path, None)))
        )

    left: list[asyncio.Task[Run]] = []
    deployment = Deployment(tmp_path, LAYERS, max_parallel_runs=1, tell=tell, look_s=0.2)
    async with asyncio.timeout(30):
        await deployment.up(stop, ready)
    assert told[0] == "run one begins: a.jsonl"


async def test_a_run_whose_process_died_before_it_saw_that_it_is_cancelled_does_not_go_on(tmp_path: Path) -> None:
    await record_active(tmp_path, None, StageRecord(name="ValidateData", state="done", started_at=1.0))
    records = open_root_records(tmp_path)
    await records.write([Write(key=cancel_key("one"), value=b"{}", expected=None)])
    records.close()
    stop, told = asyncio.Event(), list[str]()

    def tell(news: News) -> None:
        told.append(news.text)
        if news.run is not None and news.run.status is RunStatus.CANCELLED:
            stop.set()

    async with asyncio.timeout(30):
        await Deployment(tmp_path, LAYERS, max_parallel_runs=1, tell=tell).up(stop, lambda: None)
    assert told[-1] == "run one cancelled" and look_at_run(tmp_path, "one").status is RunStatus.CANCELLED
