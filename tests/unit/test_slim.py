"""Importing the core, the command line or the stages loads nothing heavy."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "[]"
