"""Intervals of shares."""

import math

# Of the normal distribution 2.5 % are above it.
Z_95 = 1.959963984540054


def wilson(share: float, num: float, *, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a share of `num` trials (Wilson, 1927): honest for few trials and shares near 0 or 1."""
    centre = share + z**2 / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    scale = 1 + z**2 / num
    # Rounding must not lead outside of what a share can be.
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
