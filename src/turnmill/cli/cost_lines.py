"""How costs and forecasts look in a terminal: pure functions from records to text and tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from turnmill.cli import render
from turnmill.wiring.reading.costs import RunCost


def forecast_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What a run was expected to take, and on which assumptions; none where nobody asked."""
    if found is None:
        return []
    return [f"forecast: {_forecast(found)}", *(f"  {line}" for line in found["assumptions"])]


def cost_lines_in_short(cost: RunCost) -> list[str]:
    """What a run has used, and what was expected."""
    return [f"cost: {_figures(cost)}", *forecast_lines(cost.run.forecast)[:1]]


def cost_lines(cost: RunCost) -> list[str]:
    """All about the cost of one run."""
    stages = ", ".join(f"{name} {render.duration(hours * 3600)}" for name, hours in cost.stage_hours.items())
    purposes = ", ".join(f"{purpose} {count:,}" for purpose, count in cost.spent.tokens.items())
    limits = {name: value for name, value in cost.summary["budgets"].items() if value}
    return [
        f"run {cost.run.run_id} ({cost.run.status.value})",
        f"used: {_figures(cost)}",
        f"tokens: {purposes or 'none'}",
        f"stages: {stages or 'none'}",
        "budgets: " + ", ".join(f"{name} = {value:,.12g} ({_source(cost, name)})" for name, value in limits.items()),
        *forecast_lines(cost.run.forecast),
    ]


def costs_table(costs: Sequence[RunCost]) -> Table:
    """One row a run, and the total."""
    table = Table(box=SIMPLE, show_footer=True)
    total_s, total_tokens = sum(c.spent.run_s for c in costs), sum(c.spent.num_tokens for c in costs)
    table.add_column("run", "total", no_wrap=True)
    table.add_column("status", "")
    for name, footer in (
        ("time", render.duration(total_s)),
        ("tokens", f"{total_tokens:,}"),
        ("USD", f"{sum(c.spent.usd for c in costs):.2f}"),
        ("forecast USD", ""),
    ):
        table.add_column(name, footer, justify="right")
    for cost in costs:
        table.add_row(
            cost.run.run_id,
            cost.run.status.value,
            render.duration(cost.spent.run_s),
            f"{cost.spent.num_tokens:,}",
            f"{cost.spent.usd:.2f}",
            _range(cost.run.forecast["usd"], _dollars) if cost.run.forecast else "",
        )
    return table


def _source(cost: RunCost, name: str) -> str:
    return cost.run.sources.get(name, "default")


def _figures(cost: RunCost) -> str:
    spent = cost.spent
    return f"{render.duration(spent.run_s)}, {spent.num_tokens:,} generated tokens, {spent.usd:.2f} USD"


def _forecast(found: Mapping[str, Any]) -> str:
    time = _range(found["hours"], lambda hours: render.duration(hours * 3600))
    tokens = _range(found["tokens"], lambda count: f"{count:,.0f}")
    return f"{time}, {tokens} generated tokens, {_range(found['usd'], _dollars)} USD"


def _dollars(value: float) -> str:
    return f"{value:.2f}"


def _range(found: Mapping[str, Any], shown: Callable[[float], str]) -> str:
    """`likely (low to high)`, or what is known where nothing was measured."""
    low, high = shown(found["low"]), shown(found["high"])
    if low == high:
        return high
    if found["likely"] is None:
        return f"{low} to {high}" if found["low"] else f"at most {high}"
    return f"{shown(found['likely'])} ({low} to {high})"
