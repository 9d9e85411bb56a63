"""Which earlier call does a request continue? Pure: messages and hashes, no storage and no clock.

    messages -> prefix hashes -> BranchTable.match -> (parent call | None, index of the first new message)
    text -> BranchTable.match_text -> (parent call | None, the rest of the text)
    earlier attempt's calls -> Replay.take(parent, request digest, choice) -> next unconsumed recorded answer

Messages are compared in a canonical form (role, trimmed content, tool name, parsed tool-call arguments, tool call
ids), so that a client may send a reply back with other white space at its ends or another order of JSON keys. The hash
of a conversation begins with its tools: with others, it is another conversation.

A text (a prompt of `completions`) is compared byte by byte, and hashed so that it never equals a conversation.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnmill.records import TEXT_ROLE, Call, Sampling, digest_of, encode

_sorted = msgspec.json.Encoder(order="sorted")
# Lists and objects in one another: below what any reader's stack holds, wherever a message is read again.
MAX_NESTING = 64
# What the hashed form of a text begins with; that of a conversation has a JSON array behind its first 0 or 16 bytes.
_TEXT = b"text\0"


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


# Floats below it count in ones.
_EXACT = 2**53


def _arguments(text: Any) -> Any:
    """Tool-call arguments as a value; what the model wrote may be no JSON, then the trimmed text stands for itself."""
    if not isinstance(text, str):
        return _numbers_alike(text)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text.strip()
    return text.strip() if is_nested_deeply(value) else _numbers_alike(value)


def _numbers_alike(value: Any) -> Any:
    """`value` with whole floats as integers: JSON has one kind of number, and many clients write 1.0 back as 1."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, dict):
        return {key: _numbers_alike(item) for key, item in value.items()}
    return [_numbers_alike(item) for item in value] if isinstance(value, list) else value


def canonical(message: dict[str, Any]) -> bytes:
    """Equal bytes for messages that count as the same."""
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if not isinstance(content, str):
        content = text_of(content)
    # In a text every character counts.
    said = content if role == TEXT_ROLE else content.strip()
    called = [_canonical_call(call) for call in calls] if calls else []
    return _sorted.encode([role, said, message.get("name"), message.get("tool_call_id"), called])


def _canonical_call(call: dict[str, Any]) -> list[Any]:
    return [call.get("id"), call["function"]["name"], _arguments(call["function"].get("arguments"))]


def conversation_start(tools: Sequence[dict[str, Any]] | None) -> bytes:
    """Hash of a conversation in which nothing is said yet: of its tools, b"" without."""
    return hashlib.blake2b(_sorted.encode(tools), digest_size=16).digest() if tools else b""


def extend_hash(prefix: bytes, message: dict[str, Any]) -> bytes:
    """Hash of a conversation that goes on with `message`, from the hash of what is before it."""
    if message["role"] == TEXT_ROLE:
        return Text(message["content"]).hash
    return hashlib.blake2b(prefix + canonical(message), digest_size=16).digest()


def prefix_hashes(messages: Iterable[dict[str, Any]], start: bytes = b"") -> list[bytes]:
    """Entry i is the hash of the conversation up to and with message i."""
    hashes: list[bytes] = []
    for message in messages:
        start = extend_hash(start, message)
        hashes.append(start)
    return hashes


class Text:
    """A plain text that grows at its end, of which only hash and length are kept."""

    __slots__ = ("_hasher", "num_bytes")

    def __init__(self, text: str = "") -> None:
        encoded = text.encode()
        self._hasher = hashlib.blake2b(_TEXT + encoded, digest_size=16)
        self.num_bytes = len(encoded)

    @property
    def hash(self) -> bytes:
        return self._hasher.digest()

    def extended(self, more: str) -> "Text":
        """The text that goes on with `more`."""
        longer, encoded = Text.__new__(Text), more.encode()
        longer._hasher = self._hasher.copy()
        longer._hasher.update(encoded)
        longer.num_bytes = self.num_bytes + len(encoded)
        return longer


def request_digest(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    sampling: Sampling,
    tool_choice: str = "auto",
    num_choices: int = 1,
) -> str:
    """Digest of a call's new messages and of all parameters: what replay compares below one parent."""
    parts = [canonical(message) for message in messages]
    if tools or tool_choice != "auto" or num_choices != 1:
        parts.append(_sorted.encode([tools or None, tool_choice, num_choices]))
    return digest_of(*parts, encode(sampling))


def request_identity(last_hash: bytes, sampling: Sampling, tool_choice: str = "auto", num_choices: int = 1) -> str:
    """Digest of a whole request, from the hash up to its last message: what a transport retry repeats."""
    if tool_choice == "auto" and num_choices == 1:
        return digest_of(last_hash, encode(sampling))
    return digest_of(last_hash, encode(sampling), encode([tool_choice, num_choices]))


class Node(msgspec.Struct, kw_only=True, eq=False):
    """A call that the attempt may continue."""

    call_id: str
    # None: it starts a conversation.
    parent: "Node | None"
    # Of the conversation up to and with the call's reply.
    hash: bytes
    # The same of a text; None: it is a conversation.
    text: Text | None = None
    # False: nothing can be said behind it, because it is a text that ends with a token that is none.
    is_open: bool = True
    # Tokens of the conversation up to and with the call's reply.
    num_tokens: int
    # The attempt was given its answer. False only for calls found in the records by a restarted proxy.
    is_consumed: bool
    # A request of the attempt continued it.
    is_continued: bool = False


def hash_after(
    messages: Sequence[dict[str, Any]], parent: Node | None, tools: Sequence[dict[str, Any]] | None
) -> tuple[bytes, Text | None]:
    """Hash of what is said up to the last of these messages, and the same as a text, if it is one."""
    if messages and messages[0]["role"] == TEXT_ROLE:
        before = parent.text if parent is not None and parent.text is not None else Text()
        text = before.extended(messages[0]["content"])
        return text.hash, text
    start = parent.hash if parent is not None else conversation_start(tools)
    return (prefix_hashes(messages, start)[-1] if messages else start), None


class BranchTable:
    """The conversations and texts of one attempt, by the hash after each reply."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, list[Node]] = {}
        # Of the texts that may be gone on from.
        self._text_sizes: set[int] = set()
        self.nodes: dict[str, Node] = {}

    def add(self, node: Node) -> None:
        self.nodes[node.call_id] = node
        if node.is_open:
            self._by_hash.setdefault(node.hash, []).append(node)
            if node.text is not None:
                self._text_sizes.add(node.text.num_bytes)

    def match(self, hashes: Sequence[bytes]) -> tuple[Node | None, int]:
        """The call that a request with these prefix hashes continues, and the index of its first new message.

        The longest known beginning wins. Where equal answers to equal requests share it, each continuation takes
        the first one that none took before, so that sampling twice and going on twice makes two branches.
        """
        for end in range(len(hashes) - 1, 0, -1):
            candidates = self._by_hash.get(hashes[end - 1])
            if candidates:
                return _first_free(candidates), end
        return None, 0

    def match_text(self, text: str) -> tuple[Node | None, str]:
        """The same for a text: the call whose prompt and reply it begins with, and what comes behind them."""
        encoded, end = text.encode(), 0
        hasher = hashlib.blake2b(_TEXT, digest_size=16)
        found: list[Node] = []
        known = 0
        for size in sorted(size for size in self._text_sizes if size <= len(encoded)):
            hasher.update(encoded[end:size])
            end = size
            if candidates := self._by_hash.get(hasher.digest()):
                found, known = candidates, size
        return (_first_free(found) if found else None), encoded[known:].decode()


def _first_free(candidates: Sequence[Node]) -> Node:
    """The first consumed one that nothing continued; all of them continued, the last."""
    pool = [node for node in candidates if node.is_consumed] or candidates
    return next((node for node in pool if not node.is_continued), pool[-1])


def in_order(calls: Iterable[Call]) -> list[Call]:
    """Calls of one sample in the order of their c (ids differ in c only: shorter is earlier, then by text)."""
    return sorted(calls, key=lambda call: (len(call.call_id), call.call_id))


@dataclass
class Replay:
    """Recorded answers of earlier attempts, each handed out once, in order, below the same parent.

    At the first difference an attempt gets a call of its own, and below that there is nothing recorded: it is live.
    """

    _children: dict[tuple[str | None, str, int], deque[Call]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Replay":
        replay = cls()
        for call in in_order(calls):
            replay._children[call.parent, call.request_digest, call.choice].append(call)
        return replay

    def take(self, parent: str | None, digest: str, choice: int = 0) -> Call | None:
        """The next unconsumed answer to this choice of this request below this parent."""
        waiting = self._children.get((parent, digest, choice))
        return waiting.popleft() if waiting else None


class Siblings:
    """Puts the recorded calls of an attempt together that answer one request, choice by choice."""

    def __init__(self) -> None:
        # Not all of them there yet, by parent and digest; each by choice.
        self._open: dict[tuple[str | None, str], list[dict[int, Call]]] = {}

    def complete(self, call: Call) -> list[Call] | None:
        """All calls of its request in the order of its choices, if this is the last one. Give them in order of c."""
        if call.num_choices == 1:
            return [call]
        requests = self._open.setdefault((call.parent, call.request_digest), [])
        # The numbers of one request go up with its choices, and no request's lie between those of another.
        found = next((request for request in reversed(requests) if call.choice > max(request)), None)
        if found is None:
            requests.append(found := {})
        found[call.choice] = call
        if len(found) < call.num_choices:
            return None
        requests.remove(found)
        return list(found.values())
