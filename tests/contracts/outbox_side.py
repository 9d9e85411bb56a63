"""An outbox with what it writes to."""

from dataclasses import dataclass

from turnmill.ports import Outbox, Queue, RecordStore, RunPorts


@dataclass(frozen=True, kw_only=True)
class OutboxSide:
    """What the suite of the outbox works on."""

    outbox: Outbox
    records: RecordStore
    # Where the outbox sends its messages.
    news: Queue

    @classmethod
    def of(cls, ports: RunPorts) -> "OutboxSide":
        return cls(outbox=ports.answers, records=ports.records, news=ports.generate_response)
