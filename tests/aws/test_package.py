"""The zip of the Lambda functions: the same bytes for the same input, small, and enough to import what they need."""

import io
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import turnmill
from turnmill.backends.aws.package import DEPENDENCIES, CodePackage, pack
from turnmill.errors import BackendUnavailable

# Lambda takes so much of a zip with the request, which is how long its start may take.
SMALL = 5_000_000


@pytest.fixture(scope="module")
def complete() -> CodePackage:
    """With its dependencies; compiled ones have to be downloaded where Python or the machine is not Lambda's."""
    try:
        return pack()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def names_in(package: CodePackage) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(package.content)) as opened:
        assert opened.testzip() is None
        return opened.namelist()


def test_packing_again_gives_the_same_bytes_and_another_content_another_digest() -> None:
    first, second = pack(with_dependencies=False), pack(with_dependencies=False)
    assert first == second
    assert first.key == f"lambda/{first.digest}.zip"


def test_the_package_is_in_it_without_its_data() -> None:
    names = names_in(pack(with_dependencies=False))
    assert names == sorted(names)
    assert "turnmill/backends/aws/clients.py" in names
    assert all(name.startswith("turnmill/") and name.endswith(".py") for name in names)


def test_what_is_unpacked_can_be_imported_and_needs_no_data(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(pack(with_dependencies=False).content)) as opened:
        opened.extractall(tmp_path)
    code = "import turnmill.conversation.proxy, turnmill.backends.aws.clients; print(turnmill.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "turnmill" / "__init__.py"), done.stderr


def test_the_dependencies_are_those_of_the_platform_of_lambda_and_the_whole_is_small(complete: CodePackage) -> None:
    names = names_in(complete)
    tops = {name.partition("/")[0].removesuffix(".py") for name in names}
    assert tops >= {*DEPENDENCIES, "turnmill"}
    compiled = [name for name in names if name.endswith(".so")]
    assert any("msgspec" in name for name in compiled)
    assert all("cpython-312-x86_64-linux-gnu" in name or ".abi3." in name for name in compiled)
    assert len(complete.content) < SMALL
    assert complete.num_unpacked_bytes < 5 * SMALL
    assert not [name for name in names if "__pycache__" in name or "torch" in name or name.startswith("boto")]
    assert pack() == complete


def test_the_version_and_the_license_of_each_dependency_are_kept(complete: CodePackage) -> None:
    names = names_in(complete)
    described = {name.partition("-")[0] for name in names if name.endswith(".dist-info/METADATA")}
    assert described == set(DEPENDENCIES)
    for dependency in DEPENDENCIES:
        assert any(f"{dependency}-" in name and "LICENSE" in name.upper() for name in names), dependency


def test_what_a_handler_may_import_is_packed_or_in_lambdas_own_python(tmp_path: Path) -> None:
    # The SDK and what it needs; `-S` leaves out all that is installed here besides.
    in_lambda = ("boto3", "botocore", "jmespath", "python-dateutil", "s3transfer", "six", "urllib3")
    for name in (*DEPENDENCIES, *in_lambda):
        installed = distribution(name)
        for top in {path.parts[0] for path in installed.files or () if path.parts[0] not in ("..", "__pycache__")}:
            (tmp_path / top).symlink_to(str(installed.locate_file(top)))
    code = """
import importlib, pkgutil
import turnmill.backends.aws as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    # What else is there is for other machines.
    if module.name.endswith(".clients") or ".lambdas" in module.name:
        importlib.import_module(module.name)
        print(module.name)
"""
    environ = {"PYTHONPATH": f"{Path(turnmill.__file__).parent.parent}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "turnmill.backends.aws.clients" in done.stdout.split()
