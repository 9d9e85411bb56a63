"""Environments of verifiers that can't be played exactly are refused, with the reason."""

import importlib.util
from typing import Any

import pytest

from tests.unit.environment.verifiers_house import load_package, needs_verifiers
from turnmill.environment.verifiers_adapter import adapt, is_verifiers
from turnmill.environment.wordle import Wordle
from turnmill.errors import InvalidInput


def a_class(module: str, *bases: type) -> type:
    return type("Some", bases, {"__module__": module})


def test_an_environment_of_verifiers_is_known_by_where_its_classes_come_from() -> None:
    assert is_verifiers(a_class("verifiers.legacy.envs.environment")())
    assert is_verifiers(a_class("my_env", a_class("verifiers.envs.multiturn_env"))())
    assert not is_verifiers(a_class("verifiers_of_mine")())
    assert not is_verifiers(Wordle()) and not is_verifiers(None)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_it_is_said_what_to_install() -> None:
    with pytest.raises(InvalidInput, match=r"needs verifiers>=0.3,<0.4.*here is none: pip install 'turnmill\[verif"):
        adapt(a_class("verifiers.envs.environment")())


@needs_verifiers
class TestRefused:
    def why(self, env: Any) -> str:
        with pytest.raises(InvalidInput) as refused:
            adapt(env)
        text = str(refused.value)
        assert text.startswith(f"{type(env).__name__} of verifiers can't be trained on: ")
        return text

    def with_rubric(self, rubric: Any) -> Any:
        env = load_package("kind-words")
        env.rubric = rubric
        return env

    def test_other_kinds_of_environments(self) -> None:
        from verifiers.envs.env_group import EnvGroup

        env = load_package("number-guess")
        assert "SingleTurnEnv, MultiTurnEnv, ToolEnv and classes made from them" in self.why(EnvGroup([env]))
        assert "SingleTurnEnv, MultiTurnEnv, ToolEnv" in self.why(a_class("verifiers.v1.taskset")())

    def test_rewards_that_compare_the_rollouts_of_a_group(self) -> None:
        from verifiers.rubrics.rubric import Rubric

        def best(completions: list[Any]) -> list[float]:
            return [1.0 for _ in completions]

        assert "best compares the rollouts of a group" in self.why(self.with_rubric(Rubric(funcs=[best])))

    def test_rubrics_that_score_groups_by_code_of_their_own(self) -> None:
        from verifiers.rubrics.rubric import Rubric

        class Ranked(Rubric):
            async def score_group(self, states: list[Any]) -> None:
                raise AssertionError

        assert "Ranked scores groups (score_group)" in self.why(self.with_rubric(Ranked(funcs=[lambda: 1.0])))

    def test_advantages_of_their_own(self) -> None:
        from verifiers.rubrics.rubric import Rubric

        class Advantaged(Rubric):
            has_advantages = True

        assert "Advantaged gives advantages" in self.why(self.with_rubric(Advantaged(funcs=[lambda: 1.0])))

    def test_rubrics_without_a_reward(self) -> None:
        from verifiers.rubrics.rubric import Rubric
        from verifiers.rubrics.rubric_group import RubricGroup

        only_metrics = Rubric(funcs=[lambda: 1.0], weights=[0.0])
        assert "no reward function has a weight" in self.why(self.with_rubric(only_metrics))
        empty = RubricGroup([Rubric(funcs=[lambda: 1.0]), Rubric()])
        assert "a Rubric of its rubric has no function" in self.why(self.with_rubric(empty))
        assert "each reward is 0.0" in self.why(load_package("kind-words", score_rollouts=False))

    def test_a_dataset_that_is_formatted_by_code_of_its_own(self) -> None:
        from verifiers.envs.singleturn_env import SingleTurnEnv

        class Formatted(SingleTurnEnv):
            def _format_dataset(self, *args: Any, **kwargs: Any) -> Any:
                raise AssertionError

        plain = load_package("kind-words")
        text = self.why(Formatted(dataset=plain.dataset_source, rubric=plain.rubric))
        assert "_format_dataset" in text and "setup_state" in text

    @pytest.mark.filterwarnings("ignore:message_type is deprecated")
    def test_plain_completions(self) -> None:
        assert "message_type is 'completion'" in self.why(load_package("kind-words", message_type="completion"))
