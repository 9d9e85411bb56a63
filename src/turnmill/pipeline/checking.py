"""The stages that look before anything is started."""

from pathlib import Path

from turnmill.errors import DataError
from turnmill.pipeline.stage import Done, Handle, Running, StageContext

# ---------------------------------------------------------------- ValidateData


async def start_validate(ctx: StageContext) -> Handle:
    """Both files are read whole, row by row; a bad one ends the run before any process is started.

    An upload that is refused goes into quarantine.
    """
    result = {}
    for name, path in (("data", ctx.run.data_path), ("eval_data", ctx.run.eval_path)):
        if path is not None:
            try:
                result[name] = await ctx.validate(Path(path))
            except DataError as error:
                raise await ctx.quarantine(error) if name == "data" else error from error
    if ctx.run.upload is not None:
        # Runs that were begun by hand are meant, also when they repeat another one.
        held_out = result.get("eval_data", {}).get("digest")
        result["data"] |= await ctx.claim(result["data"]["digest"], held_out)
    return {"reports": result}


async def poll_validate(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result=handle["reports"])
