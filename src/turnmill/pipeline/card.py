"""What is said about a published model, for programs (`lineage.json`) and for people (`README.md`).

run record, metrics, evaluations, decision -> lineage -> card
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import turnmill
from turnmill.config import from_dict
from turnmill.records import Metric, PublishedModel, Run

LINEAGE = "lineage.json"
CARD = "README.md"
# Rows of the reward table.
_ROWS = 10


def lineage_of(run: Run, model: PublishedModel, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Everything that led to this model, as JSON."""
    results = {stage.name: stage.result for stage in run.current_stages if stage.state == "done"}
    data = results["ValidateData"]["data"]
    training = results["SubmitTraining"]
    return {
        "model": {
            "run_id": model.run_id,
            "version": str(model.version),
            "fingerprint": model.digest,
            "published_at": datetime.fromtimestamp(model.published_at, UTC).isoformat(timespec="seconds"),
            "turnmill": turnmill.__version__,
        },
        "run": {
            "cause": run.cause,
            "upload": run.upload,
            "earlier_run": data.get("earlier"),
            "content_id": data.get("content_id"),
            "num_attempts": run.attempt,
            "created_at": datetime.fromtimestamp(run.created_at, UTC).isoformat(timespec="seconds"),
        },
        "base_model": model.base_model,
        "environment": {"id": model.env, "args": from_dict(run.config).environment.env_args},
        "data": {name: _file(report) for name, report in results["ValidateData"].items()},
        "parameters": {
            name: {"value": value, "source": run.sources.get(name, "default")} for name, value in run.config.items()
        },
        "training": {
            "steps": training["steps"],
            "rewards": [
                [metric.step, metric.values["reward_mean"]] for metric in metrics if "reward_mean" in metric.values
            ],
        },
        "baseline": training["baseline"],
        "evaluations": results.get("Evaluate", {}),
        "promotion": {
            "rule": model.promotion.rule,
            "reason": model.promotion.reason,
            "difference": model.promotion.difference,
            "low": model.promotion.low,
            "high": model.promotion.high,
            "metric": model.promotion.metric,
            "num_better": model.promotion.num_better,
            "num_worse": model.promotion.num_worse,
            "worse": [asdict(task) for task in model.promotion.worse],
        },
    }


def _file(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": report["path"].rpartition("/")[2], "rows": report["rows"], "sha256": report["digest"]}


# ---------------------------------------------------------------- the card


def card_of(lineage: Mapping[str, Any]) -> str:
    """The model card, with the head that the Hugging Face hub reads."""
    model, run = lineage["model"], lineage["run"]
    sections = [
        _head(lineage),
        f"# {model['run_id']}/{model['version']}",
        f"`{lineage['base_model']}` trained with multi-turn reinforcement learning (GRPO) in the environment "
        f"`{lineage['environment']['id']}`, for {lineage['training']['steps']} optimizer steps."
        f"{_adapter(lineage)}",
        "## Results",
        _results(lineage),
        "## Training",
        _training(lineage),
        "## Data",
        _table(
            ("", "file", "rows", "SHA-256"),
            [(name, file["name"], file["rows"], file["sha256"]) for name, file in lineage["data"].items()],
        ),
        "## Lineage",
        _table(
            ("what", "which"),
            [
                ("run", model["run_id"]),
                ("attempts", run["num_attempts"]),
                ("cause", run["cause"]),
                ("upload", run["upload"] or "none: begun by hand"),
                ("earlier run with the same content", run["earlier_run"] or "none"),
                ("weights version", model["version"]),
                ("weights fingerprint", model["fingerprint"]),
                ("environment", f"{lineage['environment']['id']} {json.dumps(lineage['environment']['args'])}"),
                ("published", model["published_at"]),
                ("turnmill", model["turnmill"]),
            ],
        ),
        "## Parameters",
        _table(
            ("parameter", "value", "source"),
            [(name, json.dumps(item["value"]), item["source"]) for name, item in lineage["parameters"].items()],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _adapter(lineage: Mapping[str, Any]) -> str:
    """What a reader should know of a model that holds a merged adapter; nothing where all weights were trained."""
    values = {name: item["value"] for name, item in lineage["parameters"].items()}
    if values.get("training_method") != "RFT_MULTITURN_LORA":
        return ""
    return (
        f" What was trained is a LoRA adapter of rank {values['lora_rank']} (alpha {values['lora_alpha']:g}): these "
        "weights are the base model's with the adapter merged into them, and `adapter/` holds it by itself, for `peft`."
    )


def _head(lineage: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "---",
            f"base_model: {json.dumps(lineage['base_model'])}",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [reinforcement-learning, grpo, turnmill]",
            "---",
        ]
    )


def _results(lineage: Mapping[str, Any]) -> str:
    baseline, evaluations = lineage["baseline"], lineage["evaluations"]
    rows = []
    if baseline is not None:
        rows.append(("baseline, tasks of the training data", *_share(baseline, "pass_rate", "", "num_rollouts")))
    for name, title in (("before", "held-out, before training"), ("after", "held-out, after training")):
        if name in evaluations:
            rows.append((title, *_share(evaluations[name], "solved", "solved_", "num_valid")))
    table = _table(("what", "solved", "95 % interval", "mean reward", "rollouts", "tasks"), rows)
    promotion = lineage["promotion"]
    published = f"Published by the rule `{promotion['rule']}`: {promotion['reason']}."
    if not rows:
        return f"Nothing was measured. {published}"
    return "\n\n".join([table, published, *_several(evaluations), *_worse(promotion)])


def _several(evaluations: Mapping[str, Any]) -> list[str]:
    """What a task played more than once tells: at least one of k rollouts solves it, and all of k do."""
    sides = [evaluations[name] for name in ("before", "after") if evaluations.get(name, {}).get("pass_at")]
    ks = [k for k in sides[0]["pass_at"] if k != "1"] if len(sides) == 2 else []
    rows = [
        (title.format(k), *(_interval_of(side[kind][k]) for side in sides))
        for kind, title in (("pass_at", "pass@{}"), ("pass_hat", "pass^{}"))
        for k in ks
    ]
    return [_table(("of held-out tasks like these", "before training", "after"), rows)] if rows else []


def _interval_of(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def _worse(promotion: Mapping[str, Any]) -> list[str]:
    tasks = promotion["worse"]
    if not tasks:
        return []
    rows = [
        (
            task["task_id"],
            f"{task['solved_before']} of {task['num_before']}",
            f"{task['solved_after']} of {task['num_after']}",
            f"{task['reward_before']:.3f}",
            f"{task['reward_after']:.3f}",
        )
        for task in tasks
    ]
    told = f"{promotion['num_worse']} held-out tasks went worse and {promotion['num_better']} better"
    shown = f"; the {len(rows)} that lost most" if len(rows) < promotion["num_worse"] else ""
    head = ("task", "solved before", "after", "mean reward before", "after")
    return [f"{told}{shown}:", _table(head, rows)]


def _share(figures: Mapping[str, Any], share: str, prefix: str, num: str) -> tuple[object, ...]:
    low, high = figures[f"{prefix}low"], figures[f"{prefix}high"]
    return (
        f"{figures[share]:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{figures['reward_mean']:.3f}",
        figures[num],
        figures["num_tasks"],
    )


def _training(lineage: Mapping[str, Any]) -> str:
    rewards = lineage["training"]["rewards"]
    size = max(1, -(-len(rewards) // _ROWS))
    rows = []
    for start in range(0, len(rewards), size):
        part = rewards[start : start + size]
        steps = str(part[0][0]) if len(part) == 1 else f"{part[0][0]}–{part[-1][0]}"
        rows.append((steps, f"{sum(reward for _, reward in part) / len(part):.3f}"))
    return _table(("steps", "mean reward of all valid rollouts"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
