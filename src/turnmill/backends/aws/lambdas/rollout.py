"""What an external trainer calls: one v0 rollout request, or nothing that can be played.

    rollout request -> Occurrence + SampleRecord -> rollout_request -> {"status": "accepted"}
                    -> {"status": "refused", "error": ...}    nothing is recorded, and the same again would end the same

A request that is repeated, because its answer was lost or Lambda tries an asynchronous one again, is the same rollout
for as long as that is being played.
"""

import logging
from functools import cache, partial
from typing import Any

from turnmill.backends.aws.lambdas.boot import Context, Event, Instance, Opened
from turnmill.conversation.foreign import open_occurrence
from turnmill.errors import InvalidInput, InvalidRequest
from turnmill.records import PROTOCOL_VERSION

logger = logging.getLogger(__name__)


def handler(event: Event, context: Context) -> dict[str, Any]:
    """Have one rollout played; raises where the backend can't be reached, so that the caller tries again."""
    try:
        return _function().run(context, partial(_ask, event))
    except InvalidInput as error:
        logger.error("a rollout request was refused: %s", error)
        return {"version": PROTOCOL_VERSION, "status": "refused", "error": _error(error)}


@cache
def _function() -> Instance[Opened]:
    return Instance("rollout", lambda opened: opened)


async def _ask(event: Event, opened: Opened) -> dict[str, Any]:
    sample = await open_occurrence(opened.ports, opened.run, opened.config, event)
    logger.info("a rollout was asked for", extra={"at": sample.key})
    return {"version": PROTOCOL_VERSION, "status": "accepted", "sample_id": sample.wire_id}


def _error(error: InvalidInput) -> dict[str, str | None]:
    """`field` is None where the run itself can't take requests."""
    named = error if isinstance(error, InvalidRequest) else None
    return {
        "code": named.code if named else "invalid_request",
        "message": str(error),
        "field": named.param if named else None,
    }
