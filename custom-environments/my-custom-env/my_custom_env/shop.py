"""The API: a shop of customers, orders, items and warehouses, made from a seed; no network, and a clock of its own.

    request -> moved? -> token? -> rate limit? -> server error? -> endpoint -> response

The same requests in the same order always get the same responses. Faults belong to a family of paths, such as orders.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("customers", "orders", "items", "warehouses")
CITIES = ("Lisbon", "Turin", "Gdansk", "Bergen", "Ghent", "Split", "Graz", "Porto", "Malmo", "Brno")
PAGE_SIZE = 3

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Response:
    """What came back."""

    status: int
    body: Body
    # Seconds to wait, with a 429.
    retry_after: int | None = None

    @property
    def text(self) -> str:
        """As an agent reads it."""
        wait = "" if self.retry_after is None else f"Retry-After: {self.retry_after}\n"
        return f"HTTP {self.status}\n{wait}{json.dumps(self.body)}"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong in one task; families are those of `FAMILIES`."""

    # The token of the prompt is no longer valid.
    is_token_expired: bool = False
    # Server errors before a family answers for the first time, by family.
    num_errors: Mapping[str, int] = field(default_factory=dict)
    # Seconds for which a family is rate limited from its first request on, by family.
    limited_s: Mapping[str, int] = field(default_factory=dict)
    # Families that are served below /v2 alone.
    moved: tuple[str, ...] = ()


class Shop:
    """One shop for one rollout."""

    def __init__(self, seed: int, faults: Faults) -> None:
        draw = random.Random(f"shop/{seed}")
        self._faults = faults
        self._errors_left = dict(faults.num_errors)
        self._limited_until: dict[str, int] = {}
        self.now_s = 0
        # The token that a task's prompt holds; valid unless it has expired.
        self.first_token, another = (f"tok-{draw.randrange(16**6):06x}" for _ in range(2))
        self._token = another if faults.is_token_expired else self.first_token
        self.warehouses: dict[str, Body] = {
            f"w{n}": {"id": f"w{n}", "city": city} for n, city in enumerate(draw.sample(CITIES, 3), 1)
        }
        self.items: dict[str, Body] = {
            f"sku-{n}": {
                "sku": f"sku-{n}",
                "price_cents": draw.randrange(199, 9999),
                "warehouse": draw.choice(list(self.warehouses)),
            }
            for n in draw.sample(range(100, 1000), 12)
        }
        self.customers: dict[str, Body] = {f"c{n}": {"id": f"c{n}"} for n in draw.sample(range(10, 100), 5)}
        self.orders = {str(n): self._order(draw, n) for n in sorted(draw.sample(range(1000, 10000), 30))}
        # Resources that were asked for and failed for one of the faults, and those that answered.
        self.failed: set[str] = set()
        self.answered: set[str] = set()

    def _order(self, draw: random.Random, number: int) -> Body:
        item = draw.choice(list(self.items.values()))
        quantity = draw.randrange(1, 6)
        return {
            "id": number,
            "customer": draw.choice(list(self.customers)),
            "sku": item["sku"],
            "quantity": quantity,
            "status": draw.choice(["open", "open", "shipped", "cancelled"]),
            "total_cents": quantity * item["price_cents"],
        }

    def request(self, method: str, path: str, token: str) -> Response:
        """Serve one request; `path` may hold a query."""
        bare, _, query = path.partition("?")
        resource = f"{method} {bare.removeprefix('/v2').rstrip('/') or '/'}"
        response = self._serve(method, bare.rstrip("/") or "/", query, token)
        if response.status < 300:
            self.answered.add(f"{resource}?{query}" if query else resource)
        elif response.status in (401, 410, 429, 500):
            self.failed.add(f"{resource}?{query}" if query else resource)
        return response

    def _serve(self, method: str, path: str, query: str, token: str) -> Response:
        if path == "/":
            return Response(status=200, body=self._index())
        if (method, path) == ("POST", "/token"):
            return Response(status=200, body={"token": self._token})
        is_second = path.startswith("/v2/")
        family = path.removeprefix("/v2").strip("/").split("/")[0]
        if family not in FAMILIES or is_second != (family in self._faults.moved):
            if family in self._faults.moved:
                return Response(status=410, body={"error": f"gone: {family} are served below /v2/{family} now"})
            return Response(status=404, body={"error": "no such endpoint; GET / lists all"})
        if token != self._token:
            why = "expired: POST /token gives another one" if token == self.first_token else "unknown"
            return Response(status=401, body={"error": f"the token is {why}"})
        return self._fault(family) or self._endpoint(method, path.removeprefix("/v2"), query)

    def _fault(self, family: str) -> Response | None:
        """Rate limits first: who comes too early is told so and meets no server error."""
        until = self._limited_until.setdefault(family, self.now_s + self._faults.limited_s.get(family, 0))
        if self.now_s < until:
            return Response(
                status=429, body={"error": "too many requests: wait, then try again"}, retry_after=until - self.now_s
            )
        if self._errors_left.get(family, 0):
            self._errors_left[family] -= 1
            return Response(status=500, body={"error": "internal error: the same request may do better"})
        return None

    def _endpoint(self, method: str, path: str, query: str) -> Response:
        routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("GET", r"/customers/(\w+)/orders", self._orders_of),
            ("GET", r"/customers/(\w+)", lambda query, key: _one(self.customers, key)),
            ("GET", r"/orders/(\d+)", lambda query, key: _one(self.orders, key)),
            ("POST", r"/orders/(\d+)/cancel", self._cancel),
            ("GET", r"/items/([\w-]+)", lambda query, key: _one(self.items, key)),
            ("GET", r"/warehouses/(\w+)", lambda query, key: _one(self.warehouses, key)),
        ]
        for known, pattern, serve in routes:
            if found := re.fullmatch(pattern, path):
                if method == known:
                    return serve(query, found[1])
                return Response(status=405, body={"error": f"only {known} is allowed here"})
        return Response(status=404, body={"error": "no such endpoint; GET / lists all"})

    def _orders_of(self, query: str, customer: str) -> Response:
        if customer not in self.customers:
            return Response(status=404, body={"error": f"no customer {customer}"})
        asked = re.fullmatch(r"(?:page=(\d{1,3}))?", query)
        if asked is None:
            return Response(status=400, body={"error": "the query must be page=N"})
        page = int(asked[1] or 1)
        orders = [order for order in self.orders.values() if order["customer"] == customer]
        shown = orders[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        more = page + 1 if page * PAGE_SIZE < len(orders) else None
        return Response(
            status=200,
            body={"orders": [{"id": one["id"], "status": one["status"]} for one in shown], "next_page": more},
        )

    def _cancel(self, query: str, key: str) -> Response:
        order = self.orders.get(key)
        if order is None:
            return Response(status=404, body={"error": f"no order {key}"})
        if order["status"] == "shipped":
            return Response(status=409, body={"error": "it is shipped and can't be cancelled"})
        order["status"] = "cancelled"
        return Response(status=200, body={"confirmation": f"C{(int(key) * 7919) % 100000:05d}"})

    def _index(self) -> Body:
        def at(family: str) -> str:
            return f"/v2/{family}" if family in self._faults.moved and family != self._listed_wrongly else f"/{family}"

        return {
            "POST /token": "another token, for one that has expired",
            f"GET {at('customers')}/ID": "a customer",
            f"GET {at('customers')}/ID/orders?page=N": "a customer's orders, from page 1 on; next_page is the next one",
            f"GET {at('orders')}/ID": "an order: its item's sku, quantity, status and total",
            f"POST {at('orders')}/ID/cancel": "cancel an order that is not shipped; gives a confirmation",
            f"GET {at('items')}/SKU": "an item: its price and its warehouse",
            f"GET {at('warehouses')}/ID": "a warehouse: its city",
        }

    @property
    def _listed_wrongly(self) -> str:
        """The index is out of date about what moved first: the agent finds out by the response."""
        return self._faults.moved[0] if self._faults.moved else ""


def _one(known: Mapping[str, Body], key: str) -> Response:
    if key in known:
        return Response(status=200, body=dict(known[key]))
    return Response(status=404, body={"error": f"there is no {key}"})
