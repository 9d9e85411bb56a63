"""Price lists: the shipped one, a deployment's own over it, and what an hour of a run costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.budget import Prices, check_price, load_prices, rate_of
from turnmill.config import Config, PriceSettings, Resolved
from turnmill.errors import ConfigError

BESIDE = 0.10 + 0.045 + 2 * 0.04048 + 4 * 0.004445


def shipped() -> Prices:
    return load_prices(PriceSettings())


def rate(prices: Prices | None = None, **changes: Any) -> float:
    return rate_of(Config(**changes), prices or shipped()).usd_per_hour


def test_the_shipped_list_has_its_date_and_region_and_the_types_of_the_reference() -> None:
    prices = shipped()
    assert (prices.region, prices.date) == ("us-east-1", "2026-09-10")
    assert prices.of("ml.p5.48xlarge") == 63.296 and prices.of("ml.p5en.48xlarge") > 63.296
    assert prices.of("eks-control-plane") == 0.10 and prices.of("nat-gateway") == 0.045
    assert all(usd > 0 for usd in prices.usd_per_hour.values())


def test_an_unknown_type_names_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r'instance_type = "ml.p5.47xlarge".*did you mean ml.p5.48xlarge\?'):
        rate(instance_type="ml.p5.47xlarge", instance_count=4)
    with pytest.raises(ConfigError, match="known are local and the types of `turnmill cost --prices`"):
        rate(instance_type="?", instance_count=4)


def test_a_local_machine_costs_nothing_unless_its_price_is_given() -> None:
    assert rate() == 0.0
    assert rate(usd_per_hour=2.5, instance_count=2) == 5.0


def test_instances_and_what_runs_beside_them_are_added_up() -> None:
    """Defect 35: ten instances of the reference's type cost hundreds of dollars an hour, and nobody says so."""
    found = rate(instance_type="ml.p5.48xlarge", instance_count=10, generation_replicas=4)
    assert found == pytest.approx(632.96 + BESIDE)
    assert rate(instance_type="any.thing", instance_count=3, usd_per_hour=10.0) == pytest.approx(30 + BESIDE)


def test_replicas_and_trainer_must_fit_the_instances_but_on_a_local_machine() -> None:
    assert rate(generation_replicas=4) == 0.0
    with pytest.raises(ConfigError, match="need 5 instances, instance_count = 4: set instance_count to 5"):
        rate(instance_type="ml.p5.48xlarge", instance_count=4, generation_replicas=4)
    rate(instance_type="ml.p5.48xlarge", instance_count=5, generation_replicas=4)


def test_a_deployments_own_prices_lie_over_the_shipped_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'region = "eu-west-1"\ndate = "2026-11-01"\n[lists.mine.usd_per_hour]\n"ml.p5.48xlarge" = 70\n"mine.1" = 1.5\n'
    )
    prices = load_prices(PriceSettings(file=file, usd_per_hour={"mine.1": 2.0}))
    assert (prices.region, prices.date) == ("eu-west-1", "2026-11-01")
    assert (prices.of("ml.p5.48xlarge"), prices.of("mine.1"), prices.of("ml.p4d.24xlarge")) == (70.0, 2.0, 25.251286)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = ", "not valid TOML"),
        ("", r"holds no \[lists.NAME.usd_per_hour\]"),
        ("[lists.a]\n", "lists.a: has no table usd_per_hour"),
        ('[lists.a.usd_per_hour]\n"b" = "1"\n', "lists.a.usd_per_hour.b: must be dollars an hour"),
        ('[lists.a.usd_per_hour]\n"b" = -1\n', "must be dollars an hour"),
        ('[lists.a.usd_per_hour]\n"b" = nan\n', "must be dollars an hour"),
        ('[lists.a.usd_per_hour]\n"b" = true\n', "must be dollars an hour"),
    ],
)
def test_a_bad_price_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        load_prices(PriceSettings(file=file))
    assert str(file) in str(caught.value)


def test_a_price_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read this price file: no such file"):
        load_prices(PriceSettings(file=tmp_path / "none.toml"))


def test_the_local_machine_has_the_price_that_the_deployment_gives_it() -> None:
    prices = load_prices(PriceSettings(usd_per_hour={"local": 3.0}))
    assert rate(prices, instance_count=2) == 6.0 and rate(prices, usd_per_hour=1.0) == 1.0


def test_too_few_instances_are_told_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"set instance_count to 2$"):
        rate(instance_type="ml.p5.48xlarge")
    with pytest.raises(ConfigError, match="set instance_count to 5, or generation_replicas to 1"):
        rate(instance_type="ml.p5.48xlarge", instance_count=2, generation_replicas=4)


def test_no_run_makes_a_ceiling_of_dollars_hold_less_by_a_lower_price() -> None:
    """Defect 35: else a flag or a file would undo what the deployment allows."""
    config = Config(instance_type="ml.p5.48xlarge", instance_count=2, usd_per_hour=1.0)
    given = Resolved(config=config, sources={"usd_per_hour": "--usd-per-hour"})
    with pytest.raises(ConfigError, match=r"usd_per_hour = 1 \(--usd-per-hour\) is less than the 63.296 of ml.p5"):
        check_price(given, shipped())
    check_price(given, load_prices(PriceSettings(usd_per_hour={"ml.p5.48xlarge": 0.5})))
    check_price(replace(given, config=replace(config, usd_per_hour=70.0)), shipped())
    check_price(replace(given, config=Config(usd_per_hour=0.1)), shipped())
