"""A deployment's ceilings over the budgets of its runs, and the budgets that a run may be given when it goes on."""

from collections.abc import Mapping
from dataclasses import dataclass

from turnmill.config import Ceilings, Config, Resolved, from_dict, to_dict
from turnmill.config.values import shown
from turnmill.errors import ConfigError, InvalidInput

FILE = "turnmill.toml"
# Parameters that limit what a run may use; 0 is no limit where that is allowed at all.
PARAMETERS = ("budget_usd", "budget_tokens", "max_runtime_s")
_UNSET = ("default", "recipe.toml")
_DEFAULTS = to_dict(Config())


@dataclass(frozen=True, kw_only=True)
class _Ceiling:
    parameter: str
    # In `[ceilings]`.
    key: str
    value: float


def _ceilings(ceilings: Ceilings) -> list[_Ceiling]:
    """Those that are set, each with the parameter that it bounds."""
    pairs = (
        ("budget_usd", "usd", ceilings.usd),
        ("budget_tokens", "generated_tokens", ceilings.generated_tokens),
        ("max_runtime_s", "runtime_s", ceilings.runtime_s),
    )
    return [_Ceiling(parameter=name, key=key, value=value) for name, key, value in pairs if value]


def within_ceilings(resolved: Resolved, ceilings: Ceilings) -> Resolved:
    """Each budget that nobody set becomes the ceiling where that is lower, and follows it when it is changed.

    Raises `ConfigError`, naming both values, for one that was set beyond it: by a file, a variable, a flag, a sidecar.
    """
    values, sources = to_dict(resolved.config), dict(resolved.sources)
    for name in PARAMETERS:
        if sources[name] == FILE:
            values[name], sources[name] = _DEFAULTS[name], "default"
    problems: list[str] = []
    for ceiling in _ceilings(ceilings):
        name, value, source = ceiling.parameter, values[ceiling.parameter], sources[ceiling.parameter]
        if 0 < value <= ceiling.value:
            continue
        if source not in _UNSET:
            asked = f"{name} = {shown(value)} ({source})" + ("" if value else ", which is no limit,")
            problems.append(
                f"{asked} is more than this deployment allows: {ceiling.key} = {shown(ceiling.value)} "
                f"([ceilings] of {FILE}); set {name} to at most {shown(ceiling.value)}, or leave it out"
            )
        values[name], sources[name] = ceiling.value, FILE
    price_source = sources.get("usd_per_hour", "default")
    if (ceilings.usd or ceilings.usd_per_day) and price_source.startswith("sidecar "):
        problems.append(
            f"usd_per_hour = {shown(values['usd_per_hour'])} ({price_source}): {FILE} has ceilings in dollars, and "
            "what an hour costs is not for an upload to say; leave it out"
        )
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{many} in the configuration:", *problems]))
    return Resolved(config=from_dict(values, source=f"with the ceilings of {FILE}"), sources=sources)


def raised(config: Config, sources: Mapping[str, str], wanted: Mapping[str, float], ceilings: Ceilings) -> Resolved:
    """The parameters of a run that goes on with the budgets `wanted`: higher than they were, or 0 for none.

    Raises `InvalidInput` for a lower one, `ConfigError` for one beyond a ceiling.
    """
    values, new_sources = to_dict(config), dict(sources)
    for name, value in wanted.items():
        before = values[name]
        if value and (not before or value < before):
            had = f"has {shown(before)}" if before else "has no such limit"
            raise InvalidInput(
                f"--{name.replace('_', '-')} {shown(value)}: the run {had}, and a budget is only raised when it goes on"
            )
        values[name], new_sources[name] = value, "resume"
    changed = Resolved(config=from_dict(values, source="resume"), sources=new_sources)
    return within_ceilings(changed, ceilings)
