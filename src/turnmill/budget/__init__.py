"""What a run costs: prices, a forecast before it starts, what it has used, and the limits at which it stops.

    parameters, earlier runs, prices -> Forecast -> refused, or the run starts
    token counters, clock            -> Spent    -> beyond a limit: BudgetExceeded

Pure figures and the records that they come from; who looks when is decided above.
"""

from turnmill.budget.allowance import Allowance
from turnmill.budget.ceilings import PARAMETERS, raised, within_ceilings
from turnmill.budget.forecast import Forecast, Pace, Range, forecast, num_evaluated, pace_of, problems_of
from turnmill.budget.meter import Breach, Meter, spent_by, usd_per_hour_of, used_up
from turnmill.budget.prices import LOCAL, Prices, Rate, check_price, load_prices, rate_of
from turnmill.budget.spending import Spent, clocks, num_tokens, run_seconds, stage_hours, usd_of

__all__ = [
    "LOCAL",
    "PARAMETERS",
    "Allowance",
    "Breach",
    "Forecast",
    "Meter",
    "Pace",
    "Prices",
    "Range",
    "Rate",
    "Spent",
    "check_price",
    "clocks",
    "forecast",
    "load_prices",
    "num_evaluated",
    "num_tokens",
    "pace_of",
    "problems_of",
    "raised",
    "rate_of",
    "run_seconds",
    "spent_by",
    "stage_hours",
    "usd_of",
    "usd_per_hour_of",
    "used_up",
    "within_ceilings",
]
