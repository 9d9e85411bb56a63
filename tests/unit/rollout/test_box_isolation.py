"""What a machine can close a box with, and what a box is given."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rollout.boxes import hostile_settings, python_for
from turnmill.errors import InvalidInput
from turnmill.rollout.box.isolation import choose, order_of, places_of, seen_from_outside, uids
from turnmill.rollout.box.log import BoxLog, without_time
from turnmill.rollout.box.order import HOME, LAYER, PACKAGE, Isolation, Limits, Order
from turnmill.rollout.box.usage import Usage
from turnmill.rollout.box.view import bwrap_command, layout
from turnmill.rollout.box.warden import Refused, claim_uid
from turnmill.wiring.reading.logs import MergedLogs

CHOOSE = """
import sys
from turnmill.errors import InvalidInput
from turnmill.rollout.box.isolation import choose
try:
    print(choose(is_unsafe_allowed=sys.argv[1] == "unsafe"))
except InvalidInput as error:
    print("refused:", error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("argument", "begin"), [("safe", "refused: environment packages run in a box"), ("unsafe", "none")]
)
def test_where_nothing_closes_a_box_packages_need_the_user_s_word(argument: str, begin: str) -> None:
    python = python_for(Isolation.UID)
    done = subprocess.run(
        [python, "-c", f"import sys; sys.path += {sys.path!r}\n{CHOOSE}", argument],
        user=65534,
        group=65534,
        extra_groups=[],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(begin), done.stdout + done.stderr
    assert ("--unsafe-env" in done.stdout) is (argument == "safe")


def test_an_interpreter_that_is_not_there_is_no_isolation() -> None:
    with pytest.raises((InvalidInput, FileNotFoundError)):
        choose(is_unsafe_allowed=False, python="/no/such/python")


def test_a_box_gets_none_of_the_worker_s_variables(tmp_path: Path) -> None:
    settings = replace(hostile_settings(tmp_path / "root", Isolation.NONE), environ={"MINE": "1"})
    order = order_of(settings, places_of(settings, tmp_path), base=tmp_path, control_fd=9)

    assert set(order.environ) <= {
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "LC_ALL",
        "TZ",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MINE",
    }
    assert Order.from_line(order.to_line()) == order


def test_what_a_box_says_of_its_own_file_tree_is_said_with_the_paths_of_the_machine(tmp_path: Path) -> None:
    settings = replace(hostile_settings(tmp_path / "root", Isolation.NONE), layer=tmp_path / "layer")
    text = f"KeyError ({PACKAGE}/agent.py:3 in play), called at {LAYER}/tool.py:7"
    inside = replace(settings, isolation=Isolation.NAMESPACES)

    assert seen_from_outside(text, inside) == (
        f"KeyError ({settings.found.folder}/agent.py:3 in play), called at {tmp_path}/layer/tool.py:7"
    )
    assert seen_from_outside(text, settings) == text


def test_a_view_has_the_package_and_covers_what_is_hidden_inside_of_what_is_shown() -> None:
    order = Order(
        isolation=Isolation.BWRAP,
        argv=["/usr/bin/true"],
        environ={},
        home=HOME,
        read_only=[
            ("/usr", "/usr"),
            ("/srv/app", "/srv/app"),
            ("/srv/app/root/.venv", "/srv/app/root/.venv"),
            ("/p", PACKAGE),
        ],
        hidden=["/srv/app/root", "/elsewhere"],
        limits=Limits(temp_mb=7),
        control_fd=3,
        bwrap="/usr/bin/bwrap",
    )

    assert layout(order) == [
        ("/usr", "/usr"),
        ("/srv/app", "/srv/app"),
        ("/p", PACKAGE),
        (None, "/srv/app/root"),
        ("/srv/app/root/.venv", "/srv/app/root/.venv"),
    ]
    command = bwrap_command(order)
    assert command[:2] == ["/usr/bin/bwrap", "--unshare-all"]
    assert "--share-net" not in command
    assert "--share-net" in bwrap_command(replace(order, has_network=True))
    assert str(7 << 20) in command


@pytest.mark.parametrize(
    ("uid_map", "first"),
    [
        ("0 0 4294967295\n", 0x7FFF0000 - 256),
        ("0 100000 65536\n", 65536 - 4096 - 256),
        ("0 1000 1\n1 100000 65536\n", 61185),
    ],
)
def test_uids_are_those_that_nobody_has(tmp_path: Path, uid_map: str, first: int) -> None:
    (tmp_path / "uid_map").write_text(uid_map)
    assert uids(tmp_path / "uid_map") == (first, 256)


def test_a_uid_belongs_to_one_box_while_that_lives() -> None:
    first, second = claim_uid(2_000_000_000, 3), claim_uid(2_000_000_000, 3)
    assert {first[0], second[0]} == {2_000_000_001, 2_000_000_002}
    with pytest.raises(Refused, match="are taken"):
        claim_uid(2_000_000_000, 3)
    first[1].close()
    third = claim_uid(2_000_000_000, 3)
    assert third[0] == first[0]
    second[1].close()
    third[1].close()


def test_a_log_keeps_what_is_usual_and_counts_what_is_not(tmp_path: Path) -> None:
    log = BoxLog(tmp_path / "logs" / "environment.log")
    log.write(b"one\ntwo\n")
    for _ in range(200):
        log.write(b"x" * 65536)
    assert log.tail.startswith("one\ntwo")
    assert log.num_bytes == 8 + 200 * 65536
    assert log.num_cut > 0
    assert (tmp_path / "logs" / "environment.log").stat().st_size < 2 << 20


def test_a_line_of_a_log_has_one_time_however_it_comes(tmp_path: Path) -> None:
    log = BoxLog(tmp_path / "environment.log")
    for part in (b"on", b"e\n", b"two\nthree\n", b"fo", b"ur"):
        log.write(part)
    merged = MergedLogs(tmp_path, ())
    lines = [record.lines for record in merged.read(to_the_end=True)]
    merged.close()
    assert lines == [("one",), ("two",), ("three",), ("four",)]
    assert log.tail.endswith("ur")
    kept = (tmp_path / "environment.log").read_text().splitlines()
    assert [without_time(line) for line in [*kept, "another"]] == ["one", "two", "three", "four", "another"]


def test_breaches_are_told_in_words() -> None:
    limits = Limits(memory_mb=1, num_processes=2, temp_mb=1)
    assert Usage(memory_bytes=1 << 20, num_processes=2, temp_bytes=None).breach_of(limits) is None
    assert "2 MiB of memory" in str(Usage(memory_bytes=2 << 20, num_processes=1, temp_bytes=0).breach_of(limits))
    assert "3 processes" in str(Usage(memory_bytes=0, num_processes=3, temp_bytes=0).breach_of(limits))
    assert "files" in str(Usage(memory_bytes=0, num_processes=1, temp_bytes=2 << 20).breach_of(limits))


async def test_a_package_that_its_box_could_not_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.NAMESPACES)
    assert settings.found.folder is not None
    (settings.found.folder / "hostile_env.py").chmod(0o600)
    with pytest.raises(InvalidInput, match=r"chmod -R a\+rX"):
        places_of(settings, None)
