"""Dollars an hour by instance type: the shipped list, and a deployment's own prices over it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnmill import assets
from turnmill.config import Config, PriceSettings, Resolved
from turnmill.config.values import suggest
from turnmill.errors import ConfigError, printable

# The machine that control runs on: nobody bills its hours, unless `usd_per_hour` says so.
LOCAL = "local"
# What one reward worker is given on Fargate.
_WORKER_VCPU, _WORKER_GB = 2, 4
_LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars an hour."""

    usd_per_hour: Mapping[str, float] = field(repr=False)
    # Of the list, for people.
    region: str
    date: str

    def of(self, name: str) -> float:
        """Raises `ConfigError` that names near types."""
        if name not in self.usd_per_hour:
            near = suggest(name, self.usd_per_hour) or f"; known are {LOCAL} and the types of `turnmill cost --prices`"
            raise ConfigError(
                f'instance_type = "{printable(name)}" has no price in the list of {self.date}{near}; '
                "`[prices]` in turnmill.toml or usd_per_hour gives it one"
            )
        return self.usd_per_hour[name]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What an hour of a run costs, and of what that is made."""

    usd_per_hour: float
    text: str


def load_prices(settings: PriceSettings) -> Prices:
    """The shipped prices with a deployment's own over them; raises `ConfigError` for a bad file."""
    shipped = _read(assets.prices_file())
    own = _read(settings.file) if settings.file is not None else None
    latest = own or shipped
    found = {**shipped.usd_per_hour, **(own.usd_per_hour if own else {}), **settings.usd_per_hour}
    return Prices(usd_per_hour=found, region=latest.region, date=latest.date)


def rate_of(config: Config, prices: Prices) -> Rate:
    """What an hour of a run with these parameters costs; raises `ConfigError` for an unknown type or too few of them.

    Elsewhere than on the local machine a replica takes an instance and the trainer one.
    """
    count = config.instance_count
    if config.instance_type == LOCAL:
        own = config.usd_per_hour or prices.usd_per_hour.get(LOCAL, 0.0)
        if not own:
            return Rate(usd_per_hour=0.0, text="a local machine costs nothing unless usd_per_hour is given")
        source = "usd_per_hour" if config.usd_per_hour else "[prices]"
        return Rate(usd_per_hour=own * count, text=f"{count} x local at {own:g} USD/h ({source})")
    each = config.usd_per_hour or prices.of(config.instance_type)
    needed = config.generation_replicas + 1
    if needed > count:
        raise ConfigError(
            f"generation_replicas = {config.generation_replicas} and the trainer need {needed} instances, "
            f"instance_count = {count}: set instance_count to {needed}"
            + (f", or generation_replicas to {count - 1}" if count > 1 else "")
        )
    beside = (
        prices.of("eks-control-plane")
        + prices.of("nat-gateway")
        + _WORKER_VCPU * prices.of("fargate-vcpu")
        + _WORKER_GB * prices.of("fargate-gb")
    )
    source = "usd_per_hour" if config.usd_per_hour else f"{prices.region}, list of {prices.date}"
    return Rate(
        usd_per_hour=each * count + beside,
        text=f"{count} x {config.instance_type} at {each:g} USD/h ({source}) and {beside:.3f} USD/h for EKS, NAT and "
        f"one Fargate worker of {_WORKER_VCPU} vCPU and {_WORKER_GB} GB",
    )


def check_price(resolved: Resolved, prices: Prices) -> None:
    """Raise `ConfigError` for a price that makes a ceiling in dollars hold less: one below the list's."""
    given, listed = resolved.config.usd_per_hour, prices.usd_per_hour.get(resolved.config.instance_type, 0.0)
    if 0 < given < listed:
        raise ConfigError(
            f"usd_per_hour = {given:g} ({resolved.sources['usd_per_hour']}) is less than the {listed:g} of "
            f"{resolved.config.instance_type} in the list of {prices.date}, and turnmill.toml has ceilings in dollars: "
            "leave it out, or have [prices] in turnmill.toml say so"
        )


def _read(path: Path) -> Prices:
    """A price file: `region`, `date` and any number of `[lists.NAME.usd_per_hour]` tables."""
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: can't read this price file: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    lists = values.get("lists")
    if not isinstance(lists, dict) or not lists:
        raise ConfigError(f"{path}: holds no [lists.NAME.usd_per_hour] table with prices")
    found: dict[str, float] = {}
    for name, table in lists.items():
        prices = table.get("usd_per_hour") if isinstance(table, dict) else None
        if not isinstance(prices, dict):
            raise ConfigError(f"{path}: lists.{printable(name)}: has no table usd_per_hour")
        for kind, usd in prices.items():
            if type(usd) not in (int, float) or not 0 <= usd <= _LARGEST:
                raise ConfigError(
                    f"{path}: lists.{printable(name)}.usd_per_hour.{printable(kind)}: must be dollars an hour"
                )
            found[kind] = float(usd)
    return Prices(usd_per_hour=found, region=str(values.get("region", "?")), date=str(values.get("date", "?")))
