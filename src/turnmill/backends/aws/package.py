"""The code of the Lambda functions: this package and what its handlers import, as one zip in the deployment's bucket.

    modules of turnmill + wheels for Lambda's platform -> a zip, the same for the same input -> lambda/<digest>.zip

boto3 is not in it: Lambda's Python has it. Whatever else a handler imports is in `DEPENDENCIES`, in the versions that
are installed here; what is not compiled is taken from here, the rest is downloaded for Lambda's platform by pip.
"""

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import turnmill
from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.functions import ARCHITECTURE, RUNTIME, CodeLocation
from turnmill.errors import BackendUnavailable, InvalidInput

# What handlers import that is not in Lambda's Python, and what that needs in turn.
DEPENDENCIES = ("anyio", "httptools", "idna", "mangum", "msgspec", "tenacity", "typing_extensions")
# Of all that is in the zip, unpacked.
MAX_UNPACKED_BYTES = 250 * 1024 * 1024
_PYTHON = RUNTIME.removeprefix("python")
_PLATFORM = f"manylinux2014_{ARCHITECTURE}"
_COMPILED_TAG = f"cp{_PYTHON.replace('.', '')}"
_DOWNLOAD_S = 300.0
# The earliest time that a zip can say.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class CodePackage:
    """A packed zip."""

    # Of what it holds: another version of the compressor makes other bytes of it, and the same digest.
    digest: str
    content: bytes
    num_unpacked_bytes: int

    @property
    def key(self) -> str:
        """Where it is stored in a deployment's bucket."""
        return f"lambda/{self.digest}.zip"


def pack(*, with_dependencies: bool = True) -> CodePackage:
    """Pack the code; blocks. `with_dependencies`: else this package alone, where the others are there already.

    Raises `InvalidInput` for a package that is not installed, or a zip that is larger than Lambda takes, and
    `BackendUnavailable` where a wheel can't be had.
    """
    files = dict(_own_files())
    if with_dependencies:
        compiled: list[Distribution] = []
        for name in DEPENDENCIES:
            installed = _installed(name)
            if _fits_lambda(installed):
                files |= _files_of(installed)
            else:
                compiled.append(installed)
        files |= _downloaded(compiled)
    return _packed(files)


async def store(clients: AwsClients, bucket: str, package: CodePackage) -> CodeLocation:
    """Put the package into the bucket, unless it is there already."""
    try:
        await clients.call("s3", "head_object", Bucket=bucket, Key=package.key)
    except Refused as refused:
        if refused.code not in ("404", "NoSuchKey", "NotFound"):
            raise InvalidInput(f"the code of the Lambda functions can't be stored in {bucket}: {refused}") from refused
        await clients.call("s3", "put_object", Bucket=bucket, Key=package.key, Body=package.content)
    return CodeLocation(bucket=bucket, key=package.key)


def _own_files() -> Iterator[tuple[str, bytes]]:
    """The modules, without data: models and data sets are of no use to a handler."""
    folder = Path(turnmill.__file__).parent
    for path in folder.rglob("*.py"):
        yield f"turnmill/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise InvalidInput(f"the Lambda functions need {name}: pip install 'turnmill[aws]'") from error


def _fits_lambda(installed: Distribution) -> bool:
    """It has no compiled parts, or those of Lambda's Python and platform."""
    tags = [line.partition(": ")[2] for line in (installed.read_text("WHEEL") or "").splitlines() if "Tag: " in line]
    return any(
        tag.endswith("-none-any")
        or (tag.startswith(f"{_COMPILED_TAG}-") and tag.endswith(ARCHITECTURE) and "many" in tag)
        for tag in tags
    )


def _files_of(installed: Distribution) -> dict[str, bytes]:
    names = [PurePosixPath(path.as_posix()) for path in installed.files or ()]
    return {str(name): Path(str(installed.locate_file(str(name)))).read_bytes() for name in names if _is_wanted(name)}


def _is_wanted(name: PurePosixPath) -> bool:
    """Code, and of what describes the package its name, version and license."""
    if name.is_absolute() or ".." in name.parts or "__pycache__" in name.parts:
        return False
    if name.parts[0].endswith(".dist-info"):
        return name.name == "METADATA" or "licenses" in name.parts or name.name.startswith("LICENSE")
    return not name.parts[0].endswith(".data") and name.suffix in (".py", ".so")


def _downloaded(wanted: list[Distribution]) -> dict[str, bytes]:
    """Of the wheels of Lambda's platform, in the versions that are installed here."""
    if not wanted:
        return {}
    pins = [f"{each.metadata['Name']}=={each.version}" for each in wanted]
    with tempfile.TemporaryDirectory(prefix="turnmill-wheels-") as folder:
        where = ["--dest", folder, "--no-deps", "--only-binary=:all:"]
        whose = ["--platform", _PLATFORM, "--python-version", _PYTHON, "--implementation", "cp"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *where, *whose, *pins]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DOWNLOAD_S
            )
        except subprocess.TimeoutExpired as error:
            raise BackendUnavailable(f"pip did not get {', '.join(pins)} within {_DOWNLOAD_S:.0f} s") from error
        if done.returncode != 0:
            reason = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
            raise BackendUnavailable(
                f"pip can't get {', '.join(pins)} for Lambda (Python {_PYTHON}, {_PLATFORM}): {reason}; on Python "
                f"{_PYTHON} on Linux {ARCHITECTURE} nothing has to be downloaded"
            )
        files: dict[str, bytes] = {}
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                files |= {name: opened.read(name) for name in opened.namelist() if _is_wanted(PurePosixPath(name))}
        return files


def _packed(files: Mapping[str, bytes]) -> CodePackage:
    num_bytes = sum(map(len, files.values()))
    if num_bytes > MAX_UNPACKED_BYTES:
        raise InvalidInput(
            f"the code of the Lambda functions has {num_bytes} bytes, and Lambda takes {MAX_UNPACKED_BYTES} at most"
        )
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as opened:
        for name in sorted(files):
            for part in (name.encode(), files[name]):
                digest.update(b"%d:%b" % (len(part), part))
            entry = zipfile.ZipInfo(name, _NO_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # Readable for the user that Lambda runs as, whatever the mask of this process.
            entry.external_attr = (0o644 | 0o100000) << 16
            opened.writestr(entry, files[name])
    return CodePackage(digest=digest.hexdigest()[:32], content=buffer.getvalue(), num_unpacked_bytes=num_bytes)
