"""Which attempt does a secret belong to? Attempts in memory, and how to find them again in the records.

secret -> SHA-256 -> attempt in memory | pointer record -> sample record -> attempt built from its calls
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum

from turnmill.conversation.attempts import Attempt
from turnmill.conversation.history import checked_sample, read_calls
from turnmill.conversation.requests import Heard
from turnmill.errors import LeaseLost, NotFound, Unauthorized
from turnmill.ports import RecordStore, Write
from turnmill.records import SampleRecord, SampleState, decode, encode, secret_key


class SecretKind(StrEnum):
    """What a secret opens; none opens what another does."""

    CHAT = "chat"
    REPORT = "report"
    LEASE = "lease"


@dataclass(frozen=True, kw_only=True)
class SecretPointer:
    """Stored under the hash of a secret; whether it is still good is said by the sample record alone."""

    sample_key: str
    kind: SecretKind


def new_secret() -> str:
    """256 random bits, good in a path and in a header."""
    return secrets.token_urlsafe(32)


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
        self._by_secret: dict[str, tuple[str, SecretKind]] = {}

    def __len__(self) -> int:
        return len(self._by_sample)

    def pointer_writes(self, sample: SampleRecord) -> list[Write]:
        """What makes the sample's secrets findable after a restart."""
        return [
            Write(
                key=secret_key(self._run_id, hash_in(sample, kind) or ""),
                value=encode(SecretPointer(sample_key=sample.key, kind=kind)),
                expected=None,
            )
            for kind in SecretKind
        ]

    def add(self, attempt: Attempt) -> None:
        """Serve an attempt in the place of an earlier one of its sample."""
        sample = attempt.sample
        self.retire(sample.key)
        self._by_sample[sample.key] = attempt
        for kind in SecretKind:
            self._by_secret[hash_in(sample, kind) or ""] = (sample.key, kind)

    def heard(self, secret: str) -> Heard:
        """What was heard of the attempt that a chat secret opens; nothing, where it is not in memory."""
        attempt = self._in_memory(hash_secret(secret))
        return Heard() if attempt is None else attempt.heard

    def _in_memory(self, chat_hash: str) -> Attempt | None:
        entry = self._by_secret.get(chat_hash)
        return self._by_sample.get(entry[0]) if entry is not None and entry[1] is SecretKind.CHAT else None

    def get(self, sample_key: str) -> Attempt | None:
        return self._by_sample.get(sample_key)

    def retire(self, sample_key: str) -> None:
        """Forget a sample's attempt; whatever still runs for it finds that it is no longer current."""
        attempt = self._by_sample.pop(sample_key, None)
        if attempt is not None:
            attempt.is_current = False
            for kind in SecretKind:
                self._by_secret.pop(hash_in(attempt.sample, kind) or "", None)

    async def sample_keys(self, hashes: list[str], kind: SecretKind) -> list[str | None]:
        """The keys of the samples that secrets of this kind were ever given for; None for an unknown one."""
        known = [self._by_secret.get(item) for item in hashes]
        missing = [item for item, entry in zip(hashes, known, strict=True) if entry is None]
        found: dict[str, tuple[str, SecretKind]] = {}
        if missing:
            stored = await self._records.get([secret_key(self._run_id, item) for item in missing])
            for item, record in zip(missing, stored, strict=True):
                if record is not None:
                    pointer = decode(record.value, SecretPointer)
                    found[item] = (pointer.sample_key, pointer.kind)
        entries = [entry or found.get(item) for item, entry in zip(hashes, known, strict=True)]
        return [entry[0] if entry is not None and entry[1] is kind else None for entry in entries]

    async def sample_key(self, secret_hash: str, kind: SecretKind) -> str:
        """Like `sample_keys` for one; raises `Unauthorized`."""
        (key,) = await self.sample_keys([secret_hash], kind)
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
        secret_hash = hash_secret(secret)
        attempt = self._in_memory(secret_hash)
        if attempt is None:
            key = await self.sample_key(secret_hash, SecretKind.CHAT)
            sample, _ = await self.read_sample(key)
            if sample.state is not SampleState.LEASED or not same_hash(sample.chat_secret_hash, secret_hash):
                raise LeaseLost(f"the attempt is over; sample {sample.sample_id} is {sample.state}")
            attempt = await self.restore(sample)
        if not same_hash(attempt.sample.chat_secret_hash, secret_hash):
            raise LeaseLost(f"the attempt is over; sample {attempt.sample.sample_id} was leased again")
        if not attempt.is_loaded:
            await self._load(attempt)
        return attempt

    async def restore(self, sample: SampleRecord) -> Attempt:
        """The attempt of a LEASED sample that another proxy process, or this one before a restart, leased out."""
        attempt = self._by_sample.get(sample.key)
        if attempt is None:
            # The former process may have handed out every c that it had reserved: go on past them.
            attempt = Attempt(sample=sample, next_call=sample.call_bound, call_bound=sample.call_bound)
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
