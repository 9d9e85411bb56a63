"""Figures that tests state with `record_property("figure", "what: so much")` are listed at the end."""

import os
from collections.abc import Iterator

import pytest

from tests.aws.emulator import Emulator, running_emulator


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Properties of tests come here from all processes of xdist."""
    figures = [
        (report.nodeid, value)
        for reports in (terminalreporter.getreports("passed"), terminalreporter.getreports("failed"))
        for report in reports
        for name, value in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        for test, figure in sorted(set(figures)):
            terminalreporter.line(f"{test.rpartition('::')[2]}: {figure}")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator of AWS services that this process of the test run shares; the environment names it meanwhile."""
    with running_emulator(tmp_path_factory.mktemp("emulator")) as running:
        before = {name: os.environ.get(name) for name in running.environ}
        os.environ.update(running.environ)
        try:
            yield running
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
