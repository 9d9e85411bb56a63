"""What weighs the same when the tokens of a batch become one number: sum(w x) / divisor.

| name | weight w of a token | divisor | paper |
|---|---|---|---|
| token | 1 | trained tokens | arXiv:2503.14476 (DAPO), section 3.3 |
| sequence | 1 / trained tokens of its sample | samples | arXiv:2402.03300 (GRPO), equation 3 |
| constant | 1 / max_length | samples | arXiv:2503.20783 (Dr. GRPO), section 3.2 |

Both the weights and the divisor are those of a whole sample or batch, so the gradients of micro-batches sum to that of
the batch, however it was cut. A sample that is not trained counts nowhere.
"""

import torch
from torch import Tensor


def token_weights(aggregation: str, lengths_s: Tensor, max_length: int) -> Tensor | None:
    """[S] the weight of each token of a sample, given the samples' trained tokens; None: all are 1."""
    if aggregation == "token":
        return None
    if aggregation == "sequence":
        return 1 / lengths_s
    return torch.full_like(lengths_s, 1 / max_length)


def divisor(aggregation: str, num_tokens: int, num_samples: int) -> int:
    """What the weighted sum over the trained tokens of a batch is divided by."""
    return num_tokens if aggregation == "token" else num_samples
