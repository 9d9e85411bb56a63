"""A foreign trainer and its generator, which know nothing but the fields of v0."""

from dataclasses import replace
from typing import Any

import msgspec

from tests.unit.conversation.conftest import RUN, World
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.responses import Outcome, record_message
from turnmill.ports import RunPorts
from turnmill.records import RunKind, SampleRecord

EXTERNAL = replace(RUN, kind=RunKind.EXTERNAL)


def rollout_request(sample_id: str = "row_0", **changes: Any) -> dict[str, Any]:
    request = {
        "version": "v0",
        "timestamp": "2026-01-01T00:00:00Z",
        "sample_id": sample_id,
        "max_length": 512,
        "rewards": {"range": [-1.0, 2.0]},
        "data": {"prompt": "Guess."},
    }
    return {name: value for name, value in {**request, **changes}.items() if value is not None}


class Generator:
    """A foreign generator: reads nothing of a request but the fields of v0."""

    def __init__(self, ports: RunPorts) -> None:
        self._ports = ports
        self.seen: list[dict[str, Any]] = []

    async def take(self) -> list[dict[str, Any]]:
        """What is asked for now."""
        messages = await self._ports.generate_request[0].lease(max_messages=64, lease_s=30, wait_s=5)
        asked = [msgspec.json.decode(message.body) for message in messages]
        self.seen += asked
        await self._ports.generate_request[0].ack([message.receipt for message in messages])
        return [{name: item[name] for name in ("version", "sample_id", "step_id", "messages")} for item in asked]

    @staticmethod
    def answer(request: dict[str, Any], text: str = "crane", **changes: Any) -> dict[str, Any]:
        content = [{"token": f"token_id:{index + 5}", "logprob": -0.25} for index in range(3)]
        choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": content}}
        data = {"choices": [choice], "serving_model_num": 4}
        names = {name: request[name] for name in ("version", "sample_id", "step_id")}
        return {**names, "data": data, "finish_reason": "stop", **changes}

    async def tell(self, response: dict[str, Any]) -> Outcome:
        """What a consumer of generate_response does with the answer."""
        return await record_message(self._ports, EXTERNAL, msgspec.json.encode(response))

    async def run(self) -> None:
        while True:
            for request in await self.take():
                await self.tell(self.answer(request, text=f"answer {request['step_id']}"))


async def opened(world: World, sample_id: str = "row_0", **changes: Any) -> SampleRecord:
    return await open_occurrence(world.ports, EXTERNAL, world.config, rollout_request(sample_id, **changes))
