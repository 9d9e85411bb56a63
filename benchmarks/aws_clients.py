"""What does a request to an AWS service cost: boto3 in threads, as here, beside aiobotocore?

    python -m benchmarks.aws_clients [--quick]

Both ask an emulator on this machine, whose own time is part of the rate and not of the CPU time, for the state of a
queue. The answer of real services takes longer than all that is measured here.
"""

import asyncio
import os
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.common import Claim, arguments, emit, emit_ratio, emit_skip, has_peers, interleave, run_peer
from tests.aws.emulator import REGION, running_emulator
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.settings import AwsSettings

NAME = "aws_clients"
OURS, PEER = "boto3 in threads", "aiobotocore"


def measure_ours(url: str, queue: str, concurrent: int, total: int) -> float:
    """Requests a second."""

    async def measure() -> float:
        clients = AwsClients(AwsSettings(region=REGION, endpoint_url=url))
        slots = asyncio.Semaphore(concurrent)
        attributes = ["ApproximateNumberOfMessages"]

        async def one() -> None:
            async with slots:
                await clients.call("sqs", "get_queue_attributes", QueueUrl=queue, AttributeNames=attributes)

        await asyncio.gather(*(one() for _ in range(concurrent)))
        begun, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(total)))
        seconds = time.perf_counter() - begun
        cpu_ms = 1000 * (time.process_time() - cpu) / total
        emit(
            kind="measurement", benchmark=NAME, subject=OURS, case=f"{concurrent} at once", unit="CPU ms", value=cpu_ms
        )
        clients.close()
        return total / seconds

    return asyncio.run(measure())


def measure_peer(url: str, queue: str, concurrent: int, total: int) -> float:
    """Requests a second."""
    args = {"url": url, "queue": queue, "concurrent": concurrent, "total": total}
    figures = run_peer("aiobotocore_requests.py", *(f"--{name}={value}" for name, value in args.items()))
    emit(
        kind="measurement",
        benchmark=NAME,
        subject=PEER,
        case=f"{concurrent} at once",
        unit="CPU ms",
        value=figures["cpu_ms"],
    )
    return float(figures["requests_per_s"])


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder, running_emulator(Path(folder)) as emulator:
        os.environ.update(emulator.environ)
        clients = AwsClients(emulator.settings("benchmark"))
        queue = str(clients.call_now("sqs", "create_queue", QueueName="benchmark")["QueueUrl"])
        clients.close()
        for concurrent in (1, 16):
            total = (300 if args.quick else 2000) * (1 if concurrent == 1 else 2)
            subjects = {OURS: partial(measure_ours, emulator.url, queue, concurrent, total)}
            if has_peers():
                subjects[PEER] = partial(measure_peer, emulator.url, queue, concurrent, total)
            case = f"{concurrent} requests at once"
            figures, met = interleave(NAME, case, "requests/s", subjects, rounds=2 if args.quick else 5)
            if has_peers():
                emit_ratio(
                    Claim(benchmark=NAME, text=case, unit="requests/s", ours=OURS, peer=PEER),
                    figures[OURS],
                    figures[PEER],
                    met,
                )
            else:
                emit_skip(NAME, PEER, "no .venv-peers: run `make bench-peers`")


if __name__ == "__main__":
    main()
