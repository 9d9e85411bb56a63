"""One conversation with a model in this process: no server, no event loop, one token after the other."""

import secrets
from collections.abc import Callable, Iterator

from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineCall
from turnmill.records import Sampling
from turnmill.serving.text import TextStream
from turnmill.wiring.serving import ServedModel, load


class ChatSession:
    """What was said so far, and the next answer."""

    def __init__(self, model: ServedModel, *, temperature: float | None, seed: int | None) -> None:
        """Loads the model, which takes seconds; raises `InvalidInput` where it can't be used."""
        self._engine, renderer = load(model, num_slots=1)
        from turnmill.serving.conversations import Conversations

        self._conversations = Conversations(renderer)
        self._sampling = Sampling(temperature=model.config.temperature if temperature is None else temperature)
        self._max_new_tokens = model.config.max_new_tokens
        self._seed = secrets.token_hex(16) if seed is None else str(seed)
        self._num_calls = 0
        self._system: str | None = None
        self._messages: list[dict[str, str]] = []

    def reset(self, system: str | None = None) -> None:
        """Begin anew, after this system message if there is one; raises `GenerationFailed` for what is no text."""
        self._system = _text(system) if system is not None else None
        self._messages = []

    @property
    def system(self) -> str | None:
        return self._system

    def answer(self, text: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The parts of the answer as they are sampled; it ends when `is_stopped` says so, and what was said stays.

        Raises `GenerationFailed` where the conversation is full or can't be rendered; it is as before then.
        """
        said = [*self._messages, {"role": "user", "content": _text(text)}]
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        prompt = self._conversations.prompt([*system, *said])
        room = self._engine.max_length - prompt.num_tokens
        if room < 1:
            raise GenerationFailed(
                "context_length_exceeded", f"the conversation is full ({self._engine.max_length} tokens): /reset"
            )
        call = self._call(prompt.prefix_key, prompt.context_ids, prompt.new_ids, room)
        self._engine.submit(call)
        stream = TextStream(self._conversations.renderer.decode)
        parts: list[str] = []
        ids: list[int] = []
        has_ended = False
        try:
            while not has_ended and not is_stopped():
                results = self._engine.step()
                has_ended = bool(results)
                if has_ended and results[0].error is not None:
                    raise GenerationFailed("engine_failed", results[0].error)
                new = results[0].token_ids[len(ids) :] if has_ended else self._engine.sampled(call.call_id, len(ids))
                ids += new
                parts.append(stream.feed(new) + (stream.end() if has_ended else ""))
                yield parts[-1]
        finally:
            self._engine.cancel(call.call_id)
        reply = "".join(parts) + stream.end()
        self._messages = [*said, {"role": "assistant", "content": reply}]
        if has_ended:
            self._engine.keep(call.call_id, call.call_id)
            self._conversations.remember(prompt, call.call_id, ids, self._messages[-1])

    def _call(self, key: str | None, context_ids: list[int], new_ids: list[int], room: int) -> EngineCall:
        self._num_calls += 1
        return EngineCall(
            call_id=f"turn-{self._num_calls}",
            seed_parts=(self._seed, str(self._num_calls)),
            prefix_key=key,
            new_ids=new_ids,
            context_ids=context_ids or None,
            sampling=self._sampling,
            max_new_tokens=min(self._max_new_tokens, room),
            end_ids=self._conversations.renderer.end_ids,
        )


def _text(typed: str) -> str:
    """Bytes of another encoding arrive from a terminal or a pipe as surrogates."""
    try:
        typed.encode()
    except UnicodeEncodeError as error:
        raise GenerationFailed("invalid_request", "the message is no valid UTF-8") from error
    return typed
