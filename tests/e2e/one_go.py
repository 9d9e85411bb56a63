"""Conversations rendered anew, from what was said."""

from collections.abc import Sequence

from turnmill.generation.renderer import Renderer
from turnmill.records import Call


def in_one_go(renderer: Renderer, path: Sequence[Call]) -> list[int]:
    """The tokens of a conversation, rendered anew from what was said, around what was sampled."""
    ids: list[int] = []
    for call in path:
        sampled = call.token_ids[-call.num_sampled :]
        if call.parent is None:
            ids = renderer.opening(call.messages)
        else:
            ids += renderer.continuation(call.messages, ended=ids[-1] in renderer.end_ids)
        ids += sampled
    return ids
