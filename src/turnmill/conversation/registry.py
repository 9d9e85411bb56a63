"""Which attempt does a secret belong to? Attempts in memory, and how to find them again in the records.

secret -> name of its attempt -> attempt in memory | pointer record -> sample record -> attempt built from its calls
      '-> SHA-256: must be the one that is known for the attempt
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from turnmill.conversation.attempts import Attempt
from turnmill.conversation.history import checked_sample, read_calls
from turnmill.conversation.messages import Heard
from turnmill.errors import LeaseLost, NotFound, Unauthorized
from turnmill.ports import RecordStore, Write
from turnmill.records import SampleRecord, SampleState, decode, encode, secret_key


class SecretKind(StrEnum):
    """What a secret opens; none opens what another does."""

    CHAT = "chat"
    REPORT = "report"
    LEASE = "lease"


@dataclass(frozen=True, kw_only=True)
class AttemptPointer:
    """Stored under the name of an attempt; whether it is still the current one is said by the sample record alone."""

    sample_key: str
    # Of the attempt's secrets.
    hashes: dict[SecretKind, str]


# Characters in which all secrets of an attempt begin. They tell it from others and are no secret.
_NAME_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9_-]{16}")


def new_name() -> str:
    """A name for an attempt: 96 random bits."""
    return secrets.token_urlsafe(12)


def new_secret(name: str) -> str:
    """The name and 256 random bits, good in a path and in a header."""
    return name + secrets.token_urlsafe(32)


def name_in(secret: str) -> str:
    """The name of the attempt that a secret claims to belong to; it may be of any form."""
    return secret[:_NAME_LENGTH]


def hash_secret(secret: str) -> str:
    """SHA-256 hex; the secrets are random, so that no salt and no stretching is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def same_hash(left: str | None, right: str) -> bool:
    """In constant time."""
    return left is not None and hmac.compare_digest(left, right)


def hash_in(sample: SampleRecord, kind: SecretKind) -> str | None:
    """The hash of the current attempt's secret of a kind."""
    if kind is SecretKind.CHAT:
        return sample.chat_secret_hash
    return sample.report_secret_hash if kind is SecretKind.REPORT else sample.lease_token_hash


class Registry:
    """The attempts that this proxy serves; an ended one is forgotten, so that memory follows the open ones only."""

    def __init__(self, records: RecordStore, run_id: str) -> None:
        self._records = records
        self._run_id = run_id
        self._by_sample: dict[str, Attempt] = {}
        self._by_name: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._by_sample)

    def pointer_write(self, name: str, sample: SampleRecord) -> Write:
        """What makes the attempt findable by its secrets after a restart."""
        pointer = AttemptPointer(
            sample_key=sample.key, hashes={kind: hash_in(sample, kind) or "" for kind in SecretKind}
        )
        # No other attempt ever has this name.
        return Write(key=secret_key(self._run_id, name), value=encode(pointer), expected=0)

    def add(self, attempt: Attempt) -> None:
        """Serve an attempt in the place of an earlier one of its sample."""
        self.retire(attempt.sample.key)
        self._by_sample[attempt.sample.key] = attempt
        self._by_name[attempt.name] = attempt

    def heard(self, secret: str) -> Heard:
        """What was heard of the attempt that a chat secret opens; nothing, where it is not in memory."""
        attempt = self._in_memory(secret)
        return Heard() if attempt is None else attempt.heard

    def _in_memory(self, secret: str) -> Attempt | None:
        """The attempt that a chat secret opens."""
        attempt = self._by_name.get(name_in(secret))
        if attempt is None or not same_hash(attempt.sample.chat_secret_hash, hash_secret(secret)):
            return None
        return attempt

    def get(self, sample_key: str) -> Attempt | None:
        return self._by_sample.get(sample_key)

    def retire(self, sample_key: str) -> None:
        """Forget a sample's attempt; whatever still runs for it finds that it is no longer current."""
        attempt = self._by_sample.pop(sample_key, None)
        if attempt is not None:
            attempt.is_current = False
            del self._by_name[attempt.name]

    async def sample_keys(self, given: Sequence[str], kind: SecretKind) -> list[str | None]:
        """The keys of the samples that these secrets of a kind were ever given for; None for an unknown one."""
        names = [name_in(secret) for secret in given]
        missing = [name for name in names if name not in self._by_name and _NAME.fullmatch(name)]
        pointers: dict[str, AttemptPointer] = {}
        if missing:
            stored = await self._records.get([secret_key(self._run_id, name) for name in missing])
            for name, record in zip(missing, stored, strict=True):
                if record is not None:
                    pointers[name] = decode(record.value, AttemptPointer)
        keys: list[str | None] = []
        for secret, name in zip(given, names, strict=True):
            attempt, pointer = self._by_name.get(name), pointers.get(name)
            key, known = None, None
            if attempt is not None:
                key, known = attempt.sample.key, hash_in(attempt.sample, kind)
            elif pointer is not None:
                key, known = pointer.sample_key, pointer.hashes.get(kind)
            keys.append(key if same_hash(known, hash_secret(secret)) else None)
        return keys

    async def sample_key(self, secret: str, kind: SecretKind) -> str:
        """Like `sample_keys` for one; raises `Unauthorized`."""
        (key,) = await self.sample_keys([secret], kind)
        if key is None:
            raise Unauthorized(f"unknown {kind} secret")
        return key

    async def read_sample(self, sample_key: str) -> tuple[SampleRecord, int]:
        """The sample record and its version; raises `NotFound`."""
        (stored,) = await self._records.get([sample_key])
        if stored is None:
            raise NotFound(f"sample {sample_key} has no record")
        return checked_sample(stored), stored.version

    async def attempt_of(self, secret: str) -> Attempt:
        """The current attempt that a chat secret opens, with the recorded calls of its sample.

        Raises `Unauthorized` for an unknown secret and `LeaseLost` for that of an attempt that is over.
        """
        attempt = self._in_memory(secret)
        if attempt is None:
            sample, _ = await self.read_sample(await self.sample_key(secret, SecretKind.CHAT))
            secret_hash = hash_secret(secret)
            if sample.state is not SampleState.LEASED or not same_hash(sample.chat_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {sample.sample_id} is {sample.state}")
            attempt = await self.restore(sample, name_in(secret))
            if not same_hash(attempt.sample.chat_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {attempt.sample.sample_id} was leased again")
        if not attempt.is_loaded:
            await self._load(attempt)
        return attempt

    async def restore(self, sample: SampleRecord, name: str) -> Attempt:
        """The attempt of a LEASED sample: in memory, or leased out by another proxy process or before a restart.

        Where a later attempt than that of `sample` is in memory, it is returned.
        """
        attempt = self._by_sample.get(sample.key)
        if attempt is None or attempt.sample.attempt < sample.attempt:
            # The former process may have handed out every c that it had reserved: go on past them.
            attempt = Attempt(sample=sample, name=name, next_call=sample.call_bound, call_bound=sample.call_bound)
            attempt.is_restored = True
            self.add(attempt)
        if not attempt.is_loaded:
            await self._load(attempt)
        return attempt

    async def _load(self, attempt: Attempt) -> None:
        sample = attempt.sample
        async with attempt.lock:
            if not attempt.is_loaded:
                calls = await read_calls(self._records, sample.run_id, sample.purpose, sample.sample_id)
                attempt.load(calls)
