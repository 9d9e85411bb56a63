"""An emulator of AWS services as a process of its own, for tests: MiniStack on a port of 127.0.0.1.

What it can't show: KMS policies are not enforced, throughput limits are not kept, and time can't be moved. Those of IAM
are enforced where it has the variable AUTH=true.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from turnmill.backends.aws.settings import AwsSettings

REGION = "us-east-1"
_START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """A running emulator. Its services share one store; names tell tests apart."""

    url: str
    log: Path
    # What a process needs to use it: with these, AWS tools and Turnmill find it by themselves.
    environ: Mapping[str, str] = field(default_factory=dict)

    def settings(self, name: str) -> AwsSettings:
        """Of a deployment there."""
        return AwsSettings(name=name, region=REGION, endpoint_url=self.url)


def environ_of(url: str) -> dict[str, str]:
    """The variables by which a process uses the emulator at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "000000000000",
        "AWS_SECRET_ACCESS_KEY": "emulated",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def running_emulator(folder: Path, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[Emulator]:
    """Start an emulator that keeps its log in `folder`; it ends, and forgets everything, with the block.

    `variables` are added to its environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "emulator.log"
    for _ in range(5):
        # Another process may take the port in between: then this one ends at once, and the next port is tried.
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ministack"],
                env={
                    **os.environ,
                    **environ_of(url),
                    "BIND_HOST": "127.0.0.1",
                    "MINISTACK_HOST": "127.0.0.1",
                    "GATEWAY_PORT": str(port),
                    "EDGE_PORT": str(port),
                    "LOG_LEVEL": "WARNING",
                    "S3_DATA_DIR": str(folder / "s3"),
                    "TMPDIR": str(folder),
                    **variables,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )
        try:
            if _wait_until_it_answers(url, process):
                yield Emulator(url=url, log=log, environ=environ_of(url))
                return
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise RuntimeError(f"the emulator does not start; see {log}:\n{log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    give_up = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"{url}/_localstack/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False
