"""What an answer tells of its tokens, to clients that ask for them.

    Answers -> records of their calls (and of what they continue) -> the same Answers with ids and log-probs

Read each time anew: a proxy remembers no tokens, so that its memory is the same whatever clients ask for.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec

from turnmill.conversation.attempts import Answer, Attempt
from turnmill.conversation.history import checked_call, path_of
from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore
from turnmill.records import Call


async def with_tokens(
    records: RecordStore, attempt: Attempt, answers: Sequence[Answer], *, has_prompt: bool
) -> tuple[Answer, ...]:
    """The answers to one request with what was sampled, and with the whole prompt where that was asked for."""
    # The choices of a request continue the same call.
    path = attempt.path_of(answers[0].call_id)[:-1] if has_prompt else []
    keys = [attempt.key_of(call_id) for call_id in [*path, *(answer.call_id for answer in answers)]]
    calls: dict[str, Call] = {}
    for key, stored in zip(keys, await records.get(keys), strict=True):
        if stored is None:
            raise RecordCorrupt(f"call {key} was removed while it was read")
        call = checked_call(stored)
        calls[call.call_id] = call
    return tokens_of(answers, calls, has_prompt=has_prompt)


def tokens_of(answers: Sequence[Answer], calls: Mapping[str, Call], *, has_prompt: bool) -> tuple[Answer, ...]:
    """The answers with the tokens of these calls, which are theirs and, for the prompt, what they continue."""
    return tuple(_with_tokens(answer, calls, has_prompt=has_prompt) for answer in answers)


def _with_tokens(answer: Answer, calls: Mapping[str, Call], *, has_prompt: bool) -> Answer:
    call = calls[answer.call_id]
    prompt_ids: list[int] | None = None
    if has_prompt:
        prompt_ids = list(chain.from_iterable(step.token_ids for step in path_of(call, calls)))
        del prompt_ids[len(prompt_ids) - call.num_sampled :]
    return msgspec.structs.replace(
        answer,
        sampled_ids=call.token_ids[len(call.token_ids) - call.num_sampled :],
        logprobs=call.logprobs,
        prompt_ids=prompt_ids,
    )
