"""Rows of the data take the place of a verifiers environment's dataset."""

from typing import Any

import pytest

from tests.unit.environment.verifiers_house import TokenChat, load_package, needs_verifiers, played, reply, task
from turnmill.environment.verifiers_adapter import adapt
from turnmill.environment.verifiers_rows import row_of
from turnmill.errors import DataError
from turnmill.records import Task

SHOTS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def row(asked: Task, system_prompt: str | None = "Be brief.", few_shot: list[Any] | None = None) -> dict[str, Any]:
    return row_of(asked, system_prompt=system_prompt, few_shot=few_shot)


def test_a_text_is_a_question_after_system_prompt_and_examples() -> None:
    assert row(task("2+2"), few_shot=SHOTS)["prompt"] == [
        {"role": "system", "content": "Be brief."},
        *SHOTS,
        {"role": "user", "content": "2+2"},
    ]


def test_messages_get_the_system_prompt_unless_they_have_one() -> None:
    asked = [{"role": "user", "content": "2+2"}]
    own = [{"role": "system", "content": "Own."}, *asked]
    assert row(task(asked), few_shot=SHOTS)["prompt"] == [{"role": "system", "content": "Be brief."}, *asked]
    assert row(task(own))["prompt"] == own
    assert row(task(asked), system_prompt=None)["prompt"] == asked


def test_info_is_an_object_or_its_text() -> None:
    assert row(task(info='{"level": 3}'))["info"] == row(task(info={"level": 3}))["info"] == {"level": 3}


def test_what_a_row_does_not_have_is_not_there() -> None:
    assert set(row(task(answer=None))) == {"prompt", "example_id"}
    assert row(task(answer="4"))["answer"] == "4"


def test_rollouts_of_a_task_share_an_example_id_and_tasks_do_not() -> None:
    metadata = {"prompt": "2+2", "answer": "4"}
    first, second = (row(Task(id=sample, metadata=metadata))["example_id"] for sample in ("t_0", "t_1"))
    assert isinstance(first, int) and 0 <= first < 2**53 and first == second
    assert row(task("2+3", answer="4"))["example_id"] != first


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object"),
        ({"task": {}}, "verifiers takes it for the whole row"),
        ({"oai_tools": []}, "tool_defs"),
    ],
)
def test_an_info_that_verifiers_can_not_take_is_an_error_of_the_data(info: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"task t_0: metadata.info .*{why}"):
        row(task(info=info))


@needs_verifiers
async def test_rewards_see_the_row() -> None:
    seen: dict[str, Any] = {}

    def look(prompt: Any, answer: str, info: Any, task: Any, task_name: str, state: Any) -> float:
        seen.update(prompt=prompt, answer=answer, info=info, task=task, task_name=task_name, id=state["example_id"])
        return 1.0

    env = load_package("kind-words")
    env.rubric.add_reward_func(look, weight=0.0)
    # A plain text under `task` is what verifiers itself refuses.
    result = await played(env, task("2+2", answer="4", info='{"level": 3}', task="sums"), TokenChat(reply()))
    assert result.reward == 1.0
    assert seen["answer"] == "4" and seen["info"] == {"level": 3} and seen["task_name"] == "sums"
    assert seen["prompt"][-1].content == "2+2" and seen["task"]["answer"] == "4" and isinstance(seen["id"], int)


@needs_verifiers
async def test_a_row_may_bring_its_own_tools() -> None:
    definition = {"name": "look_up", "description": "Look a word up.", "parameters": {"type": "object"}}
    chat = TokenChat(reply())
    await played(load_package("kind-words"), task(info={"tool_defs": [definition]}), chat)
    assert chat.calls[0][1]["tools"] == [{"type": "function", "function": definition}]
    with pytest.raises(DataError, match="tool_defs is not as verifiers has it"):
        adapt(load_package("kind-words")).validate(task(info={"tool_defs": [{"name": "look_up"}]}))


@needs_verifiers
def test_the_prompt_is_the_one_that_verifiers_makes_of_such_a_row() -> None:
    from datasets import Dataset

    env = load_package("kind-words", system_prompt="Be brief.", few_shot=SHOTS)
    theirs = env._format_dataset_source(Dataset.from_list([{"question": "2+2"}]))[0]["prompt"]
    assert row(task("2+2"), few_shot=SHOTS)["prompt"] == theirs
    asked = [{"role": "user", "content": "2+2"}]
    theirs = env._format_dataset_source(Dataset.from_list([{"prompt": asked}]))[0]["prompt"]
    assert row(task(asked), few_shot=SHOTS)["prompt"] == theirs
