"""The shop, its faults, and what a rollout is worth."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from my_custom_env import load_environment
from my_custom_env.shop import Faults, Shop
from my_custom_env.tasks import solve, write

from turnmill.environment.base import ScriptedChat, ScriptedTurn
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.tools import call_of
from turnmill.errors import DataError
from turnmill.records import RolloutResult, StopReason, Task

DATA = Path(__file__).parent.parent / "data"


def tasks(name: str) -> Iterator[Task]:
    for line in (DATA / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield Task(id=row["id"], metadata=row["metadata"])


def a_task(kind: str, fault: str | None = None) -> Task:
    """The first one of a kind, or with a fault."""
    for task in tasks("train"):
        info = task.metadata["info"]
        if info["kind"] == kind and (fault is None or info["faults"][fault]):
            return task
    raise AssertionError(kind, fault)


async def play(task: Task, *turns: ScriptedTurn) -> RolloutResult:
    return await play_scored(load_environment(), task, WatchedChat(ScriptedChat(turns)), reward_range=(0.0, 1.0))


def gold(task: Task) -> list[Any]:
    return list(load_environment().gold(task))


@pytest.mark.parametrize("name", ["train", "eval"])
async def test_gold_earns_everything_and_garbage_nothing_on_every_task(name: str) -> None:
    for task in tasks(name):
        load_environment().validate(task)
        assert (await play(task, *gold(task))).reward == 1.0
        assert (await play(task, "~ garbage ~")).reward == 0.0


def test_the_data_is_what_the_script_makes_and_has_no_shop_twice(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
    train, held_out = ([task.metadata["info"]["seed"] for task in tasks(name)] for name in ("train", "eval"))
    assert len(train) >= 100 and len(held_out) >= 50
    assert len({*train, *held_out}) == len(train) + len(held_out)


def test_every_kind_of_task_and_of_fault_is_there_often() -> None:
    infos = [task.metadata["info"] for task in tasks("train")]
    for kind in ("total", "city", "open", "cancel"):
        assert sum(info["kind"] == kind for info in infos) >= 20
    for fault in ("is_token_expired", "num_errors", "limited_s", "moved"):
        assert sum(bool(info["faults"][fault]) for info in infos) >= 30
    assert all(solve(info).failing for info in infos)


async def test_each_step_on_the_way_is_worth_something() -> None:
    task = a_task("city", "num_errors")
    turns = gold(task)
    rewards = [(await play(task, *turns[:count], "I give up.")).reward or 0.0 for count in range(len(turns) + 1)]
    assert rewards[0] == 0.0 and rewards[-1] == 1.0 and rewards[1] == pytest.approx(0.1)
    assert rewards == sorted(rewards) and len(set(rewards)) >= 4


async def test_a_right_answer_without_the_way_there_is_worth_half_and_its_form() -> None:
    task = a_task("total")
    assert (await play(task, call_of("answer", text=f" {task.metadata['answer']}. "))).reward == pytest.approx(0.6)
    wrong = await play(task, call_of("answer", text="no idea"))
    assert wrong.reward == pytest.approx(0.1) and wrong.stop_reason is StopReason.END_OF_CONVERSATION


async def test_calls_that_no_tool_understands_cost_their_share() -> None:
    task = a_task("total")
    result = await play(task, call_of("request", method="PATCH", path="/"), call_of("wait", seconds=0), *gold(task))
    assert result.metrics["failed_tool_calls"] == 2
    assert result.reward == pytest.approx(1.0 - 0.1 * 2 / result.metrics["tool_calls"])


async def test_turns_that_run_out_are_scored() -> None:
    task = a_task("total")
    environment = load_environment(max_turns=2)
    chat = WatchedChat(ScriptedChat([call_of("request", method="GET", path="/")] * 3))
    result = await play_scored(environment, task, chat)
    assert (result.stop_reason, result.metrics["turns"]) == (StopReason.MAX_TURNS, 2)


# ---------------------------------------------------------------- faults


def test_an_expired_token_is_refused_until_another_one_is_fetched() -> None:
    shop = Shop(1, Faults(is_token_expired=True))
    order = next(iter(shop.orders))
    assert shop.request("GET", f"/orders/{order}", shop.first_token).status == 401
    token = shop.request("POST", "/token", "").body["token"]
    assert token != shop.first_token and shop.request("GET", f"/orders/{order}", token).status == 200
    assert "unknown" in shop.request("GET", f"/orders/{order}", "tok-wrong").text


def test_a_server_error_passes_when_the_request_is_sent_again() -> None:
    shop = Shop(1, Faults(num_errors={"orders": 2}))
    order = next(iter(shop.orders))
    statuses = [shop.request("GET", f"/orders/{order}", shop.first_token).status for _ in range(3)]
    assert statuses == [500, 500, 200]


def test_a_rate_limit_passes_with_time_and_not_with_requests() -> None:
    shop = Shop(1, Faults(limited_s={"orders": 5}))
    path = f"/orders/{next(iter(shop.orders))}"
    first = shop.request("GET", path, shop.first_token)
    assert (first.status, first.retry_after) == (429, 5) and "Retry-After: 5\n" in first.text
    shop.now_s += 3
    assert shop.request("GET", path, shop.first_token).retry_after == 2
    shop.now_s += 2
    assert shop.request("GET", path, shop.first_token).status == 200


def test_what_has_moved_is_gone_from_where_the_index_says_and_answers_at_its_new_place() -> None:
    shop = Shop(1, Faults(moved=("items",)))
    sku = next(iter(shop.items))
    assert "GET /items/SKU" in shop.request("GET", "/", "").body
    gone = shop.request("GET", f"/items/{sku}", shop.first_token)
    assert gone.status == 410 and "/v2/items" in gone.text
    assert shop.request("GET", f"/v2/items/{sku}", shop.first_token).status == 200
    assert shop.request("GET", f"/v2/orders/{next(iter(shop.orders))}", shop.first_token).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/orders/1", 404),
        ("POST", "/orders/1", 405),
        ("GET", "/customers/c0/orders", 404),
        ("POST", "/orders/1/cancel", 404),
        ("GET", "/customers", 404),
        ("GET", "//x", 404),
        ("GET", "/v2", 404),
        ("GET", "/v2/", 404),
    ],
)
def test_what_does_not_exist_is_an_answer_too(method: str, path: str, status: int) -> None:
    shop = Shop(1, Faults())
    assert shop.request(method, path, shop.first_token).status == status


def test_a_shipped_order_is_not_cancelled_and_a_page_is_a_number() -> None:
    shop = Shop(1, Faults())
    shipped = next(key for key, order in shop.orders.items() if order["status"] == "shipped")
    assert shop.request("POST", f"/orders/{shipped}/cancel", shop.first_token).status == 409
    customer = next(iter(shop.customers))
    assert shop.request("GET", f"/customers/{customer}/orders?page=x", shop.first_token).status == 400


def test_a_shop_is_the_same_each_time_and_its_faults_change_nothing_else() -> None:
    plain, faulty = Shop(7, Faults()), Shop(7, Faults(is_token_expired=True, moved=("items",)))
    assert (plain.orders, plain.items, plain.first_token) == (faulty.orders, faulty.items, faulty.first_token)


# ---------------------------------------------------------------- what is refused


def test_a_task_that_is_none_is_refused() -> None:
    task = a_task("total")
    environment = load_environment()
    changes: dict[str, Any]
    for changes in ({"info": {}}, {"info": {**task.metadata["info"], "kind": "sing"}}, {"answer": "12"}):
        with pytest.raises(DataError, match=r"metadata\.(info|answer)"):
            environment.validate(Task(id="x", metadata={**task.metadata, **changes}))
    assert solve(task.metadata["info"]).answer == task.metadata["answer"]


@pytest.mark.parametrize("value", [0, "6", 1.5, True])
def test_a_number_of_turns_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_turns must be an integer of at least 1"):
        load_environment(max_turns=value)
