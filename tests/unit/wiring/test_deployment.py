"""What users do to a deployment while it is up must not bring it down."""

import asyncio
from pathlib import Path

from turnmill.records import RunStatus
from turnmill.wiring.deployment import Deployment, Layers, News

ROW = '{"id": "a"}\n'


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
