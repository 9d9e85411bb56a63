"""The model of a rollout as a client of verifiers: no HTTP library in between, exact tokens with each reply.

    get_response(prompt, tools) -> Chat.complete(messages, return_token_ids) -> Reply -> Response

A full context is verifiers' `OverlongPromptError`, with which it ends a conversation in order. Every other failure
passes through verifiers as it is, so that it ends the rollout at once: as an error of verifiers' own it would be put
into the state, and the conversation scored all the same.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.clients.client import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED, Chat
from turnmill.errors import GenerationFailed
from turnmill.records import FinishReason, Reply, ReplyTokens

# What verifiers calls the model: there is one, the policy.
MODEL = "policy"
# Sampling arguments that say what happens anyway.
_NEUTRAL: Mapping[str, Any] = {"n": 1, "extra_body": {}}


class PolicyClient(Client):
    """verifiers' view of one rollout's chat."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._num_calls = 0

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        """The reply to `prompt`. Raises as `Chat.complete` does, and `OverlongPromptError` for a full context."""
        messages, _ = await self.to_native_prompt(prompt)
        reply = await self.get_native_response(messages, model, sampling_args, await self.to_native_tools(tools))
        return await self.from_native_response(reply)

    def setup_client(self, config: object) -> Chat:
        raise TypeError("a PolicyClient is made with the chat of a rollout, not with a ClientConfig")

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        if tool.strict is not None:
            function["strict"] = tool.strict
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [openai_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[dict[str, Any]],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Reply:
        params = given_sampling(sampling_args)
        if tools:
            params["tools"] = tools
        chat: Chat = self.client
        try:
            return await chat.complete(prompt, **params, return_token_ids=True)
        except GenerationFailed as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            raise OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: Reply) -> None:
        """Nothing is refused: an empty reply is what the policy said."""

    async def from_native_response(self, response: Reply) -> Response:
        self._num_calls += 1
        return Response(
            # A step of the trajectory is known by it.
            id=response.call_id or f"call-{self._num_calls}",
            created=int(time.time()),
            model=MODEL,
            usage=_usage(response),
            message=ResponseMessage(
                content=response.message.get("content"),
                tool_calls=[_tool_call(call) for call in response.tool_calls] or None,
                finish_reason=response.finish_reason.value,
                is_truncated=response.finish_reason is FinishReason.LENGTH,
                tokens=_tokens(response.tokens),
            ),
        )

    async def close(self) -> None:
        """The chat belongs to the rollout."""


def given_sampling(sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """What sampling arguments of verifiers ask for, as fields of a request; what happens anyway is left out."""
    asked = {
        name: value
        for name, value in (sampling_args or {}).items()
        if value is not None and not (name in _NEUTRAL and value == _NEUTRAL[name])
    }
    extra = asked.pop("extra_body", {})
    return {**asked, **extra}


def openai_message(message: Any) -> dict[str, Any]:
    """A message of verifiers in OpenAI's form, with the fields that verifiers' own chat client sends."""
    role = "user" if message.role == "text" else message.role
    native: dict[str, Any] = {"role": role, "content": _content(message.content)}
    if role == "tool":
        native["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        if message.tool_calls:
            native["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.reasoning_content is not None:
            native["reasoning_content"] = message.reasoning_content
    return native


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [dict(part) if isinstance(part, Mapping) else part.model_dump() for part in content]


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])


def _tokens(tokens: ReplyTokens | None) -> ResponseTokens | None:
    if tokens is None:
        return None
    return ResponseTokens(
        prompt_ids=tokens.prompt_ids,
        prompt_mask=[0] * len(tokens.prompt_ids),
        completion_ids=tokens.sampled_ids,
        completion_mask=[1] * len(tokens.sampled_ids),
        completion_logprobs=tokens.logprobs,
    )


def _usage(reply: Reply) -> Usage:
    num_prompt = reply.usage.get("prompt_tokens", len(reply.tokens.prompt_ids) if reply.tokens else 0)
    num_sampled = reply.usage.get("completion_tokens", len(reply.tokens.sampled_ids) if reply.tokens else 0)
    return Usage(
        prompt_tokens=num_prompt,
        reasoning_tokens=0,
        completion_tokens=num_sampled,
        total_tokens=num_prompt + num_sampled,
    )
