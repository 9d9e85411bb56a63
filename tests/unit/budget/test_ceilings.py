"""A deployment's ceilings hold over every layer of parameters, and over whoever resumes a run."""

from pathlib import Path
from typing import Any

import pytest

from turnmill.budget import raised, within_ceilings
from turnmill.config import Ceilings, Config, PriceSettings, load_config
from turnmill.config.deployment import load_deployment, load_limits
from turnmill.errors import ConfigError, InvalidInput

CEILINGS = Ceilings(usd=100.0, generated_tokens=1000, runtime_s=36000.0)
# By parameter: its ceiling, a value below and one above.
VALUES = {"budget_usd": (100, 99, 101), "budget_tokens": (1000, 999, 1001), "max_runtime_s": (36000, 35999, 36001)}
LAYERS = ("recipe", "file", "environment", "flag", "sidecar")


def layered(folder: Path, layer: str, name: str, value: int) -> Any:
    """The parameters where one layer sets a value."""
    file = folder / f"{layer}.toml"
    file.write_text(f"{name} = {value}\n")
    arguments: dict[str, dict[str, Any]] = {
        "recipe": {"recipe": file},
        "file": {"file": file},
        "environment": {"environ": {f"TURNMILL_{name.upper()}": str(value)}},
        "flag": {"flags": {name: str(value)}},
        "sidecar": {"sidecar": file},
    }
    return load_config(**arguments[layer])


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_raises_a_ceiling(tmp_path: Path, layer: str, name: str) -> None:
    """Defect 35: an upload, its sidecar included, spends no more than the deployment allows."""
    ceiling, below, above = VALUES[name]
    assert getattr(within_ceilings(layered(tmp_path, layer, name, below), CEILINGS).config, name) == below
    resolved = layered(tmp_path, layer, name, above)
    if layer == "recipe":
        # Nobody asked for it: a recipe's default is cut like any other.
        cut = within_ceilings(resolved, CEILINGS)
        assert getattr(cut.config, name) == ceiling and cut.sources[name] == "turnmill.toml"
        return
    with pytest.raises(ConfigError) as caught:
        within_ceilings(resolved, CEILINGS)
    text = str(caught.value)
    assert (
        f"{name} = {above} ({resolved.sources[name]})" in text and f" = {ceiling} ([ceilings] of turnmill.toml)" in text
    )


@pytest.mark.parametrize("name", ["budget_usd", "budget_tokens"])
def test_no_limit_is_more_than_any_ceiling(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} = 0 \(--{name.replace('_', '-')}\), which is no limit, is more than"
    ):
        within_ceilings(layered(tmp_path, "flag", name, 0), CEILINGS)


def test_a_run_without_budgets_gets_the_ceilings() -> None:
    found = within_ceilings(load_config(), CEILINGS)
    assert [getattr(found.config, name) for name in VALUES] == [100.0, 1000, 36000.0]
    assert {found.sources[name] for name in VALUES} == {"turnmill.toml"}
    assert within_ceilings(found, CEILINGS) == found
    # Lowered since: what came from there follows.
    assert within_ceilings(found, Ceilings(usd=5.0)).config.budget_usd == 5.0
    # Raised since, or taken away: a run that waited for its turn, is retried or goes on has what holds now.
    raised_since = within_ceilings(found, Ceilings(usd=500.0))
    assert (raised_since.config.budget_usd, raised_since.sources["budget_usd"]) == (500.0, "turnmill.toml")
    assert raised_since.config.max_runtime_s == Config().max_runtime_s
    assert raised_since.sources["max_runtime_s"] == "default"
    assert within_ceilings(load_config(), Ceilings()) == load_config()


@pytest.mark.parametrize("ceilings", [Ceilings(usd=5.0), Ceilings(usd_per_day=5.0)])
def test_an_upload_does_not_say_what_an_hour_costs_where_dollars_are_limited(
    tmp_path: Path, ceilings: Ceilings
) -> None:
    cheap = layered(tmp_path, "sidecar", "usd_per_hour", 1)
    with pytest.raises(ConfigError, match=r"usd_per_hour = 1 \(.*\): turnmill.toml has ceilings in dollars"):
        within_ceilings(cheap, ceilings)
    assert within_ceilings(cheap, Ceilings(runtime_s=36000.0)).config.usd_per_hour == 1.0
    assert within_ceilings(layered(tmp_path, "flag", "usd_per_hour", 1), ceilings).config.usd_per_hour == 1.0


def test_all_that_is_too_much_is_told_at_once() -> None:
    flags = {"budget_usd": "101", "budget_tokens": "1001"}
    with pytest.raises(ConfigError, match="2 problems"):
        within_ceilings(load_config(flags=flags), CEILINGS)


def test_budgets_are_raised_and_never_lowered_when_a_run_goes_on() -> None:
    config, sources = Config(budget_tokens=500), dict.fromkeys(VALUES, "default")
    found = raised(config, sources, {"budget_tokens": 800}, CEILINGS)
    assert (found.config.budget_tokens, found.sources["budget_tokens"]) == (800, "resume")
    assert raised(config, sources, {"budget_tokens": 0}, Ceilings()).config.budget_tokens == 0
    with pytest.raises(InvalidInput, match="--budget-tokens 400: the run has 500, and a budget is only raised"):
        raised(config, sources, {"budget_tokens": 400}, Ceilings())
    with pytest.raises(InvalidInput, match="--budget-usd 5: the run has no such limit"):
        raised(config, sources, {"budget_usd": 5.0}, Ceilings())
    with pytest.raises(ConfigError, match=r"budget_tokens = 2000 \(resume\) is more than this deployment allows"):
        raised(config, sources, {"budget_tokens": 2000}, CEILINGS)
    with pytest.raises(ConfigError, match=r"budget_tokens = 0 \(resume\), which is no limit"):
        raised(config, sources, {"budget_tokens": 0}, CEILINGS)


def test_limits_are_read_from_the_deployments_file_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text(
        '[[alerts]]\ntype = "slack"\nurl_env = "NOT_SET"\n'
        "[ceilings]\nusd = 12.5\ngenerated_tokens = 7\nruntime_s = 60\nusd_per_day = 30\n"
        '[prices]\nfile = "p.toml"\n"ml.p5.48xlarge" = 41.61\n'
    )
    ceilings, prices = load_limits(tmp_path)
    assert ceilings == Ceilings(usd=12.5, generated_tokens=7, runtime_s=60.0, usd_per_day=30.0)
    assert prices == PriceSettings(file=tmp_path / "p.toml", usd_per_hour={"ml.p5.48xlarge": 41.61})
    with pytest.raises(ConfigError, match="url_env"):
        load_deployment(tmp_path, {})
    assert load_limits(tmp_path / "elsewhere") == (Ceilings(), PriceSettings())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ceilings = 1", r"ceilings: must be a table, headed \[ceilings\]"),
        ("prices = 1", r"prices: must be a table, headed \[prices\]"),
        ("[ceilings]\nusdd = 1", "ceilings.usdd: no such key; did you mean usd?"),
        ("[ceilings]\nusd = 0", "ceilings.usd: = 0 must be a number greater than 0"),
        ("[ceilings]\nusd = true", "ceilings.usd: = True must be a number"),
        ("[ceilings]\nusd = nan", "ceilings.usd: = nan must be a number"),
        ("[ceilings]\ngenerated_tokens = 1.5", "ceilings.generated_tokens: = 1.5 must be a whole number"),
        ("[prices]\nfile = 1", "prices.file: must be the path of a price file"),
        ('[prices]\n"ml.p5.48xlarge" = "much"', "prices.ml.p5.48xlarge: = 'much' must be dollars an hour"),
    ],
)
def test_what_is_wrong_with_a_limit_is_told(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "turnmill.toml").write_text(text + "\n")
    for load in (load_limits, lambda root: load_deployment(root, {})):
        with pytest.raises(ConfigError, match=why):
            load(tmp_path)
