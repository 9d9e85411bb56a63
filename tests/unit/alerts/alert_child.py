"""A process that raises one alert: `alert_child.py ROOT URL`. A failpoint may kill it on the way."""

import asyncio
import sys
from pathlib import Path

from turnmill.alerts import Channel, Dispatcher, Feed, new_alert
from turnmill.alerts.webhook import WebhookChannel
from turnmill.backends.embedded import open_root_records
from turnmill.records import AlertKind


async def main(root: Path, url: str) -> None:
    records = open_root_records(root)
    channel = Channel(notifier=WebhookChannel(name="hook", url=url, secret="a-secret-of-the-receiver"))
    dispatcher = Dispatcher(Feed(records), [channel])
    await dispatcher.start()
    await dispatcher.raise_alert(
        new_alert(AlertKind.RUN_FAILED, "r1 failed", command="turnmill doctor r1", run_id="r1")
    )
    await dispatcher.close()
    records.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
