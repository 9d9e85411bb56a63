"""The stages that look before anything is started."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from turnmill.errors import DataError
from turnmill.pipeline.stage import Done, Handle, Running, StageContext
from turnmill.records import Run, RunKind

logger = logging.getLogger(__name__)

# What is read about held-out tasks alone; `promotion` is also about models that were never evaluated.
_HELD_OUT_PARAMETERS = ("eval_rollouts", "val_every", "val_rollouts", "val_temperature", "promotion_metric")

# ---------------------------------------------------------------- ValidateData


async def start_validate(ctx: StageContext) -> Handle:
    """Files may be large: they are read while the stage is polled."""
    return {}


async def poll_validate(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done with what was found in each file; raises `DataError` or `Duplicate`."""
    found = await ctx.background.result_of("validate", partial(_validate, ctx))
    return Running(detail="reading the data") if found is None else Done(result=found)


async def _validate(ctx: StageContext) -> dict[str, Any]:
    """Both files are read whole, row by row; a bad one ends the run before any process is started.

    An upload that is refused goes into quarantine, also for its held-out tasks: they came with it.
    """
    result = {}
    for name, path in (("data", ctx.run.data_path), ("eval_data", ctx.run.eval_path)):
        if path is not None:
            try:
                result[name] = await ctx.validate(Path(path))
            except DataError as error:
                raise await ctx.quarantine(error) from error
    for text in _doubts(ctx, result):
        logger.warning("%s", text, extra={"at": ctx.run.run_id})
    if ctx.run.upload is not None:
        # Runs that were begun by hand are meant, also when they repeat another one.
        held_out = result.get("eval_data", {}).get("digest")
        result["data"] |= await ctx.claim(result["data"]["digest"], held_out)
    return result


def _is_chosen(run: Run, name: str) -> bool:
    """Whether somebody set it for this run, or for several: neither a default nor the model's recipe."""
    return run.sources.get(name, "default") not in ("default", "recipe.toml")


def _doubts(ctx: StageContext, result: Mapping[str, Any]) -> list[str]:
    """What is allowed, and will disappoint whoever did not mean it, hours later."""
    if ctx.run.kind is not RunKind.TRAIN:
        return []
    doubts = []
    held_out = result.get("eval_data")
    if held_out is None and ctx.config.promotion == "better":
        doubts.append('promotion = "better" and there are no held-out tasks: what is trained will not be published')
    if held_out is None and (idle := [name for name in _HELD_OUT_PARAMETERS if _is_chosen(ctx.run, name)]):
        doubts.append(f"there are no held-out tasks, so what was set for them does nothing: {', '.join(idle)}")
    if held_out is not None and held_out.get("digest") == result["data"].get("digest"):
        doubts.append(f"{held_out['path']} holds the training data: what is measured on it is memory")
    return doubts
