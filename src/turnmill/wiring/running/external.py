"""Runs whose trainer and generator are somebody else's: begun, changed and ended, without a process that goes on.

    begin   record looked at -> stack of the run -> record: ACTIVE, hash of the worker token -> token and outputs told
    end     record: SUCCEEDED -> stack and objects removed

Both may be done again at any moment: what is as it should be stays as it is, what was cut short is completed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import bucket_of, key_of
from turnmill.backends.aws.infra import RunResources, StackRunInfra
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.settings import AwsSettings, check_stack_name
from turnmill.config import Resolved, to_dict
from turnmill.errors import Conflict, InvalidInput
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunKind, RunStatus, decode, encode, run_key
from turnmill.wiring.running.control import hash_of, new_token

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExternalBegun:
    """What a run was begun with."""

    run: Run
    # What its workers show; None where they have it already.
    worker_token: str | None = field(repr=False)
    # Of its stack: what the trainer and the workers have to know.
    outputs: Mapping[str, str]


async def begin_external(
    clients: AwsClients,
    settings: AwsSettings,
    run_id: str,
    resolved: Resolved,
    *,
    callers: Sequence[str] = (),
    has_new_token: bool = False,
    packs_dependencies: bool = True,
    tell: Tell = lambda _: None,
) -> ExternalBegun:
    """Begin the run, or bring one that goes on to these parameters and callers.

    `has_new_token`: its workers need another token from now on. Raises `InvalidInput` for an id that is no name for a
    stack, that another kind of run has, or one that has ended, and as `StackRunInfra.deploy` does.
    """
    check_stack_name(run_id)
    bucket = await bucket_of(clients, settings)
    records = _records(clients, settings, bucket)
    settings = replace(settings, kms_key=await key_of(clients, settings))
    known, version = await _find(records, run_id)
    if known is not None and known.status.is_final:
        raise InvalidInput(f"run {run_id} has ended ({known.status}): begin another one, under another name")
    infra = _infra(clients, settings, run_id, tell, callers=callers, packs_dependencies=packs_dependencies)
    for line in await infra.deploy():
        tell(f"  {line}")
    token = new_token() if known is None or has_new_token else None
    run = known or Run(
        run_id=run_id,
        cause=f"external/{run_id}",
        status=RunStatus.ACTIVE,
        kind=RunKind.EXTERNAL,
        created_at=time.time(),
        config={},
        sources={},
        data_path=None,
    )
    run = replace(run, config=to_dict(resolved.config), sources=resolved.sources)
    if token is not None:
        run = replace(run, worker_token_hash=hash_of(token))
    if run != known:
        await _write(records, run, version)
    found = await stacks.outputs(clients, settings.run_stack(run_id))
    return ExternalBegun(run=run, worker_token=token, outputs=found)


async def end_external(clients: AwsClients, settings: AwsSettings, run_id: str, *, tell: Tell = lambda _: None) -> None:
    """End the run, and remove all of it but its record: queues, table, functions, and what it stored."""
    records = _records(clients, settings, await bucket_of(clients, settings))
    run, version = await _find(records, run_id)
    if run is not None and not run.status.is_final:
        await _write(records, replace(run, status=RunStatus.SUCCEEDED, ended_at=time.time()), version)
    await _infra(clients, settings, run_id, tell).delete()


def _records(clients: AwsClients, settings: AwsSettings, bucket: str) -> RecordStore:
    """The deployment's."""
    return DynamoRecordStore(clients, settings.table, overflow=LargeValues(clients, bucket, "records/"))


async def _find(records: RecordStore, run_id: str) -> tuple[Run | None, int]:
    (stored,) = await records.get([run_key(run_id)])
    if stored is None:
        return None, 0
    run = decode(stored.value, Run)
    if run.kind is not RunKind.EXTERNAL:
        raise InvalidInput(f"run {run_id} is of kind {run.kind}, and no run of an external trainer")
    return run, stored.version


async def _write(records: RecordStore, run: Run, version: int) -> None:
    (done,) = await records.write([Write(key=run.key, value=encode(run), expected=version)])
    if not done:
        raise Conflict(f"run {run.run_id} was changed by somebody else at the same moment: look at it, and try again")


def _infra(
    clients: AwsClients,
    settings: AwsSettings,
    run_id: str,
    tell: Tell,
    *,
    callers: Sequence[str] = (),
    packs_dependencies: bool = True,
) -> StackRunInfra:
    resources = RunResources(num_replicas=1, is_external=True, callers=callers, packs_dependencies=packs_dependencies)
    return StackRunInfra(clients, settings, run_id, {}, resources, tell=tell)
