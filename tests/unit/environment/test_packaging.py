"""Packages as archives: the same bytes everywhere, and attacks by archives that no `pack` has made."""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from turnmill.environment import packaging
from turnmill.environment.packaging import check_package, pack, unpack
from turnmill.errors import InvalidInput

PYPROJECT = '[project]\nname = "my-env"\nversion = "1.0"\n'
# What the package of `make_package` must be on every machine.
DIGEST = "f95a2f1099b8a0ae494e2dfe992a8ff4e7f4eac28bd4e6faddb702266be72d2c"
MODULE = "def load_environment():\n    return None\n"


def make_package(folder: Path, *, module: str = MODULE, pyproject: str = PYPROJECT) -> Path:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject)
    (folder / "my_env").mkdir()
    (folder / "my_env" / "__init__.py").write_text(module)
    (folder / "my_env" / "rows.jsonl").write_text('{"a": 1}\n')
    return folder


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


GOOD = [entry("my-env/pyproject.toml", PYPROJECT.encode()), entry("my-env/my_env.py", MODULE.encode())]


def archive_of(path: Path, entries: Sequence[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return path


# ---------------------------------------------------------------- pack


def test_an_archive_has_the_same_bytes_whenever_and_wherever_it_is_made(tmp_path: Path) -> None:
    first = make_package(tmp_path / "a" / "my-env")
    again = make_package(tmp_path / "b" / "my-env")
    for path in again.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700 if path.is_dir() else 0o600)
    for junk in (".git/config", ".venv/x.py", "my_env/__pycache__/a.pyc", "my_env.egg-info/PKG-INFO", "build/x"):
        (again / junk).parent.mkdir(parents=True, exist_ok=True)
        (again / junk).write_text("junk")

    packed = pack(first)

    assert pack(again) == packed
    assert hashlib.sha256(packed).hexdigest() == DIGEST


def test_an_archive_is_read_by_any_tar(tmp_path: Path) -> None:
    path = tmp_path / "my-env.tar.gz"
    path.write_bytes(pack(make_package(tmp_path / "my-env")))

    with tarfile.open(path, "r:gz") as archive:
        names = archive.getnames()
        owners = {(member.uid, member.gid, member.uname, member.mtime) for member in archive}

    assert names == ["my-env/my_env/__init__.py", "my-env/my_env/rows.jsonl", "my-env/pyproject.toml"]
    assert owners == {(0, 0, "", 0)}


def test_a_large_package_is_packed_whole(tmp_path: Path) -> None:
    folder = make_package(tmp_path / "my-env")
    content = os.urandom(300_000)
    (folder / "large.bin").write_bytes(content)
    (tmp_path / "a.tar.gz").write_bytes(pack(folder))

    assert (unpack(tmp_path / "a.tar.gz", tmp_path / "packages") / "large.bin").read_bytes() == content


def test_what_may_be_executed_stays_so(tmp_path: Path) -> None:
    folder = make_package(tmp_path / "my-env")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o4755)
    (tmp_path / "a.tar.gz").write_bytes(pack(folder))

    unpacked = unpack(tmp_path / "a.tar.gz", tmp_path / "packages")

    assert (unpacked / "tool.sh").stat().st_mode & 0o7777 == 0o755
    assert (unpacked / "pyproject.toml").stat().st_mode & 0o7777 == 0o644


def test_links_are_not_packed(tmp_path: Path) -> None:
    folder = make_package(tmp_path / "my-env")
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(InvalidInput, match="is a link"):
        pack(folder)


@pytest.mark.parametrize(
    "module",
    [
        "def load_environment(**kwargs): ...",
        "async def load_environment(): ...",
        "from elsewhere import load_environment",
        "from elsewhere import make as load_environment",
        "load_environment = print",
        "load_environment: object = print",
        "try:\n    from a import load_environment\nexcept ImportError:\n    def load_environment(): ...",
        "if True:\n    def load_environment(): ...",
    ],
)
def test_a_factory_is_found_however_it_is_defined(tmp_path: Path, module: str) -> None:
    check_package(make_package(tmp_path / "my-env", module=module), "my-env")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("# def load_environment", "has no load_environment"),
        ("'load_environment'", "has no load_environment"),
        ("def outer():\n    def load_environment(): ...", "has no load_environment"),
        ("def load_environment(:", "is no Python"),
    ],
)
def test_a_module_without_a_factory_is_refused(tmp_path: Path, module: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        pack(make_package(tmp_path / "my-env", module=module))


@pytest.mark.parametrize(
    ("pyproject", "text"),
    [
        ("", "no table"),
        ("[project", "can't be read"),
        ("[project]\nversion='1'", "needs a name"),
        ("project = 1", "no table"),
    ],
)
def test_a_pyproject_that_is_none_is_refused(tmp_path: Path, pyproject: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        pack(make_package(tmp_path / "my-env", pyproject=pyproject))


def test_a_folder_without_pyproject_is_no_package(tmp_path: Path) -> None:
    (make_package(tmp_path / "my-env") / "pyproject.toml").unlink()
    with pytest.raises(InvalidInput, match="has no pyproject"):
        pack(tmp_path / "my-env")


# ---------------------------------------------------------------- unpack


def test_what_was_packed_is_unpacked(tmp_path: Path) -> None:
    folder = make_package(tmp_path / "my-env")
    (tmp_path / "a.tar.gz").write_bytes(pack(folder))

    unpacked = unpack(tmp_path / "a.tar.gz", tmp_path / "packages")

    assert unpacked == tmp_path / "packages" / "my-env"
    assert pack(unpacked) == pack(folder)
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["my-env"]


def test_a_package_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", GOOD)
    unpack(archive, tmp_path / "packages")
    with pytest.raises(InvalidInput, match="is there already"):
        unpack(archive, tmp_path / "packages")


LINK: dict[str, Any] = {"type": tarfile.SYMTYPE, "linkname": "/etc"}
ATTACKS: list[tuple[tarfile.TarInfo, bytes]] = [
    entry("/etc/evil", b"x"),
    entry("../evil", b"x"),
    entry("my-env/../../evil", b"x"),
    entry("my-env/./evil", b"x"),
    entry("my-env//evil", b"x"),
    entry("my-env/a\\b", b"x"),
    entry("my-env/a\nb", b"x"),
    entry("my-env/a\x1b[31m", b"x"),
    entry("my-env/\u202egnp.py", b"x"),
    entry("other/evil", b"x"),
    entry("my-env", b"x"),
    entry("evil", b"x"),
    entry("my-env/link", **LINK),
    entry("my-env/hard", type=tarfile.LNKTYPE, linkname="my-env/my_env.py"),
    entry("my-env/device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    entry("my-env/disk", type=tarfile.BLKTYPE, devmajor=8),
    entry("my-env/pipe", type=tarfile.FIFOTYPE),
    entry("my-env/sparse", type=tarfile.GNUTYPE_SPARSE),
    entry("my-env/my_env.py", b"again"),
    entry("my-env/MY_ENV.py", b"other case"),
    entry("my-env/my_env.py/below", b"a file as a folder"),
    entry("MY-ENV/evil", b"x"),
    entry("/".join(["my-env", *["d"] * 40]), b"too deep"),
    entry("my-env/" + "n" * 256, b"x"),
    # What the digest of a package does not see, and Python would run.
    entry("my-env/__pycache__/my_env.cpython-311.pyc", b"x"),
    entry("my-env/.hidden", b"x"),
    entry("my-env/build/lib/my_env.py", b"x"),
    entry("my-env/other", b"x", pax_headers={"path": "../evil"}),
    entry("my-env/other", b"x", pax_headers={"path": "my-env/a\nb"}),
    entry("my-env/other", b"x", pax_headers={"size": "99999999999"}),
    entry("my-env/other", b"x", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    entry("my-env/e\u0301", b"x", pax_headers={"path": "my-env/\u00e9/../../evil"}),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: repr(attack[0].name)[:40])
def test_entries_that_a_package_does_not_have_are_refused(
    tmp_path: Path, attack: tuple[tarfile.TarInfo, bytes]
) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", [*GOOD, attack])
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(InvalidInput):
        unpack(archive, tmp_path / "packages")

    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [tmp_path / "packages"]
    assert not Path("/etc/evil").exists()


def test_a_link_and_then_a_file_through_it_is_refused_at_the_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = entry("my-env/way", type=tarfile.SYMTYPE, linkname=str(outside))
    with pytest.raises(InvalidInput, match="link or a device"):
        unpack(archive_of(tmp_path / "a.tar.gz", [*GOOD, link, entry("my-env/way/evil", b"x")]), tmp_path / "packages")
    assert list(outside.iterdir()) == []


def test_a_bomb_is_stopped_by_what_it_unpacks_to(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    bomb = entry("my-env/zeros", bytes(60 << 20))
    with pytest.raises(InvalidInput, match="unpacks to more"):
        unpack(archive_of(path, [bomb]), tmp_path / "packages")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_is_larger_than_any_name_is_not_read(tmp_path: Path, kind: bytes) -> None:
    path = archive_of(tmp_path / "a.tar.gz", GOOD)
    head = tarfile.TarInfo("my-env/header")
    head.size, head.type = 300 << 20, kind
    record = b"21 comment=0123456789\n".ljust(512, b"x") * 2048
    with gzip.open(tmp_path / "b.tar.gz", "wb", compresslevel=1) as file:
        file.write(head.tobuf(tarfile.USTAR_FORMAT))
        file.write(record)
        file.write(gzip.decompress(path.read_bytes()))
    with pytest.raises(InvalidInput, match="header that is larger"):
        unpack(tmp_path / "b.tar.gz", tmp_path / "packages")


def test_of_two_that_unpack_a_package_at_once_one_has_it(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.tar.gz", GOOD)

    def attempt(_: int) -> bool:
        try:
            unpack(path, tmp_path / "packages")
        except InvalidInput:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert [each.name for each in (tmp_path / "packages").iterdir()] == ["my-env"]


def test_a_bomb_behind_the_end_is_stopped_too(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(60):
            file.write(bytes(1 << 20))
    with pytest.raises(InvalidInput, match="unpacks to more"):
        unpack(path, tmp_path / "packages")


def test_a_second_archive_behind_the_first_is_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.tar.gz", GOOD)
    first = gzip.decompress(path.read_bytes())
    path.write_bytes(
        gzip.compress(first + gzip.decompress(archive_of(tmp_path / "b.tar.gz", ATTACKS[:1]).read_bytes()))
    )
    with pytest.raises(InvalidInput, match="behind its end"):
        unpack(path, tmp_path / "packages")


def test_sizes_that_an_archive_only_claims_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    info = tarfile.TarInfo("my-env/large")
    info.size = packaging.MAX_FILE_BYTES + 1
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf() + bytes(1024)))
    with pytest.raises(InvalidInput, match="too large"):
        unpack(path, tmp_path / "packages")


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    many = [entry(f"my-env/{number}") for number in range(packaging.MAX_FILES + 1)]
    with pytest.raises(InvalidInput, match="too large"):
        unpack(archive_of(tmp_path / "a.tar.gz", many), tmp_path / "packages")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_a_tail(data: bytes) -> bytes:
    return data + b"tail"


def changed(data: bytes) -> bytes:
    return data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]


@pytest.mark.parametrize(
    "spoil", [cut, with_a_tail, changed, lambda _: b"", lambda _: b"text", lambda _: gzip.compress(b"")]
)
def test_a_broken_archive_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(spoil(pack(make_package(tmp_path / "my-env"))))
    with pytest.raises(InvalidInput):
        unpack(path, tmp_path / "packages")
    assert list((tmp_path / "packages").iterdir()) == []


def test_an_archive_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be unpacked"):
        unpack(tmp_path / "nothing.tar.gz", tmp_path / "packages")


def test_an_archive_that_holds_no_package_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", [entry("my-env/readme", b"x")])
    with pytest.raises(InvalidInput, match="no package"):
        unpack(archive, tmp_path / "packages")
