"""Which earlier call does a request continue? Pure: messages and hashes, no storage and no clock.

    messages -> prefix hashes -> BranchTable.match -> (parent call | None, index of the first new message)
    earlier attempt's calls -> Replay.take(parent, request digest) -> next unconsumed recorded answer

Messages are compared in a canonical form (role, trimmed content, tool name, parsed tool-call arguments, tool call
ids), so that a client may send a reply back with other white space at its ends or another order of JSON keys.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnmill.records import Call, Sampling, digest_of, encode

_sorted = msgspec.json.Encoder(order="sorted")
# Lists and objects in one another: below what any reader's stack holds, wherever a message is read again.
MAX_NESTING = 64


def text_of(content: Any) -> str:
    """The text of a message's `content`: a string, a list of text parts, or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def is_nested_deeply(value: Any, most: int = MAX_NESTING) -> bool:
    """Whether lists and objects lie more than `most` deep in one another."""
    if not isinstance(value, list | dict):
        return False
    items = value.values() if isinstance(value, dict) else value
    return most == 0 or any(is_nested_deeply(item, most - 1) for item in items)


def _arguments(text: Any) -> Any:
    """Tool-call arguments as a value; what the model wrote may be no JSON, then the trimmed text stands for itself."""
    if not isinstance(text, str):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text.strip()
    return text.strip() if is_nested_deeply(value) else value


def canonical(message: dict[str, Any]) -> bytes:
    """Equal bytes for messages that count as the same."""
    calls = [
        [call.get("id"), call["function"]["name"], _arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return _sorted.encode(
        [
            message["role"],
            text_of(message.get("content")).strip(),
            message.get("name"),
            message.get("tool_call_id"),
            calls,
        ]
    )


def extend_hash(prefix: bytes, message: dict[str, Any]) -> bytes:
    """Hash of a conversation that goes on with `message`, from the hash of what is before it."""
    return hashlib.blake2b(prefix + canonical(message), digest_size=16).digest()


def prefix_hashes(messages: Iterable[dict[str, Any]], start: bytes = b"") -> list[bytes]:
    """Entry i is the hash of the conversation up to and with message i."""
    hashes: list[bytes] = []
    for message in messages:
        start = extend_hash(start, message)
        hashes.append(start)
    return hashes


def request_digest(messages: Sequence[dict[str, Any]], tools: Any, sampling: Sampling) -> str:
    """Digest of a call's new messages, tools and sampling parameters: what replay compares below one parent."""
    return digest_of(*(canonical(message) for message in messages), encode(tools), encode(sampling))


def request_identity(last_hash: bytes, sampling: Sampling) -> str:
    """Digest of a whole request, from the hash up to its last message: what a transport retry repeats."""
    return digest_of(last_hash, encode(sampling))


@dataclass(kw_only=True)
class Node:
    """A call that the attempt may continue."""

    call_id: str
    # None: it starts a conversation.
    parent: "Node | None"
    # Of the conversation up to and with the call's reply.
    hash: bytes
    # Tokens of the conversation up to and with the call's reply.
    num_tokens: int
    # The attempt was given its answer. False only for calls found in the records by a restarted proxy.
    is_consumed: bool
    # A request of the attempt continued it.
    is_continued: bool = False


class BranchTable:
    """The conversations of one attempt, by the hash after each reply."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, list[Node]] = {}
        self.nodes: dict[str, Node] = {}

    def add(self, node: Node) -> None:
        self.nodes[node.call_id] = node
        self._by_hash.setdefault(node.hash, []).append(node)

    def match(self, hashes: Sequence[bytes]) -> tuple[Node | None, int]:
        """The call that a request with these prefix hashes continues, and the index of its first new message.

        The longest known beginning wins. Where equal answers to equal requests share it, each continuation takes
        the first one that none took before, so that sampling twice and going on twice makes two branches.
        """
        for end in range(len(hashes) - 1, 0, -1):
            candidates = self._by_hash.get(hashes[end - 1])
            if candidates:
                pool = [node for node in candidates if node.is_consumed] or candidates
                return next((node for node in pool if not node.is_continued), pool[-1]), end
        return None, 0


def in_order(calls: Iterable[Call]) -> list[Call]:
    """Calls of one sample in the order of their c (ids differ in c only: shorter is earlier, then by text)."""
    return sorted(calls, key=lambda call: (len(call.call_id), call.call_id))


@dataclass
class Replay:
    """Recorded answers of earlier attempts, each handed out once, in order, below the same parent.

    At the first difference an attempt gets a call of its own, and below that there is nothing recorded: it is live.
    """

    _children: dict[tuple[str | None, str], deque[Call]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Replay":
        replay = cls()
        for call in in_order(calls):
            replay._children[call.parent, call.request_digest].append(call)
        return replay

    def take(self, parent: str | None, digest: str) -> Call | None:
        """The next unconsumed answer to this request below this parent."""
        waiting = self._children.get((parent, digest))
        return waiting.popleft() if waiting else None
