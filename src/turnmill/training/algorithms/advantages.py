"""How rewards become advantages: each method compares the samples of one group, the answers to one task.

| name | advantage of sample i | paper |
|---|---|---|
| group_based | (r_i - mean) / (std + 1e-4) | GRPO, arXiv:2402.03300 (DeepSeekMath), section 4.1.2 |
| group_based_no_std | r_i - mean | Dr. GRPO, arXiv:2503.20783, section 3.2 |
| rloo | r_i - mean of the others | RLOO, arXiv:2402.14740 |
| reinforce_pp_baseline | (r_i - mean) / (std over the whole batch + 1e-4) | REINFORCE++, arXiv:2501.03262 |
| opo | r_i - sum(l r) / sum(l), l being the numbers of trained tokens | OPO, arXiv:2505.23585, section 3 |
| grpo_passk | the best: r_i - second best; the others: 0 | arXiv:2503.19595 |
| group_based_per_turn | group_based, plus the same of each turn's discounted return | MT-GRPO, arXiv:2505.11821v1 |

Where published variants differ: `std` is the sample's (divided by S - 1), as in most implementations. REINFORCE++ does
not say whether samples or tokens weigh the same in the batch's std; here samples do, so that a long conversation has
no larger part in it, and its mean over the batch is 0 already. The pass@k advantage is not divided by a std. Of RLOO
and `group_based_no_std` one is the other times S / (S - 1).

A group of fewer than two samples that are compared has nothing to compare: its advantages are 0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PER_TURN = "group_based_per_turn"
# Divided by the standard deviation over the whole batch, so no group's advantages are known before the last group is.
WHOLE_BATCH = frozenset({"reinforce_pp_baseline"})
# Added to a standard deviation.
EPS = 1e-4

# [G, S] rewards and [G, S] lengths (trained tokens) -> [G, S] advantages.
Method = Callable[[Tensor, Tensor], Tensor]


def group_based(rewards_gs: Tensor, lengths_gs: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-4) within each group."""
    mean_g1 = rewards_gs.mean(dim=-1, keepdim=True)
    std_g1 = rewards_gs.std(dim=-1, keepdim=True)
    return (rewards_gs - mean_g1) / (std_g1 + EPS)


def group_based_no_std(rewards_gs: Tensor, lengths_gs: Tensor) -> Tensor:
    """r - mean: without the std, tasks that are nearly always or nearly never solved weigh no more than others."""
    return rewards_gs - rewards_gs.mean(dim=-1, keepdim=True)


def rloo(rewards_gs: Tensor, lengths_gs: Tensor) -> Tensor:
    """r - mean of the other samples: a baseline that does not depend on the sample itself."""
    num = rewards_gs.shape[-1]
    others_gs = (rewards_gs.sum(dim=-1, keepdim=True) - rewards_gs) / (num - 1)
    return rewards_gs - others_gs


def opo(rewards_gs: Tensor, lengths_gs: Tensor) -> Tensor:
    """r - sum(l r) / sum(l): the baseline of least variance if a gradient's squared norm grows as the length does."""
    total_g1 = lengths_gs.sum(dim=-1, keepdim=True).clamp(min=1)
    baseline_g1 = (lengths_gs * rewards_gs).sum(dim=-1, keepdim=True) / total_g1
    return rewards_gs - baseline_g1


def grpo_passk(rewards_gs: Tensor, lengths_gs: Tensor) -> Tensor:
    """max(all) - max(others): what the group's best reward would lose without the sample; 0 for all where two tie."""
    best_g2, index_g2 = rewards_gs.topk(2, dim=-1)
    lead_g1 = best_g2[:, :1] - best_g2[:, 1:]
    return torch.zeros_like(rewards_gs).scatter(-1, index_g2[:, :1], lead_g1)


METHODS: dict[str, Method] = {
    "group_based": group_based,
    "group_based_no_std": group_based_no_std,
    "rloo": rloo,
    "reinforce_pp_baseline": group_based_no_std,
    "opo": opo,
    "grpo_passk": grpo_passk,
}


def sample_advantages(method: str, rewards: Sequence[Tensor], lengths: Sequence[Tensor]) -> list[Tensor]:
    """[S] advantages of each group, from the rewards and lengths of the samples that are compared in it.

    Groups of one size are computed together. The methods in `WHOLE_BATCH` must be given all groups of the batch.
    """
    found = [torch.zeros_like(rewards_s) for rewards_s in rewards]
    for size in sorted({len(rewards_s) for rewards_s in rewards if len(rewards_s) > 1}):
        members = [g for g, rewards_s in enumerate(rewards) if len(rewards_s) == size]
        rewards_gs = torch.stack([rewards[g] for g in members])
        lengths_gs = torch.stack([lengths[g] for g in members])
        for g, advantages_s in zip(members, METHODS[method](rewards_gs, lengths_gs), strict=True):
            found[g] = advantages_s
    if method in WHOLE_BATCH and sum(map(len, found)) > 1:
        scale = torch.cat(found).std() + EPS
        found = [advantages_s / scale for advantages_s in found]
    return found


def discounted_returns(rewards_t: Tensor, gamma: float) -> Tensor:
    """[T] sums of a turn's reward and all later ones of its conversation, each turn later times gamma."""
    returns_t = torch.zeros_like(rewards_t)
    ahead = torch.zeros_like(rewards_t.sum())
    for turn in reversed(range(len(rewards_t))):
        ahead = rewards_t[turn] + gamma * ahead
        returns_t[turn] = ahead
    return returns_t


def turn_advantages(rewards_s: Tensor, turn_rewards: Sequence[Tensor], gamma: float) -> list[Tensor]:
    """[T] advantages of the turns of each sample of one group: A(outcome) + A(return of the turn).

    The outcome, which is the sample's reward, is compared as `group_based` does it, and counts for every turn. The
    discounted return of the rewards of single turns, from turn k on, is compared in the same way with those of the
    other samples at their turn k; where no other sample has a turn k, with nothing, and the outcome is what is left.

    The sum of both is MT-GRPO's advantage of a turn (arXiv:2505.11821v1, with lambda = 1; theirs is given for two
    turns), and that of GiGPO (arXiv:2505.10978, with omega = 1), which finds comparable turns by equal states of the
    environment. Returns in place of a turn's own reward: GiGPO, and GTPO (arXiv:2511.14846). As both parts are
    normalised, the size of the rewards of turns does not matter, only how they differ.
    """
    (outcome_s,) = sample_advantages("group_based", [rewards_s], [torch.ones_like(rewards_s)])
    returns = [discounted_returns(rewards_t, gamma) for rewards_t in turn_rewards]
    found = [outcome.expand(len(returns_t)).clone() for outcome, returns_t in zip(outcome_s, returns, strict=True)]
    for turn in range(max(map(len, returns), default=0)):
        there = [s for s, returns_t in enumerate(returns) if len(returns_t) > turn]
        at_turn_s = torch.stack([returns[s][turn] for s in there])
        (compared_s,) = sample_advantages("group_based", [at_turn_s], [torch.ones_like(at_turn_s)])
        for s, advantage in zip(there, compared_s, strict=True):
            found[s][turn] += advantage
    return found
