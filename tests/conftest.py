"""Figures that tests state with `record_property("figure", "what: so much")` are listed at the end."""

import pytest


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
