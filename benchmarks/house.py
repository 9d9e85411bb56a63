"""A deployment for benchmarks: control, worker and replica as processes of their own, with parts that can be swapped.

    python -m benchmarks.house control ...   the control process: records, proxy, launcher; says when all is ready
    python -m benchmarks.house role ...      what its launcher starts; every part that is not swapped is the shipped one

Swapped are: the replica's engine (`INSTANT=1`: answers at once) and the worker's environment (`FULL_TURNS=1`: plays all
turns and rewards right places, so that every conversation costs the same and every group has signal).
"""

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import QUIET_ENV, ROOT, allow_many_files
from benchmarks.instant import InstantEngine, reply_of
from turnmill import assets
from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.config import Config, from_dict, to_dict
from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.conversation.sessions import Sessions
from turnmill.environment.base import Chat, Message, Outcome, Score, opening_messages
from turnmill.environment.wordle import INVALID_GUESS, Wordle, answer_of, feedback, marks, parse_guess
from turnmill.errors import RoleFailed
from turnmill.intake.dataset import read_tasks, validate
from turnmill.pipeline.engine import RunRecord, load_run
from turnmill.ports import RoleSpec, RunPorts
from turnmill.records import (
    Purpose,
    ReplicaStatus,
    Run,
    RunStatus,
    SampleRecord,
    StageRecord,
    StopReason,
    Task,
    TrainingStatus,
    decode,
    live_replicas,
    replica_key,
    replica_name,
    training_key,
    worker_key,
)
from turnmill.rollout.scheduler import Scheduler
from turnmill.wiring import variables
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.roles import run_role

INSTANT, FULL_TURNS = "TURNMILL_BENCH_INSTANT", "TURNMILL_BENCH_FULL_TURNS"
READY_S = 120.0


class FullTurns(Wordle):
    """Wordle without an early end: all turns are played, and the reward is the mean share of right places.

    `spelled` is the form for a model that spells and need not know what a word is: a reply counts as its first five
    characters, filled up with dots, and its marks alone are told, so that what is observed is always equally long.
    With `pause_s`, each turn takes so many seconds beside the model's.
    """

    def __init__(self, *, max_turns: int = 6, spelled: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(max_turns=max_turns)
        self.spelled = spelled
        self.pause_s = pause_s

    async def play(self, task: Task, chat: Chat) -> Outcome:
        answer = answer_of(task)
        messages = opening_messages(task)
        for turn in range(self.max_turns):
            reply = await chat.complete(messages)
            messages.append(reply.message)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            if turn + 1 < self.max_turns:
                messages.append({"role": "user", "content": self._told(self._guess(reply.content), answer)})
        return Outcome(stop_reason=StopReason.MAX_TURNS)

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        answer = answer_of(task)
        said = [message.get("content") or "" for message in messages[1:] if message["role"] == "assistant"]
        guesses = [guess for text in said if (guess := self._guess(text))]
        right = sum(marks(guess, answer).count("+") for guess in guesses)
        return Score(reward=right / (5 * self.max_turns), metrics={"turns": len(said)})

    def _guess(self, text: str) -> str | None:
        return text.strip().lower()[:5].ljust(5, ".") if self.spelled else parse_guess(text)

    def _told(self, guess: str | None, answer: str) -> str:
        if guess is None:
            return INVALID_GUESS
        return marks(guess, answer) if self.spelled else feedback(guess, answer)


# ---------------------------------------------------------------- roles


def _role(args: argparse.Namespace) -> None:
    """A shipped role, or the same with a swapped part."""
    allow_many_files()
    if args.role == "replica" and os.environ.get(INSTANT):
        run_loop(_instant_replica(args.root, args.run, args.name))
    elif args.role == "worker" and os.environ.get(FULL_TURNS):
        run_loop(_full_turns_worker(args.name))
    else:
        run_role(args.role, root=args.root, run_id=args.run, name=args.name)


async def _parent_gone() -> None:
    """Return at the end of file on standard input, which the launcher holds open."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(0, gone.set)
    await gone.wait()
    loop.remove_reader(0)


async def _until_parent_gone(stop: asyncio.Event) -> None:
    await _parent_gone()
    stop.set()


async def _instant_replica(root: Path, run_id: str, name: str) -> None:
    from turnmill.generation.renderer import Renderer
    from turnmill.generation.replica import run_replica

    runs = open_root_records(root)
    config = from_dict((await load_run(runs, run_id)).config)
    runs.close()
    folder = assets.model_folder(config.base_model)
    stop = asyncio.Event()
    watch = asyncio.create_task(_until_parent_gone(stop))
    ports = open_run(root, run_id, num_replicas=config.generation_replicas)
    try:
        await run_replica(
            ports,
            run_id=run_id,
            name=name,
            index=int(name.rsplit("-", 1)[1]),
            config=config,
            engine=InstantEngine(reply_of(folder), num_slots=config.generation_slots, max_length=config.max_length),
            renderer=Renderer(folder),
            stop=stop,
        )
    finally:
        watch.cancel()
        ports.close()


async def _full_turns_worker(name: str) -> None:
    from turnmill.rollout.worker import run_worker

    config = from_dict(json.loads(os.environ[variables.WORKER_CONFIG]))
    stop = asyncio.Event()
    watch = asyncio.create_task(_until_parent_gone(stop))
    try:
        await run_worker(
            proxy_url=os.environ[variables.PROXY_URL],
            worker_token=os.environ[variables.WORKER_TOKEN],
            name=name,
            config=config,
            environment=FullTurns(**config.env_args),
            stop=stop,
        )
    finally:
        watch.cancel()


# ---------------------------------------------------------------- control


@asynccontextmanager
async def _proxy(root: Path, run: Run, config: Config, token: str) -> AsyncIterator[tuple[RunPorts, dict[str, str]]]:
    """The proxy that `turnmill run` serves from its control process; ports, and what a worker needs to reach it."""
    ports = open_run(root, run.run_id, num_replicas=config.generation_replicas)
    sessions = Sessions(ports, run=run, config=config)
    try:
        async with sessions, serve(create_app(sessions)) as port:
            sessions.base_url = f"http://127.0.0.1:{port}"
            yield (
                ports,
                {
                    variables.WORKER_TOKEN: token,
                    variables.PROXY_URL: sessions.base_url,
                    variables.WORKER_CONFIG: json.dumps(to_dict(config)),
                },
            )
    finally:
        ports.close()


async def _until(probe: Callable[[], Awaitable[bool]], launcher: ProcessLauncher, timeout_s: float) -> None:
    """Wait for `probe`; raises `RoleFailed` once a role has died or time is out."""
    give_up = time.monotonic() + timeout_s
    while not await probe():
        dead = [role for role in await launcher.statuses() if role.state != "running" and role.exit_code != 0]
        if dead or time.monotonic() > give_up:
            tail = "\n".join(dead[0].log_tail) if dead else f"not done within {timeout_s:.0f} s"
            raise RoleFailed(f"{', '.join(role.name for role in dead)}: {tail}")
        await asyncio.sleep(0.1)


async def _control(root: Path, config: Config, data: Path | None) -> None:
    """With data a whole training run; without, a proxy, a worker and a replica until standard input ends."""
    token = secrets.token_urlsafe(32)
    run = Run(
        run_id=f"bench-{secrets.token_hex(4)}",
        cause=f"benchmark/{secrets.token_hex(4)}",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config=to_dict(config),
        sources={},
        data_path=str(data) if data else None,
        worker_token_hash=hashlib.sha256(token.encode()).hexdigest(),
        pid=os.getpid(),
    )
    runs = open_root_records(root)
    launcher = ProcessLauncher(root, command=(sys.executable, "-m", "benchmarks.house"))
    try:
        record = await RunRecord.create(runs, run)
        if data is not None:
            digest = (await asyncio.to_thread(validate, data)).digest
            result = {"data": {"path": str(data), "digest": digest}}
            await record.stage(StageRecord(name="ValidateData", state="done", started_at=time.time(), result=result))
        async with _proxy(root, run, config, token) as (ports, worker_env):
            threads = {name: str(config.torch_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            replicas = [replica_name(index) for index in range(config.generation_replicas)]
            for name in replicas:
                await launcher.start(RoleSpec(role="replica", name=name, run_id=run.run_id, env=threads))
            await launcher.start(RoleSpec(role="worker", name="worker-0", run_id=run.run_id, env=worker_env))

            async def ready() -> bool:
                (worker,) = await ports.records.get([worker_key(run.run_id, "worker-0")])
                found = await ports.records.get([replica_key(run.run_id, name) for name in replicas])
                statuses = [decode(item.value, ReplicaStatus) for item in found if item is not None]
                return worker is not None and len(live_replicas(statuses, time.time())) == len(replicas)

            async def trained() -> bool:
                (stored,) = await ports.records.get([training_key(run.run_id)])
                return stored is not None and decode(stored.value, TrainingStatus).state != "running"

            await _until(ready, launcher, READY_S)
            pids = {status.name: status.pid for status in await launcher.statuses()}
            print(json.dumps({"run_id": run.run_id, "pids": {"proxy": os.getpid(), **pids}}), flush=True)
            if data is None:
                await _parent_gone()
            else:
                await launcher.start(RoleSpec(role="trainer", name="trainer", run_id=run.run_id, env=threads))
                await _until(trained, launcher, config.max_runtime_s)
            await launcher.close()
    finally:
        await launcher.close()
        runs.close()


# ---------------------------------------------------------------- the player's side


@dataclass(frozen=True, kw_only=True)
class House:
    """A running deployment with an instant engine, as its player sees it."""

    run_id: str
    # Pids of `proxy`, `worker-0` and `replica-0`.
    pids: dict[str, int]
    ports: RunPorts
    config: Config


@asynccontextmanager
async def open_house(root: Path, config: Config) -> AsyncIterator[House]:
    """Start the processes, wait until they are ready, end them afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.house", "control", "--root", str(root), "--config", json.dumps(to_dict(config))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **QUIET_ENV, INSTANT: "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        ready = json.loads(line)
        ports = open_run(root, ready["run_id"], num_replicas=config.generation_replicas)
        try:
            yield House(run_id=ready["run_id"], pids=ready["pids"], ports=ports, config=config)
        finally:
            ports.close()
    finally:
        process.stdin.close()
        await process.wait()


class Player:
    """Asks for conversations as a trainer does: a batch first, then one for each that ended."""

    def __init__(self, house: House) -> None:
        ports = house.ports
        self._scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, house.run_id, Purpose.TRAIN, house.config
        )
        self._tasks = read_tasks(assets.wordle_data("train"))
        self._num_asked = 0

    async def __aenter__(self) -> "Player":
        await self._scheduler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scheduler.close()

    async def play(self, total: int, *, window: int) -> tuple[float, list[SampleRecord]]:
        """Play `total` conversations, at most `window` asked for at a time; seconds, and how they ended."""
        begun = time.perf_counter()
        left = total - await self._ask(min(window, total))
        ended: list[SampleRecord] = []
        while len(ended) < total:
            news = await self._scheduler.ended()
            ended += news
            left -= await self._ask(min(left, len(news)))
        seconds = time.perf_counter() - begun
        failed = [sample for sample in ended if not sample.is_valid]
        if failed:
            raise RuntimeError(f"{len(failed)} conversations failed, the last one: {failed[-1].detail}")
        return seconds, ended

    async def _ask(self, num: int) -> int:
        if num:
            tasks = [self._tasks[(self._num_asked + i) % len(self._tasks)] for i in range(num)]
            await self._scheduler.request([(task, f"{self._num_asked + i}") for i, task in enumerate(tasks)])
            self._num_asked += num
        return num


def instant_config(*, concurrent: int, turns: int) -> Config:
    """A configuration for an instant engine: the tiny model's tokenizer, `turns` turns a conversation."""
    return replace(
        Config(),
        env_args={"max_turns": turns},
        max_concurrent_rollouts=concurrent,
        generation_slots=max(64, concurrent),
        max_new_tokens=8,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Processes of a benchmark's deployment.")
    parts = parser.add_subparsers(dest="part", required=True)
    control = parts.add_parser("control")
    control.add_argument("--root", type=Path, required=True)
    control.add_argument("--config", type=json.loads, required=True)
    control.add_argument("--data", type=Path)
    role = parts.add_parser("role")
    role.add_argument("role")
    role.add_argument("--root", type=Path, required=True)
    role.add_argument("--run", required=True)
    role.add_argument("--name", required=True)
    args = parser.parse_args()
    if args.part == "role":
        _role(args)
    else:
        allow_many_files()
        run_loop(_control(args.root.absolute(), from_dict(args.config), args.data))


if __name__ == "__main__":
    main()
