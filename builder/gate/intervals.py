"""Confidence intervals of figures that were measured on some texts: the range of the mean over such texts.

The positions of a text are correlated: a format that hurts Chinese hurts all of a Chinese text, and a position sees the
tokens of the one before. Treated as independent, thousands of positions would give intervals that are much too narrow.
So a text counts as one observation, however long it is: the mean over positions is a ratio (the sum of the texts' sums
over the sum of their lengths), and its error is estimated from how far each text is from that ratio, as for a cluster
sample. A small number of texts has few degrees of freedom, which Student's t takes into account.

The gate looks several times, and ends at the first look that is certain. Each look may therefore err in a share of
`ERROR / LOOKS` of all cases, so that all of them err in `ERROR` at most (Bonferroni). That is conservative, as the
looks see the same texts.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from enginewright.builder.gate.distance import Positions
from enginewright.runtime.commands.quality import rounded

Interval = tuple[float, float]

ERROR = 0.01  # share of errors of all looks
LOOKS = 3  # looks before all texts are compared
# Student's t with 1, 2, … degrees of freedom: the factor beyond which, on both sides, there is ERROR / LOOKS.
T_FACTORS = (190.98, 17.28, 8.58, 6.25, 5.25, 4.7, 4.36, 4.12, 3.95, 3.83, 3.73, 3.65, 3.58, 3.53, 3.48)
# If no position disagrees, texts show no spread, and yet rare disagreements are possible: a share that was never seen
# in n positions may be -log(ERROR / LOOKS) / n.
UNSEEN = 5.7


def intervals(found: Sequence[Positions]) -> Mapping[str, Interval]:
    """Computes the intervals, by the names of MEASURES. Positions that are not finite are left out.

    Args:
        found: differences of each text.

    Returns:
        The intervals that are known: none with fewer than two texts.
    """
    every = {
        "kl": _mean([one.kl for one in found]),
        "top1": _mean([one.same[one.kl.isfinite()].double() for one in found]),
        "ppl": _mean([one.loss - one.source_loss for one in found]),  # the logarithm of the ratio
    }
    bounds = {name: (mean - error, mean + error) for name, (mean, error) in every.items() if error is not None}
    if "kl" in bounds:
        low, high = bounds["kl"]
        bounds["kl"] = max(low, 0.0), high
    if "top1" in bounds:
        low, high = bounds["top1"]
        unseen = UNSEEN / sum(len(one.same) for one in found)
        mean = (low + high) / 2
        bounds["top1"] = max(min(low, mean - unseen), 0.0), min(max(high, mean + unseen), 1.0)
    if "ppl" in bounds:
        low, high = bounds["ppl"]
        bounds["ppl"] = math.exp(low), math.exp(min(high, 700.0))  # a larger exponent gives infinity
    return {name: (_rounded(low), _rounded(high)) for name, (low, high) in bounds.items()}


def _mean(texts: Sequence[torch.Tensor]) -> tuple[float, float | None]:
    """Averages over all positions; returns the mean and its error, or None with fewer than two texts."""
    texts = [values[values.isfinite()] for values in texts]
    texts = [values for values in texts if len(values)]
    if len(texts) < 2:
        return 0.0, None
    counts = torch.tensor([float(len(values)) for values in texts], dtype=torch.float64)
    sums = torch.stack([values.sum() for values in texts])
    mean = sums.sum() / counts.sum()
    share = len(texts) / (len(texts) - 1)
    error = (share * (sums - mean * counts).square().sum()).sqrt() / counts.sum()
    return float(mean), float(error) * T_FACTORS[min(len(texts) - 1, len(T_FACTORS)) - 1]


def _rounded(value: float) -> float:
    number = rounded(value, 4)
    assert number is not None
    return number
