"""A sample that was given up and is played once more: as if nothing had been said before."""

from typing import TYPE_CHECKING

from turnmill.conversation.history import read_calls
from turnmill.ports import Write
from turnmill.records import DeadSample, Purpose, Run, RunStatus, SampleState, dead_letter_key, decode, encode
from turnmill.wiring.running.redriving import redrive_sample

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import WorldOf


async def test_a_redriven_sample_replays_nothing_and_has_all_its_attempts_again(world_of: "WorldOf") -> None:
    async with world_of(max_attempts=2) as world:
        rollout = await world.begin()
        for _ in range(2):
            assert (await world.chat(rollout, "Guess.")).status == 200
            await world.lose_lease()
            if (found := (await world.lease(wait_s=0)).body["rollouts"]) != []:
                (rollout,) = found
        dead = await world.sample()
        assert (dead.state, dead.attempt) == (SampleState.INVALID, 2)
        num_asked = len(world.replica.requests)
        (stored,) = await world.ports.records.get([dead_letter_key("run-1", "train/task_0")])
        assert stored is not None
        run = Run(
            run_id="run-1",
            cause="test",
            status=RunStatus.ACTIVE,
            created_at=1.0,
            config={},
            sources={},
            data_path=None,
        )
        await world.ports.runs.write([Write(key=run.key, value=encode(run), expected=0)])
        await redrive_sample(world.ports, decode(stored.value, DeadSample))
        rollout = await world.lease_one()
        assert rollout["attempt"] == 3
        async with world.restarted() as later:
            # Also where a new proxy reads the attempt and the calls of all before it from the records.
            for where in (world, later):
                answer = await where.chat(where.here(rollout), "Guess.")
                assert answer.status == 200
        assert len(world.replica.requests) == num_asked + 2, "each was sampled anew"
        await world.lose_lease()
        rollout = await world.lease_one()
        assert rollout["attempt"] == 4
        assert (await world.chat(rollout, "Guess.")).status == 200
        assert len(world.replica.requests) == num_asked + 2, "what was said since the redrive is replayed"
        assert (await world.report(rollout)).status == 200
        calls = (await world.sample()).calls
        by_id = {call.call_id: call for call in await read_calls(world.ports.records, "run-1", Purpose.TRAIN, "task_0")}
        assert {by_id[call_id].attempt for call_id in calls} == {3}
        assert len(by_id) == num_asked + 2 and len(calls) == 1
