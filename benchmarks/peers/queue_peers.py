"""litequeue and Redis streams as producer or consumer; runs in the peers' environment."""

import argparse
import secrets
import sys
import time
from typing import Any

BATCH = 10
SIZE = 2048


def begin() -> None:
    """Say that all is open, and wait for the word to start."""
    print("ready", flush=True)
    sys.stdin.readline()


def produce_litequeue(place: str, total: int) -> None:
    from litequeue import LiteQueue

    queue = LiteQueue(place)
    body = secrets.token_hex(SIZE // 2)
    begin()
    for _ in range(total):
        queue.put(body)


def consume_litequeue(place: str, total: int) -> None:
    from litequeue import LiteQueue

    queue = LiteQueue(place)
    begin()
    left = total
    while left:
        message = queue.pop()
        if message is None:
            time.sleep(0.001)
            continue
        queue.done(message.message_id)
        left -= 1


def produce_redis(place: str, total: int) -> None:
    client = _connect(place)
    body = secrets.token_bytes(SIZE)
    begin()
    for _ in range(0, total, BATCH):
        pipeline = client.pipeline(transaction=False)
        for _ in range(BATCH):
            pipeline.xadd("queue", {"body": body})
        pipeline.execute()


def consume_redis(place: str, total: int) -> None:
    client = _connect(place)
    client.xgroup_create("queue", "workers", id="0", mkstream=True)
    begin()
    left = total
    while left:
        for _, entries in client.xreadgroup("workers", "one", {"queue": ">"}, count=BATCH, block=5000):
            ids = [entry_id for entry_id, _ in entries]
            pipeline = client.pipeline(transaction=False)
            pipeline.xack("queue", "workers", *ids)
            pipeline.xdel("queue", *ids)
            pipeline.execute()
            left -= len(ids)


def _connect(place: str) -> Any:
    import redis

    client = redis.Redis(port=int(place))
    give_up = time.monotonic() + 10
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


ROLES = {
    ("litequeue", "produce"): produce_litequeue,
    ("litequeue", "consume"): consume_litequeue,
    ("Redis streams", "produce"): produce_redis,
    ("Redis streams", "consume"): consume_redis,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("role", "kind", "place", "total"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    ROLES[args.kind, args.role](args.place, int(args.total))
    print("done", flush=True)


if __name__ == "__main__":
    main()
