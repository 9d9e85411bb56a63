"""Which backend a deployment is on: the only place that decides.

    --backend | TURNMILL_BACKEND | [backend] of turnmill.toml -> choose -> ROOT/backend.json -> backend_of(ROOT)

What a deployment began with it keeps: its records are there and nowhere else. A folder without the file is on what the
table says, as on a second machine, else embedded.
Processes, logs, locks, weights and checkpoints lie in the folder whatever holds the rest, as long as a run's processes
are on this machine (`local_compute`).
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from turnmill.alerts import Channel, open_channels
from turnmill.backends.embedded import EmbeddedBackend, disk, open_weights, replacing
from turnmill.config.backends import BackendSettings, BackendType
from turnmill.config.deployment import FILE, AlertChannel, AlertChannelType, load_backend
from turnmill.config.values import suggest
from turnmill.errors import ConfigError, InvalidInput, NotFound, RecordCorrupt, printable
from turnmill.ports import Backend, Notifier, RunPorts
from turnmill.records import SampleRecord
from turnmill.wiring.local_compute import LocalCompute
from turnmill.wiring.variables import BACKEND

if TYPE_CHECKING:
    from turnmill.backends.aws.backend import AwsBackend

# Where it is kept, in the folder of a deployment that is not embedded.
RECORD = "backend.json"


class Remote(Protocol):
    """What of a deployment is outside of its folder."""

    @property
    def place(self) -> str:
        """For people."""
        ...

    @property
    def topic(self) -> str:
        """Of its alerts."""
        ...

    def notifier(self, topic: str, name: str) -> Notifier:
        """A channel to the topic of this name or ARN."""
        ...

    def open_external_run(self, run_id: str) -> RunPorts:
        """The ports of a run whose trainer and generator are somebody else's."""
        ...

    def fetch_model(self, run_id: str, folder: Path) -> Path | None:
        """What was published last of a run, downloaded to `folder`/<version>; None where nothing was. Blocks."""
        ...

    def model_document(self, location: str, name: str) -> bytes | None:
        """A file of what was published at `location`; None where there is none, or no more. Blocks."""
        ...

    async def remove_run(self, run_id: str, *, models: bool) -> None:
        """Remove all of a run but its record, with `models` what it published too. Idempotent."""
        ...

    async def what_is_left(self, run_id: str, *, models: bool) -> list[str]:
        """What is still there of that, looked for anew."""
        ...


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of the file: all that a process needs to find the deployment, but for credentials."""

    type: BackendType
    name: str
    region: str
    # Twelve digits: credentials of another account must not look like a deployment without runs.
    account: str
    endpoint_url: str | None = None


# ---------------------------------------------------------------- finding it


def backend_of(root: Path) -> Backend:
    """That of the deployment in this folder; raises `InvalidInput` where it or its tools are not there."""
    record = _place_of(root)
    return EmbeddedBackend(root) if record is None else LocalCompute(_on_aws(root, record), root)


def remote_of(root: Path) -> Remote | None:
    """What of a deployment is outside of its folder; None for one that is in it as a whole."""
    record = _place_of(root)
    return None if record is None else _on_aws(root, record)


def open_external_run(root: Path, run_id: str) -> RunPorts:
    """The ports of a run whose trainer is somebody else's; raises `InvalidInput` for a deployment that has none."""
    return _remote(root).open_external_run(run_id)


def rollout_alarm(root: Path, ports: RunPorts) -> Callable[[SampleRecord], Awaitable[None]]:
    """What is to be done with each sample of such a run that was given up: somebody is told."""
    remote = _remote(root)
    from turnmill.backends.aws.rollout_alarm import RolloutAlarm

    return RolloutAlarm(ports.runs, remote.notifier(remote.topic, AlertChannelType.SNS.value)).tell


def _remote(root: Path) -> Remote:
    remote = remote_of(root)
    if remote is None:
        raise InvalidInput(f"the deployment in {root} is not on AWS, where the runs of external trainers are")
    return remote


def alert_channels(root: Path, settings: tuple[AlertChannel, ...]) -> list[Channel]:
    """The channels that alerts go to: those of `settings`, and the topic that the deployment has of its own, if any."""
    remote = remote_of(root)
    names = {channel.name for channel in settings}
    if remote is not None and (name := AlertChannelType.SNS.value) not in names:
        settings = (AlertChannel(type=AlertChannelType.SNS, name=name, topic=remote.topic), *settings)

    def open_topic(topic: str, name: str) -> Notifier:
        if remote is not None:
            return remote.notifier(topic, name)
        _check_installed("an alert channel of type sns")
        from turnmill.backends.aws.backend import notifier

        return notifier(topic, name)

    return open_channels(settings, open_topic=open_topic)


def check_uploads(root: Path) -> None:
    """Raises `ConfigError` where the bucket of the deployment is not in its folder, or is not to be."""
    on = _recorded(root) or _wanted(root, None, os.environ)
    if on is not None and on.type is not BackendType.EMBEDDED:
        raise ConfigError(
            f"the deployment in {root} is on {_text(on)}: begin its runs with `turnmill run`, not by uploads"
        )


# ---------------------------------------------------------------- choosing it


def choose(root: Path, *, flag: str | None, is_local: bool, environ: Mapping[str, str]) -> None:
    """Record which backend the deployment in this folder is on, before its first run; later ones must choose the same.

    `flag` is what the command line says. Raises `ConfigError` for a choice that can't be, `InvalidInput` where the
    deployment is not there or its tools are not installed.
    """
    wanted = _wanted(root, flag, environ)
    known = _recorded(root)
    if known is not None:
        if wanted is not None and _differs(wanted, known):
            raise _refused(root, _text(known), wanted)
        _on_aws(root, known).check()
        return
    if wanted is None or wanted.type is BackendType.EMBEDDED:
        if is_local:
            raise ConfigError("--local-compute is for --backend aws: an embedded run has its processes here anyway")
        return
    if (root / "records").exists():
        raise _refused(root, BackendType.EMBEDDED, wanted)
    if not is_local:
        raise ConfigError(
            "--backend aws needs --local-compute for now: queues, records and blobs are on AWS services; worker, "
            "replica, trainer and proxy are processes of this machine"
        )
    record = _found_on_aws(wanted)
    with disk(root / RECORD), replacing(root / RECORD) as file:
        file.write(json.dumps(msgspec.to_builtins(record), indent=2).encode() + b"\n")


def _wanted(root: Path, flag: str | None, environ: Mapping[str, str]) -> BackendSettings | None:
    """What is said last; None where nobody says anything."""
    table = load_backend(root)
    name, place = (flag, "--backend") if flag is not None else (environ.get(BACKEND) or None, BACKEND)
    if name is None:
        return table
    types = [kind.value for kind in BackendType]
    if name not in types:
        raise ConfigError(f"{place} = {printable(name)}: must be one of {', '.join(types)}{suggest(name, types)}")
    return table if table is not None and table.type == name else BackendSettings(type=BackendType(name))


def _place_of(root: Path) -> _Record | None:
    """As recorded, else as the table says where no run was begun from here; None for an embedded deployment."""
    record = _recorded(root)
    if record is not None or (root / "records").exists():
        return record
    table = load_backend(root)
    if table is None or table.type is BackendType.EMBEDDED:
        return None
    return _seen_on_aws(table, os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_PROFILE"))


def _recorded(root: Path) -> _Record | None:
    path = root / RECORD
    try:
        with disk(path):
            content = path.read_bytes()
    except NotFound:
        return None
    try:
        return msgspec.json.decode(content, type=_Record)
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"{path} does not name a backend: {error}") from error


def _differs(wanted: BackendSettings, known: _Record) -> bool:
    """In something that is said: the rest is as it was."""
    names = ("type", "name", "region", "endpoint_url")
    return any(getattr(wanted, name) not in (None, getattr(known, name)) for name in names)


def _refused(root: Path, known: str, wanted: BackendSettings) -> ConfigError:
    return ConfigError(
        f"the deployment in {root} is on {known}, where its runs are, and not on {_text(wanted)}: name another folder "
        f"(--root), or choose the same backend (--backend, {BACKEND}, [backend] in {FILE})"
    )


def _text(settings: BackendSettings | _Record) -> str:
    names = ("name", "region", "account", "endpoint_url")
    details = [f"{name} {value}" for name in names if (value := getattr(settings, name, None)) is not None]
    return f"{settings.type} ({', '.join(details)})" if details else f"{settings.type}"


# ---------------------------------------------------------------- AWS


@lru_cache(maxsize=8)
def _seen_on_aws(settings: BackendSettings, _endpoint: str | None, _profile: str | None) -> _Record:
    """Looked for once by those who only look: they ask again and again, and it does not move."""
    return _found_on_aws(settings)


def _found_on_aws(settings: BackendSettings) -> _Record:
    _check_installed("--backend aws")
    from turnmill.backends.aws.backend import find_account
    from turnmill.backends.aws.settings import AwsSettings

    named = {} if settings.name is None else {"name": settings.name}
    found = find_account(AwsSettings(**named, region=settings.region, endpoint_url=settings.endpoint_url))
    return _Record(
        type=BackendType.AWS,
        name=found.settings.name,
        region=found.region,
        account=found.account,
        endpoint_url=settings.endpoint_url,
    )


def _on_aws(root: Path, record: _Record) -> "AwsBackend":
    _check_installed(f"the deployment in {root}")
    from turnmill.backends.aws.backend import AwsBackend
    from turnmill.backends.aws.settings import AwsSettings

    settings = AwsSettings(
        name=record.name, region=record.region, endpoint_url=record.endpoint_url, account=record.account
    )
    return AwsBackend(settings, account=record.account, weights_of=partial(open_weights, root))


def _check_installed(what: str) -> None:
    if find_spec("boto3") is None:
        raise InvalidInput(f"{what} needs the AWS SDK: install the extra, pip install 'turnmill[aws]'")
