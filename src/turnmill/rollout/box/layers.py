"""What a package needs beyond what is installed here: installed once for each content, beside the worker's packages.

    [project].dependencies -> those missing here -> none: no layer, no pip, no network
                                                   some -> pip, from wheels -> <cache>/<digest>-<python>/site-packages

Wheels only: what a package has to be built from would run its code here, outside of any box. A layer is made aside
under a lock and then renamed, so workers share it, two that begin at once make it once, and one that is killed
meanwhile leaves nothing that anybody takes for a layer.
"""

import fcntl
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from turnmill.environment.packaging import read_project
from turnmill.environment.registry import FoundEnvironment
from turnmill.errors import BackendUnavailable, InvalidInput
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)
SITE_PACKAGES = "site-packages"
_INSTALL_S = 900.0
_TAIL_LINES = 15
# Variables that pip may see: where packages come from, and how to get there.
_KEPT = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_KEPT_PREFIXES = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def prepare_layer(found: FoundEnvironment, cache: Path) -> Path | None:
    """The folder to add to the module path of the environment's process, or None where nothing is missing.

    Made in `cache` unless it is there. Takes long: call it in a thread. Raises `InvalidInput` for requirements that
    can't be read or had, `BackendUnavailable` where the disk or a process fails.
    """
    if found.folder is None:
        return None
    wanted = missing(found.folder)
    if not wanted:
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        layer = cache / f"{found.digest()[:32]}-{sys.implementation.cache_tag}"
        with _lock(layer.with_suffix(".lock")):
            if not layer.is_dir():
                _make(layer, wanted, found)
    except OSError as error:
        raise BackendUnavailable(f"the requirements of {found.choice.name} can't be installed: {error}") from error
    return layer / SITE_PACKAGES


def missing(folder: Path) -> list[str]:
    """Requirements of the package in `folder` that what is installed here does not meet. Raises `InvalidInput`."""
    project, place = read_project(folder), folder / "pyproject.toml"
    if "dependencies" in project.get("dynamic", ()):
        raise InvalidInput(
            f"{place}: dependencies must be a list there, not dynamic: they are read, and nothing is run"
        )
    try:
        pythons = SpecifierSet(project.get("requires-python", ""))
        requirements = [Requirement(text) for text in project.get("dependencies", [])]
    except (InvalidRequirement, InvalidSpecifier, TypeError) as error:
        raise InvalidInput(f"{place}: {error}") from error
    for requirement in requirements:
        if requirement.url is not None:
            raise InvalidInput(
                f"{place}: {requirement.name} is asked for by its address, and may have to be built: name a version"
            )
    version = ".".join(map(str, sys.version_info[:3]))
    if not pythons.contains(version, prereleases=True):
        raise InvalidInput(f"{place}: requires-python is {pythons}, and this is Python {version}")
    return [str(requirement) for requirement in requirements if not _is_met(requirement, frozenset())]


def _is_met(requirement: Requirement, seen: frozenset[str]) -> bool:
    """With what the extras ask for; requirements of installed packages are met otherwise, or they would not work."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return False
    if not requirement.extras or str(requirement) in seen:
        return True
    of_extras = [
        inner
        for inner in map(Requirement, distribution.requires or ())
        if inner.marker is not None and any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras)
    ]
    for inner in of_extras:
        inner.marker = None
    return all(_is_met(inner, seen | {str(requirement)}) for inner in of_extras)


def _make(layer: Path, wanted: list[str], found: FoundEnvironment) -> None:
    """The caller has the lock."""
    for left in layer.parent.glob(f"{layer.name}.new-*"):
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(prefix=f"{layer.name}.new-", dir=layer.parent))
    try:
        logger.info("installing what %s needs: %s", found.choice.name, ", ".join(wanted))
        environment = aside / "venv"
        venv.EnvBuilder(with_pip=False, symlinks=True).create(environment)
        target = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
        # pip is told what is there already, and that it lies outside of what it may change.
        base = target / "_installed_before.pth"
        base.write_text("".join(f"{path}\n" for path in _module_path()))
        _install(environment / "bin" / "python", wanted, found, aside)
        base.unlink()
        target.rename(aside / SITE_PACKAGES)
        shutil.rmtree(environment)
        _let_all_read(aside)
        aside.rename(layer)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _install(python: Path, wanted: list[str], found: FoundEnvironment, aside: Path) -> None:
    command = [str(python), "-I", "-m", "pip", "install", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-warn-script-location", *wanted]
    environ = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    } | {"TMPDIR": str(aside)}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(
            f"the requirements of {found.choice.name} were not installed within {_INSTALL_S:g} s: {', '.join(wanted)}"
        ) from error
    if done.returncode != 0:
        raise InvalidInput(
            f"the requirements of {found.choice.name} can't be installed (wheels only): {', '.join(wanted)}; "
            f"pip says: {redact(_said(done.stdout + done.stderr))}"
        )


def _said(output: str) -> str:
    """What went wrong in the output of pip, on one line; its last lines where it names no error."""
    lines = output.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "; ".join(errors or lines[-_TAIL_LINES:])


def _module_path() -> list[str]:
    """Folders of packages that this interpreter imports from, but not the standard library."""
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return [path for path in dict.fromkeys(sys.path) if os.path.isdir(path) and path not in names]


def _let_all_read(folder: Path) -> None:
    """Boxes have users of their own."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Waits until nobody else has it; the system takes it from one that dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
