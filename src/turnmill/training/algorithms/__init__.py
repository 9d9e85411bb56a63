"""What is computed from rewards and log-probs: pure tensors, no model, no I/O, a page each.

    rewards -> advantages ─┐
    log-probs -> losses ───┼─> objective -> aggregation -> one number to minimise
    sampler, trainer -> mismatch ─┘

`advantages` says how much better than the others a conversation, or a turn of it, was; `losses` what follows from that
for the probability of its tokens; `mismatch` how far a token counts that sampler and trainer see differently;
`aggregation` what weighs the same; `objective` puts them together, with the KL term and the entropy bonus.

A *sequence* is a conversation sample: the trained tokens of all its rows. How a conversation branched, and how its rows
were cut into passes, changes nothing.

Axes: G groups, S samples of a group, T turns of a sample, N trained tokens of one micro-batch (flat), K those of all
its rows, V vocabulary.
"""
