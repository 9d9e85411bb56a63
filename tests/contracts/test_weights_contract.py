"""What every weight store keeps."""

from collections.abc import Callable
from pathlib import Path

import pytest

from turnmill.errors import InvalidInput, NotFound, VersionConflict
from turnmill.ports import WeightStore
from turnmill.records import Version, WeightVersion

ONE, TWO, THREE = (Version(incarnation=1, n=n) for n in (1, 2, 3))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "deep" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def weights(open_weights: Callable[[], WeightStore]) -> WeightStore:
    return open_weights()


def content(published: WeightVersion, name: str) -> bytes:
    return Path(published.location, name).read_bytes()


async def test_published_weights_are_there_and_not_current(weights: WeightStore, source: Path) -> None:
    assert await weights.current() is None
    published = await weights.publish(ONE, source, "d1")
    assert (published.version, published.digest) == (ONE, "d1")
    assert content(published, "model.safetensors") == b"weights"
    assert content(published, "deep/config.json") == b"{}"
    assert await weights.get(ONE) == published
    assert await weights.current() is None


async def test_a_version_never_changes(weights: WeightStore, source: Path) -> None:
    published = await weights.publish(ONE, source, "d1")
    (source / "model.safetensors").write_bytes(b"others")
    assert await weights.publish(ONE, source, "d1") == published
    with pytest.raises(VersionConflict, match=r"1\.1.*d1.*d2"):
        await weights.publish(ONE, source, "d2")
    assert content(published, "model.safetensors") == b"weights"


async def test_the_pointer_moves_for_every_opener(open_weights: Callable[[], WeightStore], source: Path) -> None:
    trainer, replica = open_weights(), open_weights()
    for version in (ONE, TWO, ONE):
        await trainer.publish(version, source, f"d{version}")
        await trainer.point(version)
        assert await replica.current() == await trainer.current() == await trainer.get(version)


async def test_what_was_never_published_can_be_neither_got_nor_pointed_to(weights: WeightStore, source: Path) -> None:
    with pytest.raises(NotFound, match=r"1\.2"):
        await weights.get(TWO)
    with pytest.raises(NotFound, match=r"1\.2"):
        await weights.point(TWO)
    assert await weights.current() is None


async def test_a_folder_without_weights_is_refused(weights: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model\.safetensors"):
        await weights.publish(ONE, tmp_path / "nowhere", "d1")
    with pytest.raises(NotFound):
        await weights.get(ONE)


async def test_a_prune_keeps_what_was_named_and_the_current(weights: WeightStore, source: Path) -> None:
    await weights.prune([])
    for version in (ONE, TWO, THREE):
        await weights.publish(version, source, "d")
    await weights.point(ONE)
    await weights.prune([THREE])
    assert (await weights.get(ONE)).version == ONE
    assert (await weights.get(THREE)).version == THREE
    with pytest.raises(NotFound):
        await weights.get(TWO)
    await weights.publish(TWO, source, "again")
    assert (await weights.get(TWO)).digest == "again"
