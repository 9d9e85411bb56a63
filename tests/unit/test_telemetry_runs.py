"""The log of one run, in a process that serves several."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnmill.errors import BackendUnavailable
from turnmill.telemetry import also_logged


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("turnmill.of_a_test")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield logger
    logger.setLevel(level)


def test_what_is_logged_about_a_run_goes_to_its_own_log_too(tmp_path: Path, logger: logging.Logger) -> None:
    paths = {run_id: tmp_path / run_id / "logs" / "control.log" for run_id in ("r1", "r10")}
    with also_logged(paths["r1"], "control", "r1"), also_logged(paths["r10"], "control", "r10"):
        logger.info("of the first", extra={"at": "r1"})
        logger.info("of a sample", extra={"at": "samples/r10/train/t_0"})
        logger.info("of nobody")
    logger.info("too late", extra={"at": "r1"})
    (first,) = paths["r1"].read_text().splitlines()
    assert first.endswith("control INFO turnmill.of_a_test: of the first [r1]")
    (other,) = paths["r10"].read_text().splitlines()
    assert "of a sample" in other


def test_a_log_that_can_not_be_opened_is_a_failure_that_may_pass(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder belongs")
    with (
        pytest.raises(BackendUnavailable, match=r"control\.log can't be opened"),
        also_logged(tmp_path / "logs" / "control.log", "control", "r1"),
    ):
        raise AssertionError


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
def test_a_log_on_a_full_disk_is_told_once_and_fails_nothing(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with also_logged(Path("/dev/full"), "control", "r1"):
        for _ in range(3):
            logger.info("a line", extra={"at": "r1"})
    assert capsys.readouterr().err == "warning: /dev/full can't be written now: No space left on device\n"
    assert "the end of /dev/full is lost: No space left on device" in caplog.text
