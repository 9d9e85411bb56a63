"""The other side of an external run: a trainer that asks for rollouts, and a generator that answers calls.

    Trainer.ask -> rollout Lambda ... generate_request -> Generator -> generate_response ... rollout_response -> Trainer

It stands for a closed trainer: it knows the documented messages (version v0) and where they go, shares no code with
what it is tested against, and reads no other field. It plays Wordle: some conversations with words that the marks
allow, others at random, so that rewards differ.
"""

import hashlib
import json
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.config import Config

# Documented fields, by message; all others are as good as not there.
_GENERATE_REQUEST = ("version", "sample_id", "step_id", "messages")
_ROLLOUT_RESPONSE = ("version", "sample_id", "stop_reason", "rewards")
_MARK = re.compile(r"([a-z])([-+?])")
_END_TOKEN = 0
_WAIT_S = 1
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the messages of a run go: what the outputs of its stack say."""

    endpoint_url: str
    region: str
    rollout_function: str
    rollout_response_url: str
    generate_request_url: str
    generate_response_url: str

    def client(self, service: str) -> Any:
        config = Config(retries={"mode": "standard"}, max_pool_connections=32, read_timeout=30)
        return boto3.client(service, endpoint_url=self.endpoint_url, region_name=self.region, config=config)


# ---------------------------------------------------------------- the trainer


def rollout_request(sample_id: str, data: Mapping[str, Any], *, max_length: int = 4096) -> Message:
    """One rollout to be played, with rewards between 0 and 1."""
    return {
        "version": "v0",
        "timestamp": datetime.now(UTC).isoformat(),
        "sample_id": sample_id,
        "max_length": max_length,
        "rewards": {"range": [0.0, 1.0]},
        "data": dict(data),
    }


class Trainer:
    """Asks for rollouts, and collects how they ended."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lambda = place.client("lambda")
        self._sqs = place.client("sqs")
        # All answers so far, by sample.
        self.responses: dict[str, list[Message]] = defaultdict(list)

    def ask(self, request: Message) -> Any:
        """The rollout Lambda's answer; fails where the function itself failed."""
        answer = self._lambda.invoke(
            FunctionName=self._place.rollout_function,
            InvocationType="RequestResponse",
            Payload=json.dumps(request).encode(),
        )
        payload = json.loads(answer["Payload"].read() or b"null")
        assert "FunctionError" not in answer, f"the rollout Lambda failed: {payload}"
        return payload

    def collect(self, until: Callable[[], bool], *, patience_s: float) -> bool:
        """Take rollout responses until `until()`; False where patience is out before."""
        give_up = time.monotonic() + patience_s
        while not until():
            if time.monotonic() > give_up:
                return False
            for response in receive(self._sqs, self._place.rollout_response_url):
                known = {name: response[name] for name in _ROLLOUT_RESPONSE}
                self.responses[known["sample_id"]].append(known)
        return True


def receive(sqs: Any, queue_url: str) -> list[Message]:
    """Up to ten messages, which are removed; waits a second for the first one."""
    answer = sqs.receive_message(QueueUrl=queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=_WAIT_S)
    messages = answer.get("Messages", [])
    if messages:
        entries = [
            {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]} for number, message in enumerate(messages)
        ]
        sqs.delete_message_batch(QueueUrl=queue_url, Entries=entries)
    return [json.loads(message["Body"]) for message in messages]


# ---------------------------------------------------------------- the generator


@dataclass(kw_only=True)
class Generator:
    """Answers generate requests until it is left: `with Generator(...)`. Several threads take from the one queue."""

    place: Place
    words: Sequence[str]
    # Which weights it says that it serves.
    serving_model_num: int = 0
    num_threads: int = 4
    # Sends an answer again, as a queue without deduplication would, for every so many; 0: never.
    repeat_every: int = 0
    # Sends something that is no answer before every so many answers; 0: never.
    malform_every: int = 0
    # Samples whose first answer can't be used: one of its tokens is none.
    spoiled: set[str] = field(default_factory=set)
    # What was answered, by step: the last word is what stands.
    said: dict[str, str] = field(default_factory=dict)
    # Seconds that an answer takes, at most.
    think_s: float = 0.0
    # Requests that lacked a documented field.
    broken: list[Message] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> "Generator":
        self._stop = threading.Event()
        self._number = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"generator-{number}") for number in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            sqs = self.place.client("sqs")
            while not self._stop.is_set():
                for request in receive(sqs, self.place.generate_request_url):
                    self._answer(sqs, request)
        except BaseException as error:  # the test looks at it
            self.errors.append(error)

    def _answer(self, sqs: Any, request: Message) -> None:
        if not all(name in request for name in _GENERATE_REQUEST) or request["version"] != "v0":
            self.broken.append(request)
            return
        messages, step_id, sample_id = request["messages"], request["step_id"], request["sample_id"]
        draw = random.Random(step_id)
        if self.think_s:
            self._stop.wait(draw.random() * self.think_s)
        word = guess(messages, self.words, sample_id=sample_id, draw=draw)
        response = generate_response(request, word, serving_model_num=self.serving_model_num, draw=draw)
        with self._lock:
            self._number += 1
            number = self._number
            self.said[step_id] = word
            is_spoiled = sample_id in self.spoiled
            self.spoiled.discard(sample_id)
        if self.malform_every and number % self.malform_every == 0:
            for index, body in enumerate(malformed(response)):
                self._send(sqs, sample_id, f"{step_id}-malformed-{index}", body)
        if is_spoiled:
            response["data"]["choices"][0]["logprobs"]["content"][0]["token"] = "c"
        self._send(sqs, step_id, step_id, json.dumps(response))
        if self.repeat_every and number % self.repeat_every == 0:
            self._send(sqs, step_id, f"{step_id}-again", json.dumps(response))

    def _send(self, sqs: Any, group: str, name: str, body: str) -> None:
        sqs.send_message(
            QueueUrl=self.place.generate_response_url,
            MessageBody=body,
            MessageGroupId=_short(group),
            # A step that is asked again is answered again.
            MessageDeduplicationId=_short(f"{name}/{time.time_ns()}"),
        )


def generate_response(request: Message, word: str, *, serving_model_num: int, draw: random.Random) -> Message:
    """The answer to one call: its tokens are the word's letters and an end of turn."""
    tokens = [*(ord(letter) for letter in word), _END_TOKEN]
    content = [{"token": f"token_id:{token}", "logprob": -3.0 * draw.random()} for token in tokens]
    choice = {"message": {"content": word}, "finish_reason": "stop", "logprobs": {"content": content}}
    return {
        "version": "v0",
        "sample_id": request["sample_id"],
        "step_id": request["step_id"],
        "data": {"choices": [choice], "serving_model_num": serving_model_num},
        "finish_reason": "stop",
    }


def malformed(response: Message) -> list[str]:
    """What a broken generator may send: no JSON, no call, a call of nobody, one of a sample of nobody."""
    nameless = {name: value for name, value in response.items() if name != "step_id"}
    stranger = {**response, "step_id": f"{response['step_id']}-of-nobody"}
    nobodys = {**response, "sample_id": "nobodys_0"}
    return ["{no json", json.dumps(nameless), json.dumps(stranger), json.dumps(nobodys)]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- the player


def guess(messages: Sequence[Message], words: Sequence[str], *, sample_id: str, draw: random.Random) -> str:
    """The next word. Half of the samples are played by what the marks allow, the others at random."""
    if hashlib.sha256(sample_id.encode()).digest()[0] % 2:
        return draw.choice(words)
    allowed = list(words)
    before = None
    for message in messages:
        if message["role"] == "assistant":
            before = str(message["content"]).strip()
        elif before is not None:
            told = _MARK.findall(str(message["content"]))
            said = before
            allowed = [
                word for word in allowed if word != said and list(zip(said, marks(said, word), strict=True)) == told
            ]
    return draw.choice(allowed or list(words))


def marks(said: str, answer: str) -> str:
    """`+` right place, `?` elsewhere, `-` absent; each letter of the answer counts once."""
    result = ["-"] * len(said)
    left: dict[str, int] = defaultdict(int)
    for place, (letter, right) in enumerate(zip(said, answer, strict=True)):
        if letter == right:
            result[place] = "+"
        else:
            left[right] += 1
    for place, letter in enumerate(said):
        if result[place] == "-" and left[letter]:
            left[letter] -= 1
            result[place] = "?"
    return "".join(result)
