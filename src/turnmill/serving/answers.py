"""One request to its choices: tokens from the engine's loop, text, and what a client is told of them.

Wish -> Prompt -> one EngineCall a choice -> ReplyStream -> Piece ... -> Choice
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineCall
from turnmill.generation.replies import reads_calls
from turnmill.records import FinishReason
from turnmill.serving.conversations import Conversations, Prompt
from turnmill.serving.loop import EngineLoop
from turnmill.serving.replies import ReplyStream
from turnmill.serving.requests import Wish


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How one choice ended. Axes: T sampled tokens."""

    index: int
    text: str
    # OpenAI's form.
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    # T ids, and their log-probs.
    token_ids: list[int]
    logprobs: list[float]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one choice's text; the last one of a choice says how it ended."""

    index: int
    text: str
    choice: Choice | None = None


class Answerer:
    """Answers wishes with one model."""

    def __init__(
        self, loop: EngineLoop, conversations: Conversations, *, max_length: int, max_new_tokens: int | None
    ) -> None:
        """`max_new_tokens`: of an answer whose client names no limit; None: what there is room for."""
        self._loop = loop
        self._conversations = conversations
        self._max_length = max_length
        self._max_new_tokens = max_new_tokens
        # The renderer is one caller's at a time.
        self._rendering = asyncio.Lock()

    async def prompt(self, wish: Wish) -> Prompt:
        """Raises `GenerationFailed` where the messages can't be rendered or leave no room for the answer."""
        async with self._rendering:
            # A long one takes seconds, in which others get their tokens.
            prompt = await asyncio.to_thread(self._rendered, wish)
        if not prompt.new_ids:
            raise GenerationFailed("invalid_request", "the prompt holds no token")
        wanted = wish.max_tokens or 1
        if prompt.num_tokens + wanted > self._max_length:
            raise GenerationFailed(
                "context_length_exceeded",
                f"the prompt has {prompt.num_tokens} tokens, and {wanted} more are asked for; "
                f"this model's conversations hold at most {self._max_length}",
            )
        return prompt

    def _rendered(self, wish: Wish) -> Prompt:
        if wish.messages is not None:
            return self._conversations.prompt(wish.messages, wish.tools, wish.tool_choice)
        return self._conversations.text(wish.text or "")

    async def pieces(self, wish: Wish, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """The parts of all choices as they come; close it (`aclosing`) to end what still runs.

        Raises `GenerationFailed` and `ShuttingDown`.
        """
        seed = secrets.token_hex(16) if wish.seed is None else str(wish.seed)
        news: asyncio.Queue[Piece | None] = asyncio.Queue()

        async def play(index: int) -> None:
            try:
                async with aclosing(self._choice(wish, prompt, index, seed)) as pieces:
                    async for piece in pieces:
                        news.put_nowait(piece)
            finally:
                news.put_nowait(None)

        tasks = [asyncio.create_task(play(index), name=f"choice {index}") for index in range(wish.num_choices)]
        try:
            left = len(tasks)
            while left:
                piece = await news.get()
                if piece is not None:
                    yield piece
                    continue
                left -= 1
                for task in tasks:
                    if task.done():
                        task.result()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, wish: Wish, prompt: Prompt, index: int, seed: str) -> AsyncGenerator[Piece, None]:
        call = self._call(wish, prompt, index, seed)
        renderer = self._conversations.renderer
        stream = ReplyStream(
            renderer,
            reads_calls(renderer, wish.tools, wish.tool_choice),
            call_id=call.call_id,
            begun=prompt.begun,
            stops=wish.sampling.stop,
        )
        ids: list[int] = []
        part, result = "", None
        async with aclosing(self._loop.generate(call)) as progresses:
            async for progress in progresses:
                ids += progress.token_ids
                part, result = stream.feed(progress.token_ids), progress.result
                if result is not None or stream.is_stopped:
                    break
                if part:
                    yield Piece(index=index, text=part)
        rest, reply = stream.end(FinishReason.STOP if result is None else result.finish_reason)
        choice = Choice(
            index=index,
            text=reply.content,
            tool_calls=reply.tool_calls,
            finish_reason=str(reply.finish_reason),
            token_ids=ids,
            logprobs=result.logprobs if result is not None else [],
        )
        if result is not None and not stream.is_stopped and wish.messages is not None:
            self._conversations.remember(prompt, call.call_id, ids, reply.message)
        yield Piece(index=index, text=part + rest, choice=choice)

    def _call(self, wish: Wish, prompt: Prompt, index: int, seed: str) -> EngineCall:
        room = self._max_length - prompt.num_tokens
        return EngineCall(
            call_id=f"call-{secrets.token_hex(12)}",
            seed_parts=(seed, str(index)),
            prefix_key=prompt.prefix_key,
            new_ids=prompt.new_ids,
            context_ids=prompt.context_ids or None,
            sampling=wish.sampling,
            max_new_tokens=min(wish.max_tokens or self._max_new_tokens or room, room),
            end_ids=self._conversations.renderer.end_ids,
        )
