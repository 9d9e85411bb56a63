"""The stages that follow training: what was learned is measured."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnmill.errors import NotFound
from turnmill.pipeline.budget import check_budget
from turnmill.pipeline.processes import check_roles, training_status
from turnmill.pipeline.promotion import Counts, pair
from turnmill.pipeline.stage import BASE_VERSION, Done, Handle, Running, StageContext
from turnmill.records import RunKind, Version

# ---------------------------------------------------------------- Evaluate


async def start_evaluate(ctx: StageContext) -> Handle:
    """The trained weights and the base play the same held-out tasks; a run without a held-out file skips it."""
    if ctx.run.eval_path is None:
        return {"evaluations": {}}
    if ctx.run.kind is RunKind.EVAL:
        return {"evaluations": {"eval": None}}
    status = await training_status(ctx)
    if status is None:
        raise NotFound(f"run {ctx.run.run_id} has no training status: there is nothing to evaluate")
    trained = status.version
    return {"evaluations": {"before": str(BASE_VERSION), "after": str(trained)}}


async def poll_evaluate(ctx: StageContext, handle: Handle) -> Running | Done:
    """One evaluation after the other: replicas serve the version pointed to, so the pointer moves in between."""
    await check_roles(ctx.launcher)
    await check_budget(ctx)
    results: dict[str, Any] = {}
    for name, version in handle["evaluations"].items():
        if version is not None and name not in handle.setdefault("pointed", []):
            await ctx.ports.weights.point(Version.parse(version))
            handle["pointed"].append(name)
        played = BASE_VERSION if version is None else Version.parse(version)
        await ctx.evaluations.start(name, Path(str(ctx.run.eval_path)), version=played)
        result = ctx.evaluations.poll(name)
        if result is None:
            return Running(detail=f"evaluating {name}: {ctx.evaluations.progress(name)}")
        results[name] = result
    # Of the single tasks stays what the decision to publish needs, and which went worse: the record of the run holds no
    # long lists. All of them are in the blobs of the evaluations.
    counts = {name: _counts_of(result.pop("tasks")) for name, result in results.items()}
    if "after" in results:
        results["after"]["pairs"] = asdict(pair(counts["before"], counts["after"]))
        by = ctx.config.promotion_metric
        results["after"]["comparison"] = ctx.evaluations.compare("before", "after", by=by)
    return Done(result=results)


def _counts_of(tasks: Mapping[str, Mapping[str, Any]]) -> Counts:
    return {task_id: (task["num_solved"], task["num_rollouts"]) for task_id, task in tasks.items()}
