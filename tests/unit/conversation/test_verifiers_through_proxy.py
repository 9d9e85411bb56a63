"""Environments of verifiers over the real client and proxy: what they see is what is recorded."""

from typing import TYPE_CHECKING, Any

from tests.unit.conversation.test_proxy_with_client import parts
from tests.unit.environment.verifiers_house import load_package, needs_verifiers
from turnmill.environment.verifiers_adapter import adapt
from turnmill.records import InvalidReason, RolloutResult, StopReason, Task
from turnmill.rollout.runner import InProcessRunner

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

pytestmark = needs_verifiers
TASK = Task(id="task", metadata={"prompt": "Guess.", "answer": "7"})


async def play(world: "World", env: Any) -> RolloutResult:
    """One rollout as a worker plays and reports it."""
    async with parts(world) as (scheduler, api, http):
        await scheduler.request([(TASK, "g")])
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
        runner = InProcessRunner(adapt(env), http, call_timeout_s=10.0, training_timeout_s=20.0)
        result = await runner.run(leased)
        await api.report(leased, result)
    return result


async def test_a_conversation_is_one_branch_and_its_tokens_are_those_of_the_records(world: "World") -> None:
    guesses = iter(["5", "7"])
    world.replica.reply = lambda request: next(guesses)
    steps: list[Any] = []

    def look(state: Any) -> float:
        steps.extend(step["tokens"] for step in state["trajectory"])
        return 0.0

    env = load_package("number-guess")
    env.rubric.add_metric(look)
    result = await play(world, env)
    assert result.reward == 1.0 and result.stop_reason is StopReason.END_OF_CONVERSATION
    assert result.metrics["hints"] == 1.0

    first, second = world.replica.requests
    assert second.parent == first.step_id and second.messages == [{"role": "user", "content": "higher"}]
    assert world.counts.num_forks == 0
    # Five tokens a message, two a reply (the scripted replica's), each step's prompt the whole conversation before it.
    assert [(len(step["prompt_ids"]), len(step["completion_ids"])) for step in steps] == [(5, 2), (12, 2)]
    assert steps[1]["prompt_ids"][:7] == steps[0]["prompt_ids"] + steps[0]["completion_ids"]
    assert [step["completion_logprobs"] for step in steps] == [[-0.5, -0.5]] * 2


async def test_a_generation_that_fails_is_infra_and_never_the_reward_of_silence(world: "World") -> None:
    world.replica.reply = lambda request: {"code": "internal_error", "message": "the engine broke"}
    result = await play(world, load_package("kind-words"))
    assert result.reward is None and result.reason is InvalidReason.INFRA
    assert "the engine broke" in (result.detail or "")


async def test_a_full_context_is_an_end_that_is_scored(world: "World") -> None:
    replies: list[str | dict[str, str]] = [
        "5",
        {"code": "context_length_exceeded", "message": "the conversation is full"},
    ]
    left = iter(replies)
    world.replica.reply = lambda request: next(left)
    result = await play(world, load_package("number-guess"))
    assert result.reward == 0.0 and result.stop_reason is StopReason.MAX_LENGTH
