"""A scripted model that calls tools: what it says is a text in the script, and OpenAI's message in the record."""

import hashlib
from typing import Any

import msgspec

from tests.unit.conversation.conftest import TOKENS_OUT, call_for
from turnmill.records import Call, FinishReason, GenerateRequest, encode

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def calling(*calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """Says `content`, if anything, and calls tools: (name, arguments) each."""
    return encode({"content": content, "calls": calls}).decode()


def spoken(request: GenerateRequest, text: str, parent: Call | None) -> Call:
    """The record of an answer whose script is a plain text, or what `calling` made."""
    call = call_for(request, text, parent)
    if not text.startswith('{"content":'):
        return call
    said = msgspec.json.decode(text)
    calls = [
        {
            "id": hashlib.sha256(f"{request.step_id}/{index}".encode()).hexdigest()[:9],
            "type": "function",
            "function": {"name": name, "arguments": encode(arguments).decode()},
        }
        for index, (name, arguments) in enumerate(said["calls"])
    ]
    reply = {"role": "assistant", "content": said["content"], "tool_calls": calls}
    # Each answer has tokens of its own.
    number = int(request.step_id.rpartition("_")[2])
    token_ids = [*call.token_ids[:-TOKENS_OUT], *(100 * number + place for place in range(TOKENS_OUT))]
    changed = msgspec.structs.replace(
        call, reply=reply, finish_reason=FinishReason.TOOL_CALLS, token_ids=token_ids, digest=""
    )
    return changed.sealed()
