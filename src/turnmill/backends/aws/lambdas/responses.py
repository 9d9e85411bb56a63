"""Answers of a foreign generator, from its queue into the records, where those who wait for them look.

    batch of generate_response -> by message group, in order -> record_message -> what failed comes again

A message that could not be recorded, and those of its group behind it, are named to Lambda, which has them delivered
again: none overtakes another one. What is no answer at all is logged and goes, as another try would end the same.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from turnmill.backends.aws.lambdas.boot import Context, Event, Instance, Opened
from turnmill.conversation.responses import record_message
from turnmill.errors import TurnmillError

logger = logging.getLogger(__name__)
Record = dict[str, Any]


def handler(event: Event, context: Context) -> dict[str, Any]:
    """Record a batch; raises where the run can't be opened, so that all of it comes again."""
    return _function().run(context, partial(_record, event["Records"]))


@cache
def _function() -> Instance[Opened]:
    return Instance("responses", lambda opened: opened)


async def _record(records: Sequence[Record], opened: Opened) -> dict[str, Any]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["attributes"]["MessageGroupId"], []).append(record)
    failed = await asyncio.gather(*(_record_group(group, opened) for group in groups.values()))
    logger.info("%d answers, %d of them come again", len(records), sum(map(len, failed)))
    return {"batchItemFailures": [{"itemIdentifier": message_id} for ids in failed for message_id in ids]}


async def _record_group(records: Sequence[Record], opened: Opened) -> list[str]:
    """Ids of the messages that have to come again: from the first one on that could not be recorded."""
    for done, record in enumerate(records):
        try:
            await record_message(opened.ports, opened.run, record["body"].encode())
        except TurnmillError as error:
            logger.error("an answer could not be recorded and comes again: %s", error)
            return [each["messageId"] for each in records[done:]]
    return []
