"""The check before a run plays environments of verifiers without a model, and finds what they hide."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.environment.test_preflight import request
from tests.unit.environment.verifiers_house import (
    PACKAGES,
    TokenChat,
    load_package,
    needs_verifiers,
    plain_output,
    played,
    reply,
    signals_kept,
    task,
)
from turnmill.environment.base import ScriptedChat
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.preflight import preflight
from turnmill.environment.registry import find, load
from turnmill.environment.verifiers_adapter import adapt
from turnmill.errors import InvalidInput
from turnmill.records import EnvironmentChoice, EnvironmentOrigin, PreflightReport, Task

pytestmark = needs_verifiers
ANSWERS = [{"endpoint": f"/users/{n}", "params": {"limit": n}} for n in (1, 2)]
CALLS = [
    Task(id=f"call-{index}", metadata={"prompt": "Write the call.", "answer": json.dumps(answer)})
    for index, answer in enumerate(ANSWERS)
]


@pytest.fixture
def own_signals() -> Iterator[None]:
    with signals_kept():
        yield


async def report_on(env: Any, *tasks: Task) -> PreflightReport:
    return await preflight(adapt(env), tasks, request(max_length=1000), playing=lambda what: None)


async def test_a_reward_that_catches_its_own_error_is_found_although_the_format_earns_something() -> None:
    """Defect 42: always 0 apart from the format."""
    right = f"<think>\n...\n</think>\n<action>\n{CALLS[0].metadata['answer']}\n</action>"
    opening = [{"role": "user", "content": "Write the call."}]
    row = {"prompt": opening, "example_id": 0, "answer": CALLS[0].metadata["answer"]}
    plain = await plain_output(load_package("always-zero"), row, (200, right))
    assert plain["metrics"]["call_reward"] == 0.0 and plain["reward"] == pytest.approx(0.2) and plain["error"] is None

    report = await report_on(load_package("always-zero"), *CALLS)
    (failed,) = report.failed
    assert failed.name == "gold"
    assert "the gold answer earns 0.2" in failed.detail
    assert "call_reward weighs most, and gives 0 for each gold answer" in failed.detail
    assert "an error that it catches itself" in failed.detail


async def test_mended_it_passes_and_runs() -> None:
    report = await report_on(load_package("always-zero-mended"), *CALLS)
    assert report.failed == () and report.mean_rewards["gold"] == pytest.approx(1.0)
    right = f"<think>\nEasy.\n</think>\n<action>\n{CALLS[0].metadata['answer']}\n</action>"
    result = await played(load_package("always-zero-mended"), CALLS[0], TokenChat(reply(right)))
    assert result.reward == pytest.approx(1.0) and result.metrics["call_reward"] == 0.8
    wrong = right.replace("/users/1", "/teams/1")
    result = await played(load_package("always-zero-mended"), CALLS[0], TokenChat(reply(wrong)))
    assert result.reward == pytest.approx(0.3 + 0.2)


async def test_a_package_is_found_by_its_name_and_played(own_signals: None) -> None:
    origin = EnvironmentOrigin.VERIFIERS
    chosen = EnvironmentChoice(env_id="always-zero-mended", origin=origin)
    environment = load(find(chosen, root=PACKAGES.parent))
    assert (await preflight(environment, CALLS, request(max_length=1000), playing=lambda what: None)).failed == ()
    with pytest.raises(InvalidInput, match=r"vf_env_id: load_environment of kind-words fails: KeyError: 'luck'"):
        load(
            find(
                EnvironmentChoice(env_id="kind-words", env_args={"scored_by": "luck"}, origin=origin),
                root=PACKAGES.parent,
            )
        )


async def test_a_reward_function_that_raises_fails_the_check_by_name() -> None:
    report = await report_on(load_package("kind-words", scored_by="careless"), task(info={}, answer="hello"))
    reward = next(check for check in report.failed if check.name == "reward")
    assert "reward function careless raised KeyError: 'score'" in reward.detail


async def test_a_reward_that_is_the_same_for_all_fails_the_check() -> None:
    gold, varies = (await report_on(load_package("kind-words"), task(answer="hello"))).failed
    assert gold.name == "gold" and "the gold answer earns 1, garbage 1" in gold.detail
    assert varies.name == "varies" and "each of 2 conversations earns 1, whatever is said" in varies.detail


async def test_gold_may_be_the_environments_own() -> None:
    report = await report_on(load_package("number-guess"), task("Guess.", answer="7"))
    assert report.failed == () and report.mean_rewards == {"gold": 1.0, "garbage": 0.0}


async def test_gold_may_call_tools() -> None:
    asked = task("How much?", answer="7", info={"items": ["apple", "pear"]})
    report = await report_on(load_package("shop-tools"), asked)
    assert report.failed == () and report.mean_rewards == {"gold": 1.0, "garbage": 0.0}
    gold = list(adapt(load_package("shop-tools")).gold(asked) or ())
    result = await play_scored(adapt(load_package("shop-tools")), asked, WatchedChat(ScriptedChat(gold)))
    assert result.metrics["asked"] == 2.0 and result.metrics["price_calls"] == 2.0


async def test_data_that_does_not_fit_is_named() -> None:
    (failed,) = (await report_on(load_package("kind-words"), task(info="{"))).failed
    assert failed.name == "tasks" and "task t_0: metadata.info is not valid JSON" in failed.detail


@pytest.mark.parametrize(
    ("fields", "answer_field"), [(["think", "answer"], "answer"), (["think", ("code", "answer")], "code")]
)
async def test_gold_is_written_as_the_parser_reads_it(fields: list[Any], answer_field: str) -> None:
    from verifiers.parsers.xml_parser import XMLParser

    env = load_package("kind-words")
    env.parser = XMLParser(fields, answer_field=answer_field)
    gold = adapt(env).gold(task(answer="42"))
    assert gold is not None
    assert env.parser.parse_answer([{"role": "assistant", "content": next(iter(gold))}]) == "42"


async def test_gold_is_the_answer_where_the_parser_takes_texts() -> None:
    gold = adapt(load_package("kind-words")).gold(task(answer={"n": 1}))
    assert gold is not None and next(iter(gold)) == '{"n": 1}'
    assert adapt(load_package("kind-words")).gold(task()) is None


async def test_a_boxed_answer_after_thinking_is_found() -> None:
    from verifiers.parsers.think_parser import ThinkParser
    from verifiers.utils.data_utils import extract_boxed_answer

    env = load_package("kind-words")
    env.parser = ThinkParser(extract_fn=extract_boxed_answer)
    gold = adapt(env).gold(task(answer="42"))
    assert gold is not None
    assert env.parser.parse_answer([{"role": "assistant", "content": next(iter(gold))}]) == "42"


async def test_what_the_guide_shows_passes() -> None:
    guide = (PACKAGES.parents[2] / "docs" / "guides" / "verifiers.md").read_text(encoding="utf-8")
    example, gold = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    names: dict[str, Any] = {}
    with signals_kept():
        exec(example, names)
        env = names["load_environment"]()
    report = await report_on(env, task("2+2", answer="4"))
    assert report.failed == () and report.mean_rewards["gold"] == pytest.approx(1.0)
    exec(gold, names)
    (call, said) = names["Shop"].gold(None, {"answer": "4"})
    assert call["tool_calls"][0]["function"]["name"] == "price" and said == "4"
