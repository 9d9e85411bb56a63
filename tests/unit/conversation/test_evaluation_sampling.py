"""Evaluations have a temperature of their own; calls that are trained, and the baseline's, have the run's."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.conversation.conftest import CONFIG, Form, open_world
from turnmill.config import Config
from turnmill.conversation.requests import offers_of
from turnmill.records import Purpose, RunKind

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

GREEDY = replace(CONFIG, temperature=0.7, val_temperature=0.0)
Open = Callable[[], AbstractAsyncContextManager["World"]]


@pytest.fixture(params=list(Form))
def open_greedy(tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """A run whose evaluations are greedy, served in both ways."""
    return lambda: open_world(tmp_path, GREEDY, request.param)


async def test_calls_are_sampled_as_it_fits_what_their_rollout_is_for(open_greedy: Open) -> None:
    async with open_greedy() as world:
        for purpose in Purpose:
            await world.add_sample(f"task_{purpose}", purpose=purpose)
            answer = await world.chat(await world.lease_one(), "Guess.")
            assert answer.status == 200, answer
        used = {request.purpose: request.sampling.temperature for request in world.replica.requests}
        assert used == {Purpose.TRAIN: 0.7, Purpose.BASELINE: 0.7, Purpose.EVAL: 0.0}


async def test_what_a_client_may_ask_for_depends_on_it_too(open_greedy: Open) -> None:
    async with open_greedy() as world:
        await world.add_sample(purpose=Purpose.EVAL)
        rollout = await world.lease_one()
        refused = await world.chat(rollout, "Guess.", temperature=0.7)
        assert refused.status == 400 and "the run samples with temperature 0; leave it out" in str(refused.body)
        assert (await world.chat(rollout, "Guess.", temperature=0.0)).status == 200
        training = await world.begin("task_1")
        assert (await world.chat(training, "Guess.", temperature=0.7)).status == 200
        assert (await world.chat(training, "Guess.", temperature=0.0)).status == 400


async def test_a_restarted_proxy_still_knows_what_an_attempt_is_for(open_greedy: Open) -> None:
    async with open_greedy() as world:
        await world.add_sample(purpose=Purpose.EVAL)
        rollout = await world.lease_one()
        first = await world.chat(rollout, "Guess.")
        async with world.restarted() as second:
            here = second.here(rollout)
            turns = ["Guess.", {"role": "assistant", "content": first.text}, "Again."]
            assert (await second.chat(here, *turns)).status == 200
        asked = [(request.sampling.temperature, request.parent) for request in world.replica.requests]
        assert asked == [(0.0, None), (0.0, "task_0_0")]


async def test_a_secret_that_opens_nothing_is_told_so_where_it_decides_what_is_offered(open_greedy: Open) -> None:
    async with open_greedy() as world:
        rollout = await world.begin()
        answer = await world.chat({**rollout, "base_url": rollout["base_url"].replace("/a/", "/a/x")}, "Guess.")
        assert answer.status == 401


def test_a_foreign_trainers_rollouts_are_all_alike() -> None:
    config = Config(temperature=0.7, val_temperature=0.0)
    (offer,) = offers_of(config, RunKind.EXTERNAL).values()
    assert offer.sampling.temperature == 0.7


def test_a_run_that_only_evaluates_has_no_other_temperature() -> None:
    (offer,) = offers_of(Config(temperature=0.7, val_temperature=0.5), RunKind.EVAL).values()
    assert offer.sampling.temperature == 0.5
