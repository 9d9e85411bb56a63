"""An external run on the emulator, as an operator would set it up: its stack, its record, its workers as processes."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.aws.emulator import Emulator, environ_of
from tests.aws.peer import Place
from turnmill.backends.aws.backend import AwsBackend
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.backends.aws.lambdas.boot import NoWeights
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.config import Config, Resolved, to_dict
from turnmill.conversation.history import checked_sample, read_calls
from turnmill.ports import RunPorts
from turnmill.records import Call, Purpose, Run, SampleRecord, sample_prefix
from turnmill.wiring import variables
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.running.external import begin_external

ACCOUNT = "000000000000"


@dataclass(frozen=True, kw_only=True)
class ExternalRun:
    """A run whose trainer is somebody else."""

    emulator: Emulator
    settings: AwsSettings
    run: Run
    config: Config
    worker_token: str
    # Where the peer finds its queues and the function.
    place: Place
    # Where workers reach the proxy, and what else the stack says.
    proxy_url: str
    outputs: Mapping[str, str]
    root: Path

    @property
    def names(self) -> StackNames:
        return StackNames(stack=self.settings.run_stack(self.run.run_id))

    def ports(self) -> RunPorts:
        """Of the run, in this process."""
        backend = AwsBackend(self.settings, account=ACCOUNT, weights_of=lambda _: NoWeights())
        return backend.open_external_run(self.run.run_id)

    def samples(self) -> dict[str, list[SampleRecord]]:
        """All samples by the trainer's id, in the order of their occurrences."""

        async def read() -> list[SampleRecord]:
            ports, found, after = self.ports(), [], ""
            prefix = sample_prefix(self.run.run_id, Purpose.TRAIN)
            while page := await ports.records.scan(prefix, after=after):
                found += [checked_sample(stored) for stored in page]
                after = page[-1].key
            return found

        by_wire_id: dict[str, list[SampleRecord]] = {}
        for sample in sorted(run_loop(read()), key=lambda sample: sample.created_at):
            assert sample.wire_id is not None
            by_wire_id.setdefault(sample.wire_id, []).append(sample)
        return by_wire_id

    def calls(self, sample: SampleRecord) -> list[Call]:
        """Those that the attempt which ended the sample consumed, in order."""
        found = run_loop(read_calls(self.ports().records, sample.run_id, sample.purpose, sample.sample_id))
        by_id = {call.call_id: call for call in found}
        return [by_id[call_id] for call_id in sample.calls]

    def worker(self, name: str, *, proxy_url: str | None = None) -> "AbstractContextManager[subprocess.Popen[bytes]]":
        """`turnmill role worker`, which knows the proxy only: the function, or a process at `proxy_url`."""
        environ = {
            variables.PROXY_URL: proxy_url or self.proxy_url,
            variables.PROXY_AUTH: "" if proxy_url else variables.SIGV4,
            variables.WORKER_TOKEN: self.worker_token,
            variables.WORKER_CONFIG: json.dumps(to_dict(self.config)),
        }
        return self._role("worker", name, environ)

    def write_backend_json(self) -> None:
        """By it commands, and roles that are not workers, find the deployment from the folder."""
        place = {"name": self.settings.name, "region": self.settings.region, "account": ACCOUNT}
        content = {"type": "aws", **place, "endpoint_url": self.emulator.url}
        (self.root / "backend.json").write_text(json.dumps(content))

    @contextmanager
    def container(self, name: str) -> Iterator[str]:
        """`turnmill role proxy`, as a container runs it; yields where it serves."""
        self.write_backend_json()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        url = f"http://localhost:{address.rpartition(':')[2]}"
        with self._role("proxy", name, {variables.PROXY_URL: url, variables.PROXY_LISTEN: address}) as process:
            give_up = time.monotonic() + 60
            while "serving at" not in self.log_of(name):
                assert process.poll() is None and time.monotonic() < give_up, self.log_of(name)
                time.sleep(0.05)
            yield url

    @contextmanager
    def _role(self, role: str, name: str, environ: Mapping[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
        """A role's process; ended with the block unless it ended before."""
        command = [sys.executable, "-m", "turnmill", "role", role]
        command += ["--root", str(self.root), "--run", self.run.run_id, "--name", name]
        environ = {**os.environ, **environ_of(self.emulator.url), **environ}
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(30)

    def log_of(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def function_logs(self) -> str:
        """What the functions logged, one line each."""
        clients = AwsClients(self.settings)
        lines: list[str] = []
        for function in ("proxy", "rollout", "responses"):
            group = self.names.log_group(function)
            streams = clients.call_now("logs", "describe_log_streams", logGroupName=group)["logStreams"]
            for stream in streams:
                where = {"logGroupName": group, "logStreamName": stream["logStreamName"], "startFromHead": True}
                page = clients.call_now("logs", "get_log_events", **where)
                while page["events"]:
                    lines += [event["message"] for event in page["events"]]
                    page = clients.call_now("logs", "get_log_events", **where, nextToken=page["nextForwardToken"])
        clients.close()
        return "\n".join(lines)


def begin_external_run(
    emulator: Emulator, name: str, config: Config, root: Path, *, front: str | None = None
) -> ExternalRun:
    """Deploy the deployment `name` and an external run of it.

    `front`: what stands between the emulator and the workers, and between it and the functions.
    """
    settings = emulator.settings(name)
    clients = AwsClients(settings)
    run_loop(deploy_deployment(clients, settings, lambda _: None))
    begun = run_loop(
        begin_external(clients, settings, f"{name}-run", Resolved(config=config, sources={}), packs_dependencies=False)
    )
    found = begun.outputs
    assert begun.worker_token is not None
    proxy_url = _emulated_url(front or emulator.url, found["ProxyFunctionUrl"])
    for function in ("proxy", "rollout", "responses"):
        # The first as for a domain of one's own.
        variables_of = {"TURNMILL_PROXY_URL": proxy_url, "AWS_ENDPOINT_URL": front or emulator.url}
        _add_variables(clients, f"{begun.run.run_id}-SageMaker-{function}", variables_of)
    clients.close()
    return ExternalRun(
        emulator=emulator,
        settings=settings,
        run=begun.run,
        config=config,
        worker_token=begun.worker_token,
        place=Place(
            endpoint_url=emulator.url,
            region=str(settings.region),
            rollout_function=found["RolloutFunctionArn"],
            rollout_response_url=found["RolloutFinishedQueueUrl"],
            generate_request_url=found["RequestQueueUrl"],
            generate_response_url=found["RequestResponseQueueUrl"],
        ),
        proxy_url=proxy_url,
        outputs=found,
        root=root,
    )


def _emulated_url(base: str, function_url: str) -> str:
    """Where the emulator serves a function URL, whose domain is Amazon's."""
    return f"{base}/_aws/lambda-url/{function_url.split('//')[1].split('.')[0]}"


def _add_variables(clients: AwsClients, function: str, variables_of: Mapping[str, str]) -> None:
    known = clients.call_now("lambda", "get_function_configuration", FunctionName=function)["Environment"]["Variables"]
    environment = {"Variables": {**known, **variables_of}}
    clients.call_now("lambda", "update_function_configuration", FunctionName=function, Environment=environment)
