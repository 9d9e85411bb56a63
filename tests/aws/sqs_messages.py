"""Messages of the tests of SQS, and how they open a queue behind a proxy."""

from collections.abc import Callable

from tests.aws.scripted_proxy import ScriptedProxy
from turnmill.backends.aws.queue import SqsQueue
from turnmill.ports import Leased, Message

# The queue of the test behind a proxy, and the proxy.
OpenProxied = Callable[..., tuple[ScriptedProxy, SqsQueue]]


def message(body: str | bytes, group: str = "", dedup_id: str | None = None) -> Message:
    return Message(body=body if isinstance(body, bytes) else body.encode(), group=group or str(body), dedup_id=dedup_id)


def bodies(leased: list[Leased]) -> list[str]:
    return [item.body.decode() for item in leased]
