"""What the records say of evaluations: whose weights sampled them, and which an earlier process had asked for."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.errors import RecordCorrupt
from turnmill.evaluation import RecordedRollouts
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    Call,
    FinishReason,
    InvalidReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Sampling,
    encode,
)

RUN_ID = "r1"


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RunPorts]:
    opened = open_run(tmp_path, RUN_ID, num_replicas=1)
    yield opened
    opened.close()


async def add(
    ports: RunPorts,
    sample_id: str,
    versions: Sequence[str] = ("1.2",),
    *,
    group_id: str = "v1.2/t",
    state: SampleState = SampleState.REPORTED,
    purpose: Purpose = Purpose.EVAL,
    created_at: float = 1.0,
) -> SampleRecord:
    """A sample with one call of each of these versions."""
    calls = [
        Call(
            run_id=RUN_ID,
            purpose=purpose,
            sample_id=sample_id,
            call_id=f"{sample_id}_{index}",
            attempt=1,
            parent=None,
            parent_digest="",
            choice=0,
            request_digest="",
            sampling=Sampling(),
            messages=[],
            reply={},
            token_ids=[1],
            loss_mask=[1],
            logprobs=[-0.5],
            version=version,
            finish_reason=FinishReason.STOP,
            created_at=1.0,
        ).sealed()
        for index, version in enumerate(versions)
    ]
    sample = SampleRecord(
        run_id=RUN_ID,
        purpose=purpose,
        sample_id=sample_id,
        task_id="t",
        group_id=group_id,
        state=state,
        created_at=created_at,
        request=RolloutRequest(sample_id=sample_id, timestamp="", max_length=8, rewards={"range": [0, 1]}, data={}),
        deadline=1.0,
        reward=1.0 if state is SampleState.REPORTED else None,
        reason=InvalidReason.INFRA if state is SampleState.INVALID else None,
        calls=tuple(call.call_id for call in calls),
    )
    writes = [Write(key=call.key, value=encode(call), expected=0) for call in calls]
    await ports.records.write([*writes, Write(key=sample.key, value=encode(sample), expected=0)])
    return sample


async def test_earlier_rollouts_are_those_that_ended_of_that_version_alone_as_they_were_asked_for(
    ports: RunPorts,
) -> None:
    await add(ports, "t_10", created_at=1.0)
    await add(ports, "t_9", created_at=2.0)
    await add(ports, "t_2", group_id="v1.20/t")
    await add(ports, "t_3", ["1.2", "1.1"])
    await add(ports, "t_4", state=SampleState.INVALID)
    await add(ports, "t_5", state=SampleState.LEASED)
    await add(ports, "t_6", state=SampleState.DROPPED)
    await add(ports, "t_7", purpose=Purpose.TRAIN)
    recorded = RecordedRollouts(ports.records, RUN_ID)
    assert [sample.sample_id for sample in await recorded.earlier("v1.2/", "1.2")] == ["t_10", "t_9"]
    assert await recorded.open_ones() == ["t_5"]


async def test_one_token_of_other_weights_makes_a_rollout_theirs_too(ports: RunPorts) -> None:
    recorded = RecordedRollouts(ports.records, RUN_ID)
    whole, mixed = await add(ports, "t_0", ["1.2", "1.2"]), await add(ports, "t_1", ["1.1", "1.2"])
    assert await recorded.is_whole(whole, "1.2") and not await recorded.is_whole(whole, "1.1")
    assert not await recorded.is_whole(mixed, "1.2")
    with pytest.raises(RecordCorrupt, match=r"t_0_9 is not recorded, and sample .*t_0 consumed it"):
        await recorded.is_whole(replace(whole, calls=("t_0_9",)), "1.2")
