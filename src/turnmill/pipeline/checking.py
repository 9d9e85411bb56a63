"""The stages that look before anything is started."""

from pathlib import Path

from turnmill.errors import DataError
from turnmill.pipeline.stage import Done, Handle, Running, StageContext
from turnmill.records import Run

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
                raise await ctx.quarantine(error) if name == "data" else _held_out(ctx.run, path, error) from error
    if ctx.run.upload is not None:
        # Runs that were begun by hand are meant, also when they repeat another one.
        held_out = result.get("eval_data", {}).get("digest")
        result["data"] |= await ctx.claim(result["data"]["digest"], held_out)
    return {"reports": result}


def _held_out(run: Run, path: str, error: DataError) -> DataError:
    """Of an upload: it has no run of its own to be held for, so that its error says what to do."""
    if run.upload is None:
        return error
    name = f"{run.upload.removesuffix('.jsonl')}.eval.jsonl"
    first, _, rest = str(error).replace(path, name).partition("\n")
    todo = f"  put a correct {name} beside {run.upload}, and {run.upload} there once more"
    return DataError("\n".join([first, todo, *([rest] if rest else [])]))


async def poll_validate(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result=handle["reports"])
