"""Groups without signal in a row: when they stop the run, and what they have in common.

decided group -> count -> check: NoProgress with the diagnosis
"""

from collections.abc import Collection, Mapping

from turnmill.config import Config
from turnmill.errors import NoProgress, printable
from turnmill.records import TaskOutcome
from turnmill.training.task_statistics import TaskStatistics

# Task ids that a diagnosis names.
_NAMED = 5
# Share of a task's rollouts in this run that passed.
_NOT_TOO_HARD = 0.1
_TOO_HARD = (
    "These tasks are too hard for this model, or the reward does not tell good from bad: give partial credit, add "
    "easier tasks, or begin with a model that passes some of them."
)


class UselessGroups:
    """Those since the last group with signal, in the order in which they were decided, by one trainer process."""

    def __init__(self, config: Config, statistics: Mapping[str, TaskStatistics]) -> None:
        """`statistics` go on to be counted by their owner."""
        self._config = config
        self._statistics = statistics
        self._row: list[TaskOutcome] = []

    def count(self, outcome: TaskOutcome) -> None:
        """A group was decided."""
        if outcome.has_signal:
            self._row.clear()
        else:
            self._row.append(outcome)

    def check(self, last_invalid: str) -> None:
        """Raise `NoProgress` once they are `max_useless_groups`; `last_invalid` says why a sample had no reward."""
        most = self._config.max_useless_groups
        if most and len(self._row) >= most:
            raise NoProgress(
                f"{_groups(self._row)} in a row without signal (max_useless_groups = {most}). "
                f"{self.diagnosis(last_invalid)}"
            )

    def diagnosis(self, last_invalid: str) -> str:
        """What they have in common, and what helps: a sentence for each case that there is, with its numbers."""
        overlong = [one for one in self._row if self._is_overlong(one)]
        equal = [one for one in self._row if one.has_signal is False and not self._is_overlong(one)]
        failed = [one for one in equal if one.num_passed == 0]
        passed = [one for one in equal if one.num_passed == one.num_valid]
        sentences = [
            self._failed(failed, is_alone=not passed) if failed else "",
            self._passed(passed) if passed else "",
            self._mixed(failed, passed) if failed and passed else "",
            self._left_out(overlong) if overlong else "",
            self._other(len(equal) - len(failed) - len(passed)),
            self._truncated(),
            self._invalid(last_invalid),
        ]
        return " ".join(sentence for sentence in sentences if sentence)

    def _failed(self, failed: Collection[TaskOutcome], *, is_alone: bool) -> str:
        mean = sum(one.reward_sum for one in failed) / sum(one.num_valid for one in failed)
        return (
            f"In {_groups(failed)} no rollout passed and all earned the same (mean reward {mean:g}, "
            f"success_threshold {self._config.success_threshold:g}): {_tasks(failed)}. "
            f"{(is_alone and self._lost(failed)) or _TOO_HARD}"
        )

    def _lost(self, failed: Collection[TaskOutcome]) -> str:
        """Of tasks most of which were not too hard before; empty if they were."""
        ids = {one.task_id for one in failed}
        found = [self._statistics[task_id] for task_id in ids if task_id in self._statistics]
        known = [one for one in found if one.num_passed >= max(2, _NOT_TOO_HARD * one.num_valid)]
        if 2 * len(known) <= len(ids):
            return ""
        num_passed, num_valid = sum(one.num_passed for one in known), sum(one.num_valid for one in known)
        them = "it" if len(ids) == 1 else "most of them"
        hold = "" if self._config.kl_coeff > 0 else ", or with kl_coeff, which holds it to the base model"
        return (
            f"But {num_passed} of the {num_valid} rollouts that this run has counted of {them} passed: the policy may "
            f"have become worse. Train anew with a lower lr{hold}."
        )

    def _passed(self, passed: Collection[TaskOutcome]) -> str:
        return (
            f"In {_groups(passed)} every rollout passed: {_tasks(passed)}. There is nothing to learn from these tasks: "
            "add harder ones, or let the reward tell a good solution from a better one."
        )

    def _mixed(self, failed: Collection[TaskOutcome], passed: Collection[TaskOutcome]) -> str:
        both = {one.task_id for one in failed} & {one.task_id for one in passed}
        wider = f" ({len(both)} {'task' if len(both) == 1 else 'tasks'} did both)" if both else ""
        sentence = (
            f"Some fail and some pass as a whole{wider}: a number_generation above {self._config.number_generation} "
            "makes rollouts that differ likelier"
        )
        if self._config.curriculum == "none":
            sentence += "; curriculum = pass_rate passes over tasks whose outcome is known"
        return f"{sentence}."

    def _is_overlong(self, outcome: TaskOutcome) -> bool:
        """Whether what was cut off, and is not trained for that, may be why the group has no signal."""
        return outcome.has_signal is False and self._config.overlong != "score" and outcome.num_truncated > 0

    def _left_out(self, overlong: Collection[TaskOutcome]) -> str:
        return (
            f"In {_groups(overlong)} conversations were cut off, which overlong = {self._config.overlong} does not "
            f"train, and the others do not differ, or there are none: {_tasks(overlong)}."
        )

    def _other(self, num_equal: int) -> str:
        num_abandoned = sum(one.has_signal is None for one in self._row)
        found = []
        if num_abandoned:
            found.append(f"{num_abandoned} were given up, because too many of their rollouts were invalid")
        if num_equal:
            found.append(f"in {num_equal} some passed by themselves, but with the reward of the group all were equal")
        return f"Of the groups, {'; '.join(found)}." if found else ""

    def _truncated(self) -> str:
        num_valid = sum(one.num_valid for one in self._row)
        num_truncated = sum(one.num_truncated for one in self._row)
        if not num_truncated:
            return ""
        return (
            f"{num_truncated} of their {num_valid} valid rollouts were cut off at max_length = "
            f"{self._config.max_length}: raise it, or have the environment end its conversations earlier."
        )

    def _invalid(self, last_invalid: str) -> str:
        num_played = sum(one.num_played for one in self._row)
        num_invalid = num_played - sum(one.num_valid for one in self._row)
        if not num_invalid:
            return ""
        return (
            f"{num_invalid} of their {num_played} rollouts were invalid, which is the environment's or the "
            f"infrastructure's fault and not the policy's; the last of all: {last_invalid}."
        )


def _groups(found: Collection[TaskOutcome]) -> str:
    return "1 group" if len(found) == 1 else f"{len(found)} groups"


def _tasks(found: Collection[TaskOutcome]) -> str:
    """The tasks, each once, the first few by name."""
    ids = list(dict.fromkeys(one.task_id for one in found))
    named = ", ".join(printable(task_id, limit=60) for task_id in ids[:_NAMED])
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{'task' if len(ids) == 1 else 'tasks'} {named}{more}"
