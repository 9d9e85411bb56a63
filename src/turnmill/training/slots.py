"""How far ahead groups are drawn off policy (`off_policy_async`): the budget that bounds the age of trained tokens.

    replicas serve s -> horizon -> groups drawn up to it -> batches in draw order -> steps -> versions -> replicas

Conversations are played for steps that are still far off, beside the steps being made. There are `global_batch_size`
slots for each of `age_tolerance` + 1 steps:

- A group takes `number_generation` slots of the last step that it can be in: the one in which it is if every undecided
  group before it has signal, so that batches take as few groups as they can. It is drawn only if that step is within
  the horizon, s + `age_tolerance` + 1, where s is the oldest version that a live replica samples with. Replacements of
  invalid or stale samples take the slots of their own group.
- Decided to be of no use (no signal, given up), a group gives its slots back at once: those behind it move up.
- A batch keeps its slots, also where it is short of groups, until every live replica serves the version that it makes:
  then s, and with it the horizon, goes up.

So no trained token is older than `age_tolerance` steps. Let a replica that serves v sample a token of a group. When
the group was drawn, the trainer's last word of the replicas was s, and the versions of a replica only go up: s <= v,
however late that word was. The group ends in the batch of some step m. The last step that it can be in never goes up:
where a group before it turns out to have no signal, the batches from there on end later or where they did, so that as
many or fewer of them end before it; where it has signal, nothing changes. Hence m <= s + `age_tolerance` + 1, which is
at most v + `age_tolerance` + 1, and as step m is made with the weights of m - 1, the token is m - 1 - v steps old, at
most `age_tolerance`. A replica that joins says so before it asks for the current version: either it was among those
that were asked for s, or it asked later, and the current version is never older than s. What is left is a replica that
was taken for dead and was not: its tokens are found too old when their conversation ends, which is then played anew.

And nothing waits for ever. A group waits for slots, these for the replicas to serve a version that is made or being
made: steps wait for closed batches alone, replicas for the end of their running calls. A batch waits for its groups,
which are drawn, and have slots for whatever must be played anew: each sample ends, and a group gives up after as many
replacements as it has samples. Once all closed batches are applied and served, s is the step before the open one, and
the horizon reaches over it.
"""

from collections.abc import Sequence


def latest_steps(may_have_signal: Sequence[bool], *, step: int, wanted: int, most: int) -> list[int]:
    """Of each group, in draw order, and of the one to be drawn next, the last step that it can be in.

    `may_have_signal`: whether it has, or is undecided. The first one is in the batch of `step`. A batch is full with
    `wanted` groups with signal, and over after `most` groups.
    """
    steps = [step]
    num_groups = num_signal = 0
    for may in may_have_signal:
        num_groups += 1
        num_signal += may
        is_over = num_signal == wanted or num_groups == most
        # One without any signal makes no step, and counts all the same: with the decisions that are open its groups may
        # come to lie in batches that have some.
        steps.append(steps[-1] + is_over)
        if is_over:
            num_groups = num_signal = 0
    return steps
