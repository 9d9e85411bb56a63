"""An environment's package as one file: made the same everywhere, and unpacked only where nothing about it is odd.

    folder -> check_package -> pack -> .tar.gz -> unpack -> entries checked -> folder aside -> check_package -> rename

The archive has one folder at its top, which bears the id of the environment. It is compressed by nobody: what deflate
makes of the same bytes differs between its implementations, and the digest of a package must not.
"""

import ast
import io
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import tomllib
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from turnmill.environment.registry import files_of, is_left_by_tools, module_of, source_of
from turnmill.errors import InvalidInput, printable

# What a package may hold, and with it what is unpacked of one that says more of itself.
MAX_FILES, MAX_FILE_BYTES, MAX_BYTES = 10_000, 128 << 20, 512 << 20
# Of an entry's name; of its parts.
_MAX_NAME, _MAX_PARTS = 255, 32
# Of an archive that has no more than its headers in it.
_MAX_RATIO, _RATIO_FROM_BYTES = 200, 16 << 20
_ENV_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FACTORY = "load_environment"
_PIECE = 1 << 16
# A package that makes room for another one, until it is removed; no id of an environment.
_REPLACED = ".replaced"
# A header with a long name has some hundred bytes.
_MOST_AT_ONCE = 1 << 18
# gzip: deflate, no flags, no time, no hint, "unknown" system.
_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_STORED = 0xFFFF


def check_package(folder: Path, env_id: str) -> None:
    """Raises `InvalidInput` unless `folder` holds the package of environment `env_id`; runs none of its code."""
    if not _ENV_ID.fullmatch(env_id):
        raise InvalidInput(f"{folder}: {env_id!r} is no id of an environment: letters, digits, - and _")
    project = read_project(folder)
    if not isinstance(project.get("name"), str):
        raise InvalidInput(f"{folder}/pyproject.toml: [project] needs a name")
    source = source_of(env_id, folder)
    if source is None:
        module = module_of(env_id)
        raise InvalidInput(
            f"{folder} has no module {module}: write {module}/__init__.py or {module}.py with the function {_FACTORY}"
        )
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"{source} is no Python: {error}") from error
    if not any(_FACTORY in _names_of(node) for node in tree.body):
        raise InvalidInput(f"{source} has no {_FACTORY}: define it, or import it there, at the top level of the module")


def read_project(folder: Path) -> dict[str, Any]:
    """The table [project] of a package. Raises `InvalidInput` where there is none."""
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project")
    except FileNotFoundError as error:
        raise InvalidInput(f"{folder} is no package: it has no pyproject.toml") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} can't be read: {error}") from error
    if not isinstance(project, dict):
        raise InvalidInput(f"{path} has no table [project]")
    return project


def _names_of(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines, also below conditions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return set().union(*(_names_of(child) for child in inner if isinstance(child, ast.stmt)))


# ---------------------------------------------------------------- packing


def pack(folder: Path, env_id: str | None = None) -> bytes:
    """The archive of a package; the same bytes for the same files, wherever and whenever it is made.

    `env_id` is the folder's name unless it is given. Raises `InvalidInput` for what `unpack` would refuse.
    """
    env_id = env_id or folder.absolute().name
    check_package(folder, env_id)
    entries = _Entries()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in files_of(folder):
            _refuse_links(folder, path)
            name = "/".join((env_id, *path.relative_to(folder).parts))
            data = path.read_bytes()
            entries.add(name, len(data), is_folder=False)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            # Owner, group and time are 0 as they are made.
            info.mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            archive.addfile(info, io.BytesIO(data))
    return _gzip_stored(content.getvalue())


def _refuse_links(folder: Path, path: Path) -> None:
    while path != folder:
        if path.is_symlink():
            raise InvalidInput(f"{path} is a link: a package holds files only; put a copy in its place")
        path = path.parent


def _gzip_stored(data: bytes) -> bytes:
    parts = [_GZIP_HEAD]
    for start in range(0, max(1, len(data)), _STORED):
        block = data[start : start + _STORED]
        is_last = start + _STORED >= len(data)
        parts += [struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF), block]
    return b"".join([*parts, struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)])


# ---------------------------------------------------------------- unpacking


def unpack(archive: Path, packages: Path, *, replace: bool = False) -> Path:
    """Unpack the archive of a package as a new folder in `packages`; it appears as a whole, or not at all.

    Raises `InvalidInput` for an archive that is none, or holds anything but files and folders of one package within
    the limits, and where a package of that id is there already, unless it is to be replaced.
    """
    packages.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=packages))
    try:
        env_id = _extract(archive, aside)
        check_package(aside / env_id, env_id)
        target = packages / env_id
        is_there = target.exists() or target.is_symlink()
        if is_there and not replace:
            raise InvalidInput(f"{target} is there already: replace it (--force), or rename the package")
        if is_there:
            target.rename(aside / _REPLACED)
        try:
            (aside / env_id).rename(target)
        except BaseException as error:
            if is_there:
                (aside / _REPLACED).rename(target)
            if isinstance(error, OSError):
                # Made by somebody else meanwhile.
                raise InvalidInput(f"{target} can't be made: {error}") from error
            raise
        return target
    finally:
        shutil.rmtree(aside)


def _extract(path: Path, aside: Path) -> str:
    entries = _Entries()
    try:
        with path.open("rb") as packed, tempfile.TemporaryFile(dir=aside) as content:
            for piece in _uncompressed(packed, MAX_BYTES + MAX_FILES * 2048):
                content.write(piece)
            content.seek(0)
            with tarfile.open(fileobj=cast(IO[bytes], _InPieces(content)), mode="r:", errors="strict") as archive:
                for member in archive:
                    _extract_member(archive, member, entries, aside)
                content.seek(archive.offset)
            # A second archive behind the first one would be read by some programs and not by others.
            if any(rest.strip(b"\0") for rest in iter(lambda: content.read(_PIECE), b"")):
                raise InvalidInput("the archive has something behind its end")
    except OSError as error:
        raise InvalidInput(f"{path} can't be unpacked: {error}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path} is refused: {error}") from error
    except (tarfile.TarError, zlib.error, EOFError, UnicodeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{path} is no archive of a package (.tar.gz): {error}") from error
    if entries.top is None:
        raise InvalidInput(f"{path} is empty")
    return entries.top


class _InPieces:
    """A file that gives nothing large at once: headers are read as a whole, and could be as large as the archive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MOST_AT_ONCE:
            raise InvalidInput("the archive has a header that is larger than any name")
        return self._file.read(size)


def _extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, entries: "_Entries", aside: Path) -> None:
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise InvalidInput(f"{printable(member.name)} is a link or a device: a package holds files and folders only")
    entries.add(member.name, member.size, is_folder=member.isdir())
    target = aside / PurePosixPath(member.name)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        shutil.copyfileobj(source, file, _PIECE)


class _Entries:
    """Names and sizes of an archive so far; refuses what does not fit to them."""

    def __init__(self) -> None:
        # Name, and whether it is a folder's, by what a file system may take it for.
        self._seen: dict[str, tuple[str, bool]] = {}
        self._num_bytes = 0
        self.top: str | None = None

    def add(self, name: str, size: int, *, is_folder: bool) -> None:
        """Raises `InvalidInput`."""
        parts = name.rstrip("/").split("/") if is_folder else name.split("/")
        shown = printable(name)
        if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise InvalidInput(f"{shown} is no name for a file of a package: it leads elsewhere, or can't be printed")
        if len(parts) > _MAX_PARTS or any(len(part.encode()) > _MAX_NAME for part in parts):
            raise InvalidInput(f"{shown}: the name is too long or too deep")
        if not _ENV_ID.fullmatch(parts[0]) or self.top not in (None, parts[0]) or (len(parts) == 1 and not is_folder):
            raise InvalidInput(f"{shown} lies outside of the one folder that an archive has at its top")
        if is_left_by_tools(parts[1:]):
            raise InvalidInput(f"{shown} is what tools leave behind, or hidden, and no part of a package: leave it out")
        self.top = parts[0]
        for depth in range(1, len(parts)):
            self._note(parts[:depth], is_folder=True, shown=shown)
        self._note(parts, is_folder=is_folder, shown=shown)
        self._num_bytes += size
        if len(self._seen) > MAX_FILES or size > MAX_FILE_BYTES or self._num_bytes > MAX_BYTES:
            raise InvalidInput(
                f"the package is too large at {shown}: at most {MAX_FILES} files and folders, {MAX_FILE_BYTES >> 20} "
                f"MiB a file, {MAX_BYTES >> 20} MiB together"
            )

    def _note(self, parts: list[str], *, is_folder: bool, shown: str) -> None:
        name = "/".join(parts)
        key = unicodedata.normalize("NFC", name.casefold())
        is_new = key not in self._seen
        first, was_folder = self._seen.setdefault(key, (name, is_folder))
        if first != name:
            raise InvalidInput(f"{shown} differs from {printable(first)} in its case or form only")
        # Folders are named again and again, by what lies in them.
        if not is_new and not (was_folder and is_folder):
            raise InvalidInput(f"{shown} is in the package twice")


def _uncompressed(packed: IO[bytes], limit: int) -> Iterator[bytes]:
    """The bytes of a gzip file, which may not become more than `limit`, nor all too many from few."""
    inflater = zlib.decompressobj(wbits=31)
    num_in = num_out = 0
    data = b""
    while not inflater.eof:
        data = data or packed.read(_PIECE)
        num_in += len(data) - len(inflater.unconsumed_tail)
        piece = inflater.decompress(data, _PIECE)
        if not (data or piece or inflater.eof):
            raise EOFError("it ends too early")
        data = inflater.unconsumed_tail
        num_out += len(piece)
        if num_out > limit or (num_out > _RATIO_FROM_BYTES and num_out > _MAX_RATIO * num_in):
            raise InvalidInput(f"the archive unpacks to more than a package may have: {num_out} bytes so far")
        if piece:
            yield piece
    if inflater.unused_data or packed.read(1):
        raise InvalidInput("the archive has something behind its end")
