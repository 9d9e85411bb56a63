"""The stage that publishes the trained model, if its held-out results allow it.

Evaluate's result -> decision -> lineage and card -> model store (one version, never changed) -> latest
"""

import asyncio
import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from turnmill import failpoints
from turnmill.errors import NotFound, RecordCorrupt
from turnmill.pipeline.card import CARD, LINEAGE, card_of, lineage_of
from turnmill.pipeline.engine import load_run
from turnmill.pipeline.processes import training_status
from turnmill.pipeline.promotion import decide
from turnmill.pipeline.stage import Done, Handle, Running, StageContext
from turnmill.ports import RecordStore, StoredModel, Write
from turnmill.records import LatestModel, Promotion, PublishedModel, TrainingStatus, decode, encode

# Written by the trainer beside the weights.
_CHECKPOINT_MANIFEST = "checkpoint.json"


async def start_publish(ctx: StageContext) -> Handle:
    """A model may be large: it is copied while the stage is polled."""
    return {}


async def poll_publish(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done with the decision, and the model if it was published."""
    result = await ctx.background.result_of("publish", partial(_decide_and_publish, ctx))
    return Running(detail="copying the model") if result is None else Done(result=result)


async def _decide_and_publish(ctx: StageContext) -> dict[str, Any]:
    """Done again, after a kill at any moment, it ends with the same single version: what is published stays."""
    status = await training_status(ctx)
    if status is None or status.version is None or status.checkpoint is None:
        raise NotFound(f"run {ctx.run.run_id} has no final checkpoint: there is nothing to publish")
    stored = await ctx.ports.models.find(ctx.run.run_id, status.version)
    if stored is None:
        run = await load_run(ctx.ports.runs, ctx.run.run_id)
        evaluations = {stage.name: stage.result for stage in run.current_stages}.get("Evaluate", {})
        promotion = decide(ctx.config.promotion, evaluations, ctx.config.promotion_metric)
        if not promotion.is_published:
            return _result(promotion, None)
        stored = await _publish(ctx, status, promotion)
    failpoints.hit("model-published")
    await point_to_latest(ctx.ports.runs, stored.model)
    failpoints.hit("model-pointed")
    return _result(stored.model.promotion, stored)


def _result(promotion: Promotion, stored: StoredModel | None) -> dict[str, Any]:
    result: dict[str, Any] = {"promotion": asdict(promotion), "model": None, "location": None}
    if stored is not None:
        result |= {"model": stored.model.name, "location": stored.location}
    return result


async def _publish(ctx: StageContext, status: TrainingStatus, promotion: Promotion) -> StoredModel:
    run = await load_run(ctx.ports.runs, ctx.run.run_id)
    source = Path(str(status.checkpoint))
    digest = await asyncio.to_thread(_digest_of, source)
    weights = await ctx.ports.weights.get(status.version) if status.version else None
    if weights is None or weights.digest != digest:
        raise RecordCorrupt(f"{source}: digest: expected that of weights {status.version}, found {digest}")
    model = PublishedModel(
        run_id=run.run_id,
        version=weights.version,
        digest=digest,
        env=ctx.config.environment.name,
        base_model=ctx.config.base_model,
        published_at=time.time(),
        promotion=promotion,
        files={},
    )
    metrics = [metric for metric in await ctx.ports.metrics.read(run.run_id) if 0 < metric.step <= status.step]
    lineage = lineage_of(run, model, metrics)
    documents = {LINEAGE: json.dumps(lineage, indent=2).encode(), CARD: card_of(lineage).encode()}
    return await ctx.ports.models.publish(model, source, documents)


def _digest_of(checkpoint: Path) -> str:
    path = checkpoint / _CHECKPOINT_MANIFEST
    try:
        digest: str = json.loads(path.read_bytes())["digest"]
    except (OSError, ValueError, KeyError) as error:
        raise RecordCorrupt(f"{path} does not describe the final checkpoint: {error}") from error
    return digest


async def point_to_latest(runs: RecordStore, model: PublishedModel) -> None:
    """Move the pointer of its environment and base model, unless it points to one that was published later."""
    wanted = LatestModel.of(model)
    while True:
        (stored,) = await runs.get([wanted.key])
        if stored is not None and decode(stored.value, LatestModel).published_at >= wanted.published_at:
            return
        write = Write(key=wanted.key, value=encode(wanted), expected=stored.version if stored else 0)
        (is_applied,) = await runs.write([write])
        if is_applied:
            return
