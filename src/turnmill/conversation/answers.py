"""Answers as OpenAI's clients read them: completions of chats and of texts, and the names of the model."""

from collections.abc import Sequence
from typing import Any

from turnmill.conversation.attempts import Answer


def completion_of(answers: Sequence[Answer], model: str, *, is_text: bool) -> dict[str, Any]:
    """A chat completion, or that of a text, with a choice for each answer."""
    first, num_sampled = answers[0], sum(answer.num_sampled_tokens for answer in answers)
    completion: dict[str, Any] = {
        "id": first.call_id,
        "object": "text_completion" if is_text else "chat.completion",
        "created": int(first.created_at),
        "model": model,
        "choices": [_text_choice(answer) if is_text else _chat_choice(answer) for answer in answers],
        "usage": {
            "prompt_tokens": first.num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": first.num_prompt_tokens + num_sampled,
        },
    }
    if len(answers) > 1:
        # The completion's id is that of the first one's call.
        for choice, answer in zip(completion["choices"], answers, strict=True):
            choice["call_id"] = answer.call_id
    if first.prompt_ids is not None and not is_text:
        # Where vLLM tells them, as are those of the choices.
        completion["prompt_token_ids"] = first.prompt_ids
    return completion


def _chat_choice(answer: Answer) -> dict[str, Any]:
    message = answer.reply
    if message.get("tool_calls") and not message.get("content"):
        message = {**message, "content": None}
    choice: dict[str, Any] = {
        "index": answer.choice,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer) if answer.logprobs else None,
    }
    if answer.prompt_ids is not None:
        choice["token_ids"] = answer.sampled_ids
    return choice


def _text_choice(answer: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": answer.choice,
        "text": answer.reply.get("content") or "",
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    if answer.prompt_ids is not None:
        choice |= {"token_ids": answer.sampled_ids, "prompt_token_ids": answer.prompt_ids}
    return choice


def _logprobs(answer: Answer) -> dict[str, Any]:
    """Tokens by their ids: a token that is half a character has no text of its own."""
    pairs = zip(answer.sampled_ids, answer.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token_id, logprob in pairs
        ],
        "refusal": None,
    }


def model_of(name: str, created_at: float) -> dict[str, Any]:
    """A name of the run's model."""
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "turnmill"}


def models_of(names: Sequence[str], created_at: float) -> dict[str, Any]:
    """All names of the run's model."""
    return {"object": "list", "data": [model_of(name, created_at) for name in names]}
