"""What a package needs is installed once, from wheels, and only what is missing."""

import asyncio
import base64
import hashlib
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rollout.boxes import boxed_worker, hostile_settings, make_package
from turnmill.environment.registry import FoundEnvironment, find
from turnmill.errors import InvalidInput
from turnmill.records import EnvironmentChoice
from turnmill.rollout.box.layers import missing, prepare_layer
from turnmill.rollout.box.order import Isolation

SOURCE = "def load_environment():\n    return None\n"


def wheel(folder: Path, name: str, version: str, *, requires: str = "", module: str = "value = 1\n") -> None:
    """A wheel of one module, as any builder would make it."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path) -> Iterator[Path]:
    """The only place where pip looks."""
    set_here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    (tmp_path / "wheels").mkdir()
    yield tmp_path / "wheels"
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def package(root: Path, project: str) -> FoundEnvironment:
    make_package(root, "my-env", source=SOURCE, pyproject=f'[project]\nname = "my-env"\nversion = "1"\n{project}\n')
    return find(EnvironmentChoice(env_id="my-env"), root=root)


@pytest.mark.parametrize(
    "project",
    ["", "dependencies = []", 'dependencies = ["msgspec", "pytest>=1", "pytest[dev]; python_version < \'3\'"]'],
)
def test_what_is_installed_here_needs_no_layer(tmp_path: Path, project: str) -> None:
    assert prepare_layer(package(tmp_path, project), tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("requirement", "is_missing"),
    [
        ("msgspec", False),
        ("msgspec>=999", True),
        ("no-such-package-here", True),
        ("no-such-package-here; python_version < '3'", False),
        ("click[no-such-extra]", False),
        ("MSGSPEC", False),
    ],
)
def test_only_what_is_not_met_is_missing(tmp_path: Path, requirement: str, is_missing: bool) -> None:
    found = package(tmp_path, f'dependencies = ["{requirement}"]')
    assert found.folder is not None
    assert bool(missing(found.folder)) is is_missing


@pytest.mark.parametrize(
    ("project", "text"),
    [
        ('dynamic = ["dependencies"]', "not dynamic"),
        ('dependencies = ["not a requirement !"]', "pyproject.toml"),
        ("dependencies = [1]", "pyproject.toml"),
        ('dependencies = ["x @ https://example.invalid/x.tar.gz"]', "by its address"),
        ('dependencies = ["x @ file:///tmp/x"]', "by its address"),
        ('requires-python = ">=99"', "requires-python"),
        ('requires-python = "what"', "pyproject.toml"),
    ],
)
def test_requirements_that_can_not_be_had_are_clear_errors(tmp_path: Path, project: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        prepare_layer(package(tmp_path, project), tmp_path / "cache")


def test_what_is_missing_is_installed_once_with_what_it_needs(tmp_path: Path, wheels: Path) -> None:
    wheel(wheels, "tm_first", "1.0", requires="tm_second")
    wheel(wheels, "tm_second", "2.0")
    found = package(tmp_path, 'dependencies = ["tm_first", "msgspec"]')

    layer = prepare_layer(found, tmp_path / "cache")
    assert layer is not None
    made_at = layer.stat().st_mtime_ns
    assert {path.name for path in layer.glob("*.py")} == {"tm_first.py", "tm_second.py"}
    assert not list(layer.glob("*.pth"))
    assert not list(layer.glob("msgspec*"))
    assert prepare_layer(found, tmp_path / "cache") == layer
    assert layer.stat().st_mtime_ns == made_at


def test_another_content_has_another_layer(tmp_path: Path, wheels: Path) -> None:
    wheel(wheels, "tm_first", "1.0")
    found = package(tmp_path, 'dependencies = ["tm_first"]')
    before = prepare_layer(found, tmp_path / "cache")
    assert found.folder is not None
    (found.folder / "more.py").write_text("")

    assert prepare_layer(found, tmp_path / "cache") != before


def test_nothing_is_built_from_source(tmp_path: Path, wheels: Path) -> None:
    source = wheels / "tm_source-1.0.zip"
    mark = tmp_path / "was-run"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("tm_source-1.0/setup.py", f"open({str(mark)!r}, 'w')\n")
    found = package(tmp_path, 'dependencies = ["tm_source"]')

    with pytest.raises(InvalidInput, match="wheels only"):
        prepare_layer(found, tmp_path / "cache")
    assert not mark.exists()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def build(root: str) -> None:
    layer = prepare_layer(find(EnvironmentChoice(env_id="my-env"), root=Path(root)), Path(root) / "cache")
    sys.exit(0 if layer is not None and (layer / "tm_first.py").exists() else 1)


def test_two_that_begin_at_once_and_one_that_is_killed_leave_one_whole_layer(tmp_path: Path, wheels: Path) -> None:
    wheel(wheels, "tm_first", "1.0")
    package(tmp_path, 'dependencies = ["tm_first"]')
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=build, args=(str(tmp_path),))
    killed.start()
    cache = tmp_path / "cache"
    give_up = time.monotonic() + 60
    while not list(cache.glob("*.new-*")) and time.monotonic() < give_up:
        time.sleep(0.005)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    others = [context.Process(target=build, args=(str(tmp_path),)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()

    assert [other.exitcode for other in others] == [0, 0]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_what_pip_says_about_a_requirement_is_told_on_one_line(tmp_path: Path, wheels: Path) -> None:
    found = package(tmp_path, 'dependencies = ["tm-nowhere>=3"]')

    with pytest.raises(InvalidInput, match=r"tm-nowhere>=3; pip says: .*No matching distribution") as raised:
        prepare_layer(found, tmp_path / "cache")
    assert "\n" not in str(raised.value)


NEEDY = """
from turnmill.environment.base import Environment, Outcome
from tm_first import value

class Needy(Environment):
    async def play(self, task, chat):
        return Outcome(reward=value / 2)

def load_environment():
    return Needy()
"""


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_what_was_installed_is_there_in_the_box(tmp_path: Path, wheels: Path, isolation: Isolation) -> None:
    wheel(wheels, "tm_first", "1.0")
    settings = hostile_settings(tmp_path / "root", isolation)
    project = '[project]\nname = "needy"\nversion = "1"\ndependencies = ["tm_first"]\n'
    make_package(tmp_path / "root", "needy", source=NEEDY, pyproject=project)
    found = find(EnvironmentChoice(env_id="needy"), root=tmp_path / "root")
    layer = await asyncio.to_thread(prepare_layer, found, tmp_path / "root" / "environments")

    async with boxed_worker(replace(settings, found=found, layer=layer)) as run:
        run.proxy.add("t_0")
        reports = await run.reports(1)

    assert reports["t_0"]["aggregate_reward_score"] == 0.5
