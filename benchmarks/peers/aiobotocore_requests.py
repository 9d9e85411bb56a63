"""Requests to an AWS service through aiobotocore; runs in the peers' environment."""

import argparse
import asyncio
import json
import time

import aiobotocore.session
from botocore.config import Config


async def measure(url: str, queue: str, concurrent: int, total: int) -> dict[str, float]:
    config = Config(max_pool_connections=concurrent)
    session = aiobotocore.session.get_session()
    async with session.create_client("sqs", endpoint_url=url, region_name="us-east-1", config=config) as client:
        slots = asyncio.Semaphore(concurrent)

        async def one() -> None:
            async with slots:
                await client.get_queue_attributes(QueueUrl=queue, AttributeNames=["ApproximateNumberOfMessages"])

        await asyncio.gather(*(one() for _ in range(concurrent)))
        begun, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(total)))
        seconds = time.perf_counter() - begun
        return {"requests_per_s": total / seconds, "cpu_ms": 1000 * (time.process_time() - cpu) / total}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--concurrent", type=int, required=True)
    parser.add_argument("--total", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.url, args.queue, args.concurrent, args.total))))


if __name__ == "__main__":
    main()
