"""What holds for all runs of a deployment: `turnmill.toml` in its root folder. Parameters of runs are elsewhere.

[[alerts]]
type = "slack"                      # or "webhook", "pagerduty", "sns" (topic = "arn:aws:sns:...")
url_env = "SLACK_WEBHOOK_URL"       # or url = "https://hooks.slack.com/services/..."
min_severity = "error"

[mlflow]
tracking_uri = "http://127.0.0.1:5000"   # or tracking_uri_env = the name of a variable
experiment = "turnmill"

[backend]
type = "aws"                        # or "embedded", as without the table
name = "turnmill"                   # of the deployment, as `turnmill deploy` made it
region = "eu-west-1"                # else as every AWS tool finds it, like the credentials
endpoint_url = "http://127.0.0.1:4566"   # of an emulator

[ceilings] and [prices]: see `limits`; [[judges]]: see `judges`.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnmill.config.backends import BackendSettings, read_backend
from turnmill.config.judges import JudgeSettings, read_judges
from turnmill.config.limits import Ceilings, PriceSettings, read_ceilings, read_prices
from turnmill.config.parameters import PREFIX
from turnmill.errors import ConfigError, printable

FILE = "turnmill.toml"
SEVERITIES = ("info", "warning", "error", "critical")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ROUTING_KEY = re.compile(r"[A-Za-z0-9]{32}")
_MOST_PER_HOUR = 3600
# Shorter ones are guessed.
_SHORTEST_SECRET = 16


class AlertChannelType(StrEnum):
    """Where alerts can go, besides the log and the feed."""

    WEBHOOK = "webhook"
    SLACK = "slack"
    PAGERDUTY = "pagerduty"
    SNS = "sns"


# What must be known, by type, mostly secrets; each may be given as `<key>_env`, the name of an environment variable.
_REQUIRED = {
    AlertChannelType.WEBHOOK: ("url", "secret"),
    AlertChannelType.SLACK: ("url",),
    AlertChannelType.PAGERDUTY: ("routing_key",),
    AlertChannelType.SNS: ("topic",),
}
_OPTIONAL = {AlertChannelType.PAGERDUTY: ("url",)}
_COMMON = ("type", "name", "min_severity", "max_per_hour")


@dataclass(frozen=True, kw_only=True)
class AlertChannel:
    """One `[[alerts]]` table; what does not belong to its type is empty."""

    type: AlertChannelType
    # Unique; the type where none is given.
    name: str
    min_severity: str = "info"
    max_per_hour: int = 30
    # No repr: most of them are secrets.
    url: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    routing_key: str = field(default="", repr=False)
    # Its ARN; or its name, where the deployment is on AWS. No secret.
    topic: str = ""


@dataclass(frozen=True, kw_only=True)
class MlflowStore:
    """The `[mlflow]` table: where runs are mirrored to."""

    # No repr: it may hold a password.
    tracking_uri: str = field(repr=False)
    experiment: str = "turnmill"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The whole file."""

    alerts: tuple[AlertChannel, ...] = ()
    # None: nothing is mirrored.
    mlflow: MlflowStore | None = None
    # None: as a flag or a variable says, else embedded.
    backend: BackendSettings | None = None
    ceilings: Ceilings = Ceilings()
    prices: PriceSettings = PriceSettings()
    judges: tuple[JudgeSettings, ...] = ()


def load_deployment(root: Path, environ: Mapping[str, str]) -> Deployment:
    """The settings in `root`; the defaults where there is no file.

    Raises `ConfigError` with one line for each thing that is wrong, naming file and key and never a secret.
    """
    values = _read(root / FILE)
    reader = _Reader(environ)
    ceilings, prices = _limits(values, root, reader.problems)
    backend = read_backend(values.get("backend"), reader.problems)
    judges = read_judges(values.get("judges", []), reader.problems)
    deployment = replace(reader.deployment(values), backend=backend, ceilings=ceilings, prices=prices, judges=judges)
    _raise(reader.problems, root / FILE)
    return deployment


def load_limits(root: Path) -> tuple[Ceilings, PriceSettings]:
    """Ceilings and prices alone: whoever starts a run need not know the secrets that the alerts are sent with.

    Raises `ConfigError` as `load_deployment` does, for what is wrong in these two tables.
    """
    problems: list[str] = []
    limits = _limits(_read(root / FILE), root, problems)
    _raise(problems, root / FILE)
    return limits


def load_backend(root: Path) -> BackendSettings | None:
    """The backend alone, as `load_limits` does with the limits; None where the file says nothing of it."""
    problems: list[str] = []
    found = read_backend(_read(root / FILE).get("backend"), problems)
    _raise(problems, root / FILE)
    return found


def load_judges(root: Path, names: Sequence[str]) -> tuple[JudgeSettings, ...]:
    """Those of the judges that a run names, as `load_limits` does with the limits.

    Raises `ConfigError` for one that the file has not, too.
    """
    if not names:
        return ()
    problems: list[str] = []
    known = {judge.name: judge for judge in read_judges(_read(root / FILE).get("judges", []), problems)}
    _raise(problems, root / FILE)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            raise ConfigError(f"judges: {root / FILE} has no judge {printable(name)!r}; {hint}")
    return tuple(known[name] for name in names)


def _limits(values: dict[str, Any], root: Path, problems: list[str]) -> tuple[Ceilings, PriceSettings]:
    return (
        read_ceilings(values.get("ceilings", {}), problems),
        read_prices(values.get("prices", {}), root, problems),
    )


def _read(path: Path) -> dict[str, Any]:
    """The tables of the file, none where it does not exist; raises `ConfigError` for one that can't be read."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _raise(problems: list[str], path: Path) -> None:
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{many} in {path}:", *problems]))


class _Reader:
    """Reads tables and collects every problem on the way."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._environ = environ

    def deployment(self, values: dict[str, Any]) -> Deployment:
        self._refuse_unknown("", values, ("alerts", "backend", "mlflow", "ceilings", "prices", "judges"))
        mlflow = self._mlflow(values.get("mlflow"))
        tables = values.get("alerts", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.problems.append("alerts: must be tables, each one headed [[alerts]]")
            return Deployment()
        channels = [self._alert_channel(f"alerts[{number}]", table) for number, table in enumerate(tables, 1)]
        names: set[str] = {"log"}
        for number, channel in enumerate(channels, 1):
            if channel is not None:
                if channel.name in names:
                    self.problems.append(
                        f"alerts[{number}].name: {channel.name!r} is taken; give each channel a name of its own"
                    )
                names.add(channel.name)
        return Deployment(alerts=tuple(channel for channel in channels if channel is not None), mlflow=mlflow)

    def _mlflow(self, table: object) -> MlflowStore | None:
        if table is None:
            return None
        if not isinstance(table, dict):
            self.problems.append("mlflow: must be a table, headed [mlflow]")
            return None
        self._refuse_unknown("mlflow.", table, ("tracking_uri", "tracking_uri_env", "experiment"))
        experiment = table.get("experiment", MlflowStore.experiment)
        if not isinstance(experiment, str) or not experiment.strip() or not experiment.isprintable():
            self.problems.append("mlflow.experiment: must be the name of an experiment")
            experiment = MlflowStore.experiment
        uri = self._secret("mlflow", table, "tracking_uri", is_required=True)
        return MlflowStore(tracking_uri=uri, experiment=experiment)

    def _alert_channel(self, place: str, table: dict[str, Any]) -> AlertChannel | None:
        types = tuple(kind.value for kind in AlertChannelType)
        kind = table.get("type")
        if kind not in types:
            said = "is missing; it" if kind is None else f"= {printable(repr(kind))}"
            self.problems.append(f"{place}.type: {said} must be one of {', '.join(types)}")
            return None
        channel_type = AlertChannelType(kind)
        required = _REQUIRED[channel_type]
        optional = _OPTIONAL.get(channel_type, ())
        secret_keys = [key for name in (*required, *optional) for key in (name, f"{name}_env")]
        self._refuse_unknown(f"{place}.", table, (*_COMMON, *secret_keys))
        secrets = {name: self._secret(place, table, name, is_required=name in required) for name in required + optional}
        if url := secrets.get("url"):
            self._check_url(f"{place}.url", url, is_open=channel_type is AlertChannelType.WEBHOOK)
        if (key := secrets.get("routing_key")) and _ROUTING_KEY.fullmatch(key) is None:
            self.problems.append(f"{place}.routing_key: must be the 32 letters and digits of an integration")
        if (secret := secrets.get("secret")) and len(secret) < _SHORTEST_SECRET:
            self.problems.append(f"{place}.secret: must have at least {_SHORTEST_SECRET} characters")
        return AlertChannel(
            type=channel_type,
            name=self._name(place, table, channel_type),
            min_severity=self._severity(place, table),
            max_per_hour=self._max_per_hour(place, table),
            **secrets,
        )

    def _refuse_unknown(self, prefix: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                self.problems.append(f"{prefix}{printable(key)}: no such key; {hint}")

    def _name(self, place: str, table: dict[str, Any], kind: AlertChannelType) -> str:
        name = table.get("name", kind.value)
        if isinstance(name, str) and _NAME.fullmatch(name):
            return name
        self.problems.append(f"{place}.name: = {printable(repr(name))} must be 1 to 64 letters, digits, _ and -")
        return kind.value

    def _severity(self, place: str, table: dict[str, Any]) -> str:
        severity = table.get("min_severity", SEVERITIES[0])
        if severity in SEVERITIES:
            return str(severity)
        self.problems.append(
            f"{place}.min_severity: = {printable(repr(severity))} must be one of {', '.join(SEVERITIES)}"
        )
        return SEVERITIES[0]

    def _max_per_hour(self, place: str, table: dict[str, Any]) -> int:
        most = table.get("max_per_hour", AlertChannel.max_per_hour)
        # `type(...) is`, because a bool is an int to isinstance.
        if type(most) is int and 1 <= most <= _MOST_PER_HOUR:
            return most
        self.problems.append(
            f"{place}.max_per_hour: = {printable(repr(most))} must be a whole number from 1 to {_MOST_PER_HOUR}"
        )
        return AlertChannel.max_per_hour

    def _secret(self, place: str, table: dict[str, Any], name: str, *, is_required: bool) -> str:
        """The value of `name` or of the variable that `<name>_env` names; empty where there is none, or a problem."""
        variable_key = f"{name}_env"
        if name in table and variable_key in table:
            self.problems.append(f"{place}.{name}: give {name} or {variable_key}, not both")
        elif name in table:
            if isinstance(value := table[name], str) and value.strip() and value.isprintable():
                return value.strip()
            self.problems.append(f"{place}.{name}: must be a text")
        elif variable_key in table:
            return self._from_variable(f"{place}.{variable_key}", table[variable_key])
        elif is_required:
            self.problems.append(f"{place}.{name}: is missing; give {name}, or {variable_key} = the name of a variable")
        return ""

    def _from_variable(self, place: str, variable: object) -> str:
        # Not shown: who mistakes the key writes the secret itself here.
        if not isinstance(variable, str) or _VARIABLE.fullmatch(variable) is None:
            self.problems.append(f"{place}: must be the name of an environment variable")
        elif variable.startswith(PREFIX):
            self.problems.append(f"{place}: names that begin with {PREFIX} are parameters of runs; choose another one")
        elif not (value := self._environ.get(variable, "").strip()) or not value.isprintable():
            self.problems.append(f"{place}: the environment variable that it names is not set, or empty")
        else:
            return value
        return ""

    def _check_url(self, place: str, url: str, *, is_open: bool) -> None:
        """`is_open`: http is allowed to any host, since the body is signed and the URL need not be secret."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            self.problems.append(f"{place}: is no valid URL")
            return
        is_local = host in ("localhost", "127.0.0.1", "::1")
        if not host or parts.scheme not in ("http", "https") or " " in url or not url.isascii():
            self.problems.append(f"{place}: must be an https URL")
        elif parts.scheme == "http" and not (is_open or is_local):
            self.problems.append(f"{place}: must be https: the URL or the body is a secret")
        elif parts.username is not None or parts.fragment:
            self.problems.append(f"{place}: must hold no user, password or fragment")
