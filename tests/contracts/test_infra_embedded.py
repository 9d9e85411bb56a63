"""What an embedded run's infrastructure does beyond the contract: its places are written to before they are used."""

from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.errors import BackendUnavailable


async def test_a_place_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "weights").write_text("a file where a folder belongs")
    ports = open_run(tmp_path, "run", num_replicas=1)
    with pytest.raises(BackendUnavailable, match="weights"):
        await ports.infra.deploy()
    ports.close()


async def test_a_store_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run" / "records" / "samples.db").mkdir(parents=True)
    ports = open_run(tmp_path, "run", num_replicas=1)
    with pytest.raises(BackendUnavailable, match=r"samples\.db"):
        await ports.infra.deploy()
    ports.close()
