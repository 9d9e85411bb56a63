"""`make demo-aws`, as users run it."""

import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wordle_is_learned_through_aws_services_alone(record_property: Callable[[str, object], None]) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.aws.demo"], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(("ok ", "FAIL ")):
            record_property("figure", line)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
