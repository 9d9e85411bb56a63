"""What a cold start of the functions costs: what they load, and how long that takes beside boto3, which Lambda has."""

import os
import statistics
import subprocess
import sys
from typing import Any

import pytest

from turnmill.backends.aws.package import DEPENDENCIES

HANDLERS = [f"turnmill.backends.aws.lambdas.{name}" for name in ("proxy", "rollout", "responses")]
# What Lambda's Python has, and what that loads.
_THERE = {"boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six", "urllib3"}
# Distributions whose modules have another name, or that are loaded only where they are there (certifi: by botocore).
_OPTIONAL = {"certifi", "sniffio", "trio", "sitecustomize"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_loads_what_is_packed_with_it_and_nothing_else(handler: str) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        f"import {handler}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    loaded = set(run(code).split()) - {"turnmill"} - _THERE - _OPTIONAL
    assert {name for name in loaded if not name.startswith("_")} <= set(DEPENDENCIES)


@pytest.mark.slow
@pytest.mark.parametrize("handler", HANDLERS)
def test_importing_a_handler_costs_less_than_a_second_beside_boto3(handler: str, record_property: Any) -> None:
    code = f"import time, boto3; began = time.process_time()\nimport {handler}\nprint(time.process_time() - began)"
    run(code)  # compiles what is not compiled yet
    seconds = statistics.median(float(run(code)) for _ in range(5))
    name = handler.rpartition(".")[2]
    record_property(
        "figure", f"importing {name} beside boto3: {seconds:.2f} s of processor time (load {os.getloadavg()[0]:.0f})"
    )
    assert seconds < 1.0
