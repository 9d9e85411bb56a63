"""Tasks: a question about a shop, or something to be done there, and how it is solved.

seed -> shop, faults, question -> solve -> requests that it takes, the answer
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from my_custom_env.shop import FAMILIES, Body, Faults, Shop

NUM_TRAIN, NUM_EVAL = 160, 60
# Seeds of held-out shops begin here.
FIRST_EVAL_SEED = 10_000
SYSTEM = (
    "You work for a shop and have its HTTP API. Call `request` for one request, `wait` to let time pass, and `answer` "
    "once, when you are done. GET / lists the endpoints; all others but POST /token need a token. Requests may fail: "
    "the response says what can be done about it."
)
# A solution that takes more tries of one request than this has met a fault that has no end.
_MOST_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Action:
    """One call of a tool."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """How a task is solved."""

    actions: Sequence[Action]
    # Resources that must have answered, as `Shop.answered` names them.
    needed: frozenset[str]
    # Those of them that fail at first.
    failing: frozenset[str]
    answer: str


def shop_of(info: Body) -> Shop:
    """The shop of a task, untouched."""
    faults = {**info["faults"], "moved": tuple(info["faults"]["moved"])}
    return Shop(info["seed"], Faults(**faults))


def solve(info: Body) -> Solution:
    """Solve a task in a shop of its own, as a careful agent does."""
    agent = _Agent(shop_of(info))
    agent.get("/")
    answer = _KINDS[info["kind"]][1](agent, info["about"])
    agent.actions.append(Action(tool="answer", arguments={"text": answer}))
    needed = frozenset(agent.shop.answered - {"GET /", "POST /token"})
    return Solution(actions=agent.actions, needed=needed, failing=needed & agent.shop.failed, answer=answer)


def row(row_id: str, seed: int) -> Body:
    """A row of the data."""
    draw = random.Random(f"task/{seed}")
    kind = draw.choice(sorted(_KINDS))
    shop = Shop(seed, Faults())
    about = _about(draw, shop, kind)
    families = _families(kind)
    faults = _faults(draw, families)
    info = {"seed": seed, "kind": kind, "about": about, "faults": asdict(faults)}
    info = json.loads(json.dumps(info))
    question = _KINDS[kind][0].format(about)
    prompt = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{question} Your token is {shop_of(info).first_token}."},
    ]
    return {"id": row_id, "metadata": {"prompt": prompt, "answer": solve(info).answer, "info": info}}


# ---------------------------------------------------------------- solving


class _Agent:
    """Sends requests, deals with what fails, and keeps what it did."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.actions: list[Action] = []
        self._token = shop.first_token

    def get(self, path: str) -> Body:
        return self.send("GET", path)

    def send(self, method: str, path: str) -> Body:
        for _ in range(_MOST_TRIES):
            self._did("request", method=method, path=path, token=self._token)
            response = self.shop.request(method, path, self._token)
            if response.status == 200:
                return response.body
            if response.status == 401:
                self._token = self.send("POST", "/token")["token"]
            elif response.status == 410:
                path = f"/v2{path}"
            elif response.retry_after is not None:
                self._did("wait", seconds=response.retry_after)
                self.shop.now_s += response.retry_after
            elif response.status != 500:
                raise ValueError(f"{method} {path} can't be solved: {response.text}")
        raise ValueError(f"{method} {path} fails without end")

    def orders_of(self, customer: str) -> list[Body]:
        orders: list[Body] = []
        page: int | None = 1
        while page is not None:
            found = self.get(f"/customers/{customer}/orders?page={page}")
            orders += found["orders"]
            page = found["next_page"]
        return orders

    def _did(self, tool: str, **arguments: Any) -> None:
        self.actions.append(Action(tool=tool, arguments=arguments))


def _total(agent: _Agent, order: str) -> str:
    return str(agent.get(f"/orders/{order}")["total_cents"])


def _city(agent: _Agent, order: str) -> str:
    item = agent.get(f"/items/{agent.get(f'/orders/{order}')['sku']}")
    return str(agent.get(f"/warehouses/{item['warehouse']}")["city"])


def _open(agent: _Agent, customer: str) -> str:
    return str(sum(order["status"] == "open" for order in agent.orders_of(customer)))


def _cancel(agent: _Agent, customer: str) -> str:
    newest = max(order["id"] for order in agent.orders_of(customer) if order["status"] == "open")
    return str(agent.send("POST", f"/orders/{newest}/cancel")["confirmation"])


_KINDS: dict[str, tuple[str, Callable[[_Agent, str], str]]] = {
    "total": ("What is the total of order {} in cents?", _total),
    "city": ("From which city is the item of order {} sent?", _city),
    "open": ("How many open orders has customer {}?", _open),
    "cancel": ("Cancel the open order with the highest id of customer {}, and answer with its confirmation.", _cancel),
}


# ---------------------------------------------------------------- making


def _about(draw: random.Random, shop: Shop, kind: str) -> str:
    """The order or the customer that a task is about."""
    if kind in ("total", "city"):
        return draw.choice(list(shop.orders))
    with_open = sorted({str(order["customer"]) for order in shop.orders.values() if order["status"] == "open"})
    return draw.choice(with_open)


def _families(kind: str) -> tuple[str, ...]:
    return {"total": ("orders",), "city": FAMILIES[1:], "open": ("customers",), "cancel": ("customers", "orders")}[kind]


def _faults(draw: random.Random, families: Sequence[str]) -> Faults:
    """One or two of them, in what the task takes."""
    kinds = draw.sample(["token", "error", "limit", "moved"], draw.choice([1, 2]))
    family = {kind: draw.choice(families) for kind in ("error", "limit", "moved")}
    return Faults(
        is_token_expired="token" in kinds,
        num_errors={family["error"]: draw.choice([1, 2])} if "error" in kinds else {},
        limited_s={family["limit"]: draw.choice([2, 5, 30])} if "limit" in kinds else {},
        moved=(family["moved"],) if "moved" in kinds else (),
    )


def write(folder: Path) -> None:
    """Both files of data, of shops that have no seed in common."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, num, first in (("train", NUM_TRAIN, 0), ("eval", NUM_EVAL, FIRST_EVAL_SEED)):
        rows = [row(f"api-{name}-{index:03d}", first + index) for index in range(num)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
