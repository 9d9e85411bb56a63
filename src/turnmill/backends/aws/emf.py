"""Metrics in CloudWatch's embedded metric format: one JSON document a step, out of which CloudWatch makes metrics.

    {"_aws": {"Timestamp": <ms>, "CloudWatchMetrics": [{"Namespace": "Turnmill", "Dimensions": [["run"]],
              "Metrics": [{"Name": "reward_mean", "Unit": "None"}, ...]}]},
     "run": "...", "step": 12, "incarnation": 1, "reward_mean": 0.43, ..., "train_s": 3.1}

Every value of the step is a member of the document, where Logs Insights finds it. Only `NAMES` are metrics: each of
them is billed as a custom metric for each run, by the hour in which it has data (0.30 USD a month in us-east-1 for the
first ten thousand, so 6 names cost 1.80 USD for a month of training and 0.06 USD for a day). `run` is the only
dimension for the same reason: each further set of dimensions is another 6.

Specification: "Embedded metric format" in the CloudWatch user guide. At most 100 metrics a directive and 30 dimensions
a set; a name has 1 to 1024 characters; a value is a number or an array of at most 100.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnmill.errors import InvalidInput, RecordCorrupt
from turnmill.records import Metric

NAMESPACE = "Turnmill"
RUN = "run"
# The mean reward of all valid rollouts of the step: the name under which alarms and dashboards know it.
REWARD_MEAN = "reward_mean"
# Values that are metrics, with their units.
NAMES = {
    REWARD_MEAN: "None",
    "solved": "None",
    "num_generated": "Count",
    "invalid_share": "None",
    "dropped_share": "None",
    "tokens_per_s": "Count/Second",
}
# Members of the document that are no values of the metric.
_OWN = ("_aws", RUN, "step", "incarnation")
_MOST_METRICS, _MOST_DIMENSIONS, _MOST_VALUES = 100, 30, 100
# Characters of the value of a dimension.
_MOST_DIMENSION = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value that CloudWatch reads out of a document."""

    namespace: str
    name: str
    unit: str
    value: float
    dimensions: Mapping[str, str]
    # Unix seconds.
    time: float
    # Members of the document that are neither metrics nor dimensions.
    properties: Mapping[str, Any]


def line_of(metric: Metric) -> bytes:
    """The document; raises `InvalidInput` for a value that is no finite number, or has the name of another member."""
    for name, value in metric.values.items():
        if not math.isfinite(value):
            raise InvalidInput(f"metric {name!r} of step {metric.step} is {value}, not a finite number")
        if name in _OWN:
            raise InvalidInput(f"metric {name!r} of step {metric.step}: {', '.join(_OWN)} are no names of metrics")
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [[RUN]],
        "Metrics": [{"Name": name, "Unit": unit} for name, unit in NAMES.items() if name in metric.values],
    }
    document = {
        # Without a metric there is nothing to extract; the document is a line for people then.
        "_aws": {
            "Timestamp": int(metric.time * 1000),
            "CloudWatchMetrics": [directive] if directive["Metrics"] else [],
        },
        RUN: _dimension(metric.run_id),
        "step": metric.step,
        "incarnation": metric.incarnation,
        **metric.values,
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _dimension(text: str) -> str:
    """`text` as CloudWatch takes it: printable ASCII, not empty."""
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)[:_MOST_DIMENSION]
    return plain if plain.strip() else "-"


def points_of(line: str) -> list[Point]:
    """What CloudWatch reads out of a log line; raises `RecordCorrupt` where it would read nothing."""
    try:
        return list(_points(json.loads(line)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordCorrupt(
            f"a log line is no embedded metric: {type(error).__name__} {error}: {line[:200]}"
        ) from error


def _points(document: Mapping[str, Any]) -> Iterator[Point]:
    about = document["_aws"]
    directives = about["CloudWatchMetrics"]
    targets = {"_aws"} | {name for one in directives for names in one["Dimensions"] for name in names}
    targets |= {definition["Name"] for one in directives for definition in one["Metrics"]}
    properties = {name: value for name, value in document.items() if name not in targets}
    for directive in directives:
        if len(directive["Metrics"]) > _MOST_METRICS:
            raise ValueError(f"more than {_MOST_METRICS} metrics in a directive")
        for names in directive["Dimensions"]:
            if len(names) > _MOST_DIMENSIONS:
                raise ValueError(f"more than {_MOST_DIMENSIONS} dimensions in a set")
            dimensions = {name: _text(name, document[name]) for name in names}
            for definition in directive["Metrics"]:
                for value in _numbers(definition["Name"], document[definition["Name"]]):
                    yield Point(
                        namespace=directive["Namespace"],
                        name=definition["Name"],
                        unit=definition.get("Unit", "None"),
                        value=value,
                        dimensions=dimensions,
                        time=about["Timestamp"] / 1000,
                        properties=properties,
                    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"dimension {name!r} is no text")
    return value


def _numbers(name: str, value: object) -> list[float]:
    values = value if isinstance(value, list) else [value]
    numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) != len(values) or len(values) > _MOST_VALUES:
        raise ValueError(f"metric {name!r} is neither a number nor an array of at most {_MOST_VALUES}")
    return numbers
