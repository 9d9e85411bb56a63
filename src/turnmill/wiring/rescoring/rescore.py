"""`turnmill rescore`: the stored conversations of a run, played through an environment that may have changed.

    run + options -> config, environment | its boxes, samples -> play_all -> groups scored anew -> compare -> Rescoring

It reads the records of the run as one who leaves no trace, also while the run goes on.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from turnmill.config import ENVIRONMENT_CHOICES, ENVIRONMENT_PARAMETERS, Config, Resolved, from_dict, to_dict
from turnmill.config.deployment import load_judges
from turnmill.conversation.history import checked_call
from turnmill.environment.base import Environment
from turnmill.environment.groups import is_group
from turnmill.environment.judges import check_secrets, settings_variable
from turnmill.environment.registry import EnvironmentKind, find, load_built_in
from turnmill.errors import InvalidInput
from turnmill.records import Call, EnvironmentChoice, InvalidReason, Purpose, Run, SampleRecord, call_prefix
from turnmill.rollout.box.isolation import Settings
from turnmill.wiring.backend import backend_of
from turnmill.wiring.boxes import box_settings, check_box
from turnmill.wiring.reading.conversations import read_samples
from turnmill.wiring.rescoring.comparison import Comparison, Rescored, Verdict, compare
from turnmill.wiring.rescoring.playing import Played, Player, play_all, player

# Parameters of the run that a rescoring may have otherwise, beside those that name the environment.
CHANGEABLE = ("judges", "group_rewards", "success_threshold", "max_concurrent_rollouts", "training_timeout")
# Ends without a reward that the environment caused: it may have been mended.
_MENDABLE = (InvalidReason.REWARD_ERROR, InvalidReason.ENV_ERROR)
_UNSET = ("default", "recipe.toml")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which conversations of a run."""

    purposes: Sequence[Purpose]
    # First and last optimizer step, both included; None: whether or not they were trained.
    steps: tuple[int, int] | None = None
    # () for all.
    sample_ids: Sequence[str] = ()
    # The last so many; None: all.
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rescoring:
    """What came of it."""

    run_id: str
    environment: EnvironmentChoice
    comparison: Comparison
    # In the order in which the rollouts were begun.
    rescored: Sequence[Rescored]
    # Rollouts of the selection without a conversation that was brought to an end.
    num_left_out: int

    def as_object(self) -> dict[str, Any]:
        """What `--json` prints."""
        found: dict[str, Any] = msgspec.to_builtins(
            {
                "run_id": self.run_id,
                "environment": self.environment,
                "num_left_out": self.num_left_out,
                **msgspec.to_builtins(self.comparison),
                "samples": [each.as_object() for each in self.rescored],
            }
        )
        return found


def config_of(run: Run, resolved: Resolved) -> Config:
    """The run's parameters, and of `resolved` what was set: the environment and `CHANGEABLE`. Raises `ConfigError`."""
    given = {name for name, source in resolved.sources.items() if source not in _UNSET}
    wanted = to_dict(resolved.config)
    # What was set about one environment is not for another.
    names = ENVIRONMENT_PARAMETERS if given & set(ENVIRONMENT_CHOICES) else given & set(ENVIRONMENT_PARAMETERS)
    changed = {name: wanted[name] for name in (*names, *(given & set(CHANGEABLE)))}
    return from_dict({**run.config, **changed}, source=f"run {run.run_id}")


async def rescore(
    root: Path,
    run: Run,
    config: Config,
    selection: Selection,
    *,
    log: Path,
    told: Callable[[Rescored, int], None],
) -> Rescoring:
    """`config` is that of `config_of`; `log` is where a package's code prints to.

    `told` of each conversation that was played again, with how many there are. Raises `InvalidInput` where there is
    none, and for an environment or judges that can't be had.
    """
    samples, everything = await asyncio.to_thread(_selected, root, run, selection)
    played_before = [sample for sample in samples if _is_ended(sample)]
    if not played_before:
        raise InvalidInput(
            f"run {run.run_id} has no conversation that was brought to an end among {len(samples)} rollouts that were "
            f"chosen; `turnmill conversations {run.run_id}` lists what there is"
        )
    environment = await asyncio.to_thread(_environment, root, config, log)
    reader = backend_of(root).reader(run.run_id)

    def read_calls(sample: SampleRecord) -> list[Call]:
        prefix = call_prefix(sample.run_id, sample.purpose, sample.sample_id)
        calls = [checked_call(stored) for stored in reader.records(prefix, limit=-1)]
        # A sample id may itself hold a slash, so the prefix may cover a neighbour's calls too.
        return [call for call in calls if call.sample_id == sample.sample_id]

    sizes = _group_sizes(everything, config)
    async with player(run, config, environment) as playing:
        found = await play_all(
            playing,
            played_before,
            read_calls,
            num_at_once=min(config.max_concurrent_rollouts, len(played_before)),
            told=lambda rescored: told(rescored, len(played_before)),
        )
        rescored = {each.rescored.sample.key: each.rescored for each in found}
        if config.group_rewards:
            rescored |= await _with_groups(playing, found, sizes)
    in_order = [rescored[sample.key] for sample in played_before]
    return Rescoring(
        run_id=run.run_id,
        environment=config.environment,
        comparison=compare(in_order, success_threshold=config.success_threshold, group_sizes=sizes),
        rescored=in_order,
        num_left_out=len(samples) - len(played_before),
    )


# ---------------------------------------------------------------- what is played again


def _selected(root: Path, run: Run, selection: Selection) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """The samples of the selection, and all of the run for these purposes; oldest first."""
    # Requests that score a group are no conversations.
    everything = [sample for sample in read_samples(root, run, selection.purposes) if not is_group(sample.request.data)]
    known = {sample.sample_id for sample in everything}
    if unknown := [sample_id for sample_id in selection.sample_ids if sample_id not in known]:
        raise InvalidInput(
            f"--sample {unknown[0]}: run {run.run_id} has no such rollout for "
            f"{' or '.join(purpose.value for purpose in selection.purposes)}; "
            f"`turnmill conversations {run.run_id}` lists what there is"
        )
    first, last = selection.steps or (0, 0)
    chosen = [
        sample
        for sample in everything
        if (not selection.sample_ids or sample.sample_id in selection.sample_ids)
        and (selection.steps is None or (sample.step is not None and first <= sample.step <= last))
    ]
    if selection.limit is not None:
        chosen = [sample for sample in chosen if _is_ended(sample)][-selection.limit :]
    return chosen, everything


def _is_ended(sample: SampleRecord) -> bool:
    """An attempt brought it to an end: with a reward, or without one for a reason that the environment caused."""
    return sample.report_digest is not None and (sample.reward is not None or sample.reason in _MENDABLE)


def _group_sizes(samples: Sequence[SampleRecord], config: Config) -> Mapping[str, int]:
    """How many samples with a reward each complete group has: those whose rewards were compared, or could be."""
    sizes = Counter(sample.group_id for sample in samples if sample.purpose is Purpose.TRAIN and sample.is_valid)
    return {group_id: size for group_id, size in sizes.items() if size >= config.number_generation}


# ---------------------------------------------------------------- the environment


def _environment(root: Path, config: Config, log: Path) -> Environment | Settings:
    """One of Turnmill's own, or the boxes of a package; with the judges that the run may ask."""
    found = find(config.environment, root=root)
    judges = load_judges(root, config.judges)
    check_secrets(judges, os.environ)
    if found.kind is EnvironmentKind.BUILT_IN:
        return load_built_in(found.choice)
    check_box(found)
    environ = {**os.environ, **settings_variable(judges)}
    return box_settings(found, root, log=log, call_timeout_s=config.call_timeout_s, environ=environ)


async def _with_groups(playing: Player, found: Sequence[Played], sizes: Mapping[str, int]) -> dict[str, Rescored]:
    """The members of each group that is rescored as a whole, with what the group adds now."""
    groups: dict[str, list[Played]] = {}
    for each in found:
        sample = each.rescored.sample
        if sample.purpose is Purpose.TRAIN and sample.is_valid and each.rescored.verdict is Verdict.RESCORED:
            groups.setdefault(sample.group_id, []).append(each)
    whole = [members for group_id, members in groups.items() if len(members) == sizes.get(group_id)]
    return {rescored.sample.key: rescored for members in whole for rescored in await playing.score_group(members)}
