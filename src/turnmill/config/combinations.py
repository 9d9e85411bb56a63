"""Parameters that only fit together: one table of relations, and the messages for those that do not hold."""

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from turnmill.config.parameters import ENVIRONMENT_CHOICES, Config
from turnmill.config.values import shown
from turnmill.records import MIN_TEMPERATURE

# An id becomes the name of a folder and of a module.
_ENV_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "%": lambda left, right: left % right == 0,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Two parameters that only fit together if `left` stands in a relation to `right`."""

    left: str
    # <, <= or % (is a multiple of)
    relation: str
    right: str
    why: str
    # 0 stands for a value that is derived from others, and fits.
    is_zero_derived: bool = False

    def problem(self, values: Mapping[str, Any], places: Mapping[str, str], chosen: Collection[str]) -> str | None:
        """The message naming both keys, values and sources; None if they fit.

        `places` says where each value was written; `chosen` holds the keys that the user set, so that the advice can
        name the other one.
        """
        left, right = values[self.left], values[self.right]
        if self.is_zero_derived and 0 in (left, right):
            return None
        if _HOLDS[self.relation](left, right):
            return None
        words = {"<": "must be less than", "<=": "must not exceed", "%": "must be a multiple of"}[self.relation]
        sides = [f"{key} = {shown(values[key])} ({places[key]})" for key in (self.left, self.right)]
        return f"{sides[0]} {words} {sides[1]}: {self.why}; {self._advice(left, right, chosen)}"

    def _advice(self, left: Any, right: Any, chosen: Collection[str]) -> str:
        """Which key to set: the one that the user did not choose, where there is just one such."""
        if self.relation == "%":
            fits = [fit for fit in (left - left % right, left - left % right + right) if fit > 0]
            set_left = f"set {self.left} to {' or '.join(map(str, fits))}"
            set_right = f"set {self.right} to a divisor of {left}"
        elif self.relation == "<":
            set_left, set_right = f"set {self.left} below {shown(right)}", f"set {self.right} above {shown(left)}"
        else:
            set_left = f"set {self.left} to at most {shown(right)}"
            set_right = f"set {self.right} to at least {shown(left)}"
        if (self.left in chosen) == (self.right in chosen):
            return f"{set_left}, or {set_right}"
        return f"{set_right} as well" if self.left in chosen else f"{set_left} as well"


RULES = (
    Rule(left="global_batch_size", relation="%", right="number_generation", why="a batch is made of whole groups"),
    Rule(left="max_new_tokens", relation="<", right="max_length", why="the prompt needs room too"),
    Rule(left="max_length", relation="<=", right="micro_batch_tokens", why="a conversation is trained in one pass"),
    Rule(left="min_lr", relation="<=", right="lr", why="the schedule falls from lr to min_lr"),
    Rule(
        left="curriculum_low",
        relation="<=",
        right="curriculum_high",
        why="a task is drawn while its pass rate is between them",
    ),
    Rule(left="warmup_steps", relation="<=", right="max_steps", why="the warm-up is a part of the run"),
    Rule(
        left="baseline_rollouts",
        relation="<=",
        right="baseline_max_rollouts",
        why="the baseline goes on from the first to the second",
    ),
    Rule(left="call_timeout_s", relation="<", right="training_timeout", why="a call is a part of a rollout"),
    Rule(left="training_timeout", relation="<", right="max_runtime_s", why="a rollout is a part of the run"),
    Rule(
        left="training_timeout",
        relation="<",
        right="watchdog_s",
        why="a rollout that may still end is no stall",
        is_zero_derived=True,
    ),
    Rule(
        left="watchdog_s",
        relation="<",
        right="max_runtime_s",
        why="a stall is to be seen before the stage runs out of time",
        is_zero_derived=True,
    ),
    Rule(
        left="audit_mean_tolerance",
        relation="<=",
        right="audit_max_tolerance",
        why="a mean is never larger than the maximum",
    ),
)

# Those that `algorithm_problems` looks at.
ALGORITHM_PARAMETERS = (
    "ppo_minibatches",
    "global_batch_size",
    "number_generation",
)


def compared_with(name: str) -> frozenset[str]:
    """The parameters that stand in a relation to this one."""
    return frozenset(
        other for rule in RULES for one, other in ((rule.left, rule.right), (rule.right, rule.left)) if one == name
    )


def temperature_problems(values: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """An evaluation is greedy, or samples: nothing is exact so close to 0 that it is neither."""
    value = values["val_temperature"]
    if not 0 < value < MIN_TEMPERATURE:
        return []
    told = f"val_temperature = {shown(value)} ({places['val_temperature']})"
    return [f"{told}: must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"]


# Largest mean and single |trainer - sampler| log-prob of bf16 passes that are told as such, and not as other weights:
# two to three times what they are for the shipped models.
_BF16_TOLERANCES = {"audit_mean_tolerance": 0.02, "audit_max_tolerance": 1.0}


def precision_problems(values: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """What contradicts itself between the trainer's precision and the audit; arguments as in `problem`."""
    if values["precision"] == "fp32" or any(values[name] != getattr(Config(), name) for name in _BF16_TOLERANCES):
        return []
    found = " and ".join(f"{name} = {shown(values[name])} ({places[name]})" for name in _BF16_TOLERANCES)
    advice = " and ".join(f"{name} = {shown(value)}" for name, value in _BF16_TOLERANCES.items())
    return [
        f"precision = {shown(values['precision'])} ({places['precision']}) does not go with {found}: the sampler is in "
        f"fp32, and what bf16 rounds would stop the first step; set {advice}, or what your model needs"
    ]


def environment_problems(values: Mapping[str, Any], places: Mapping[str, str], chosen: Collection[str]) -> list[str]:
    """What contradicts itself among the parameters that say which environment is played; arguments as in `problem`."""

    def told(name: str) -> str:
        return f"{name} = {shown(values[name])} ({places[name]})"

    ways = [name for name in ENVIRONMENT_CHOICES if name in chosen and values[name]]
    if len(ways) > 1:
        names = " and ".join(told(name) for name in ways)
        return [f"{names} each name an environment: a run plays one, so set one of them"]
    problems = []
    played = ways[0] if ways else "env"
    id_name = {"use_custom_env": "custom_env_id"}.get(played, played)
    if not _ENV_ID.fullmatch(values[id_name]):
        problems.append(f"{told(id_name)}: must be the id of an environment: letters, digits, - and _")
    if played == "vf_env_id" and values["env_args"]:
        problems.append(f"{told('env_args')} are not for {told('vf_env_id')}: set vf_env_args instead")
    if played != "vf_env_id" and values["vf_env_args"]:
        problems.append(f"{told('vf_env_args')} is read with vf_env_id alone, which is not set: set it, or env_args")
    if played != "use_custom_env" and values["custom_env_id"] != Config().custom_env_id:
        problems.append(f"{told('custom_env_id')} is not read: set use_custom_env = true as well, or env instead")
    return problems


def algorithm_problems(values: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """What of the advantages and the loss does not fit together; arguments as in `Rule.problem`."""

    def told(name: str) -> str:
        return f"{name} = {shown(values[name])} ({places[name]})"

    num_groups = values["global_batch_size"] // values["number_generation"]
    if not 0 < num_groups < values["ppo_minibatches"]:
        return []
    return [
        f"{told('ppo_minibatches')} must not exceed the groups of a batch, which are {num_groups}, of "
        f"{told('global_batch_size')} and {told('number_generation')}: an update is made on whole groups; set "
        f"ppo_minibatches to at most {num_groups}"
    ]
