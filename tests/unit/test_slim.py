"""Importing the core, the command line or the stages loads nothing heavy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import turnmill

HEAVY = ("torch", "transformers", "numpy", "safetensors", "vllm", "boto3", "verifiers", "openai", "httpx2")
MODULES = (
    "turnmill.cli.commands",
    "turnmill.config",
    "turnmill.intake.dataset",
    "turnmill.pipeline.stages",
    "turnmill.pipeline.engine",
    "turnmill.control_api.server",
    "turnmill.conversation.proxy",
    "turnmill.rollout.worker",
    "turnmill.backends.embedded",
)


# What serves the proxy where somebody else accepts the connections.
SERVERLESS = (
    "turnmill.conversation.foreign",
    "turnmill.conversation.proxy",
    "turnmill.conversation.responses",
    "turnmill.conversation.shared",
)
SERVERS = ("uvicorn", "starlette", "httptools", "click", "aiohttp", "sqlite3")


def loaded(module: str, unwanted: tuple[str, ...]) -> str:
    code = f"import sys, {module}; print(sorted(set({unwanted!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    assert loaded(module, HEAVY) == "[]"


@pytest.mark.parametrize("module", SERVERLESS)
def test_importing_it_loads_neither_anything_heavy_nor_a_server(module: str) -> None:
    assert loaded(module, HEAVY + SERVERS) == "[]"


def test_only_those_who_choose_a_backend_know_this_one_by_name() -> None:
    package = Path(turnmill.__file__).parent
    allowed = ("backends/aws/", "cli/", "config/", "wiring/")
    knowing = [
        name
        for path in package.rglob("*.py")
        if not (name := path.relative_to(package).as_posix()).startswith(allowed)
        and re.search(r"\b(aws|boto3|botocore|aiobotocore)\b", path.read_text(encoding="utf-8"))
    ]
    assert knowing == []
