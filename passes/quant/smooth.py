"""Smoothing: channels of activations that are hard to quantize become smaller, and those of weights larger, or the
other way, as far as it helps (SmoothQuant, https://arxiv.org/abs/2211.10438; AWQ, https://arxiv.org/abs/2306.00978).

For each site, factors s = a^α / w^β are tried, a being a statistic of each channel of the activations and w the largest
of each column of the weights; the α that leaves the least error in the layers' results is taken: relative to each
token's, since a few tokens have results far larger than all others. s = 1 is among what is tried, so that a layer is
never worse than without, on what was seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.passes.graph import LinearLayer
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.quant.smoothing_sites import Site, sites
from enginewright.passes.streaming import one_thread_each, stream
from enginewright.passes.weights import read

TOKENS_SEEN = 1024  # about as many, of texts that are spread over all: channels that stick out do so everywhere
TOKENS_TRIED = 256  # of those, on which factors are compared
ROWS_TRIED = 512  # of each weight
ALPHAS = tuple(step / 10 for step in range(11))
LIMIT = 1e4  # of factors, either way


@dataclass(frozen=True)
class Smooth:
    """config: what the layers will be. statistic: of |x| [tokens, K] → [K]. with_weights: β is 1 - α, and not 0."""

    config: QuantConfig
    calibration: Calibration
    statistic: Callable[[torch.Tensor], torch.Tensor]
    with_weights: bool
    name: str = "smooth"

    def __call__(self, model: ir.Model) -> PassResult:
        found, refusals = sites(model)
        first = {site.linears[0].weight: site for site in found}
        factors: dict[ir.Value, torch.Tensor] = {}

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            if linear.weight in first:
                factors[linear.weight] = self._factors(first[linear.weight], torch.cat(list(inputs)))

        texts = self.calibration.texts
        seen = texts[:: max(sum(map(len, texts)) // TOKENS_SEEN, 1)]
        stream(model, seen, visit, self.calibration.threads)
        for weight, site in first.items():
            site.apply(factors[weight])
        return PassResult(len(found), tuple(refusals))

    def _factors(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        weights = [read(linear.weight) for linear in site.linears]
        a = site.narrow(self.statistic(x.abs()))
        w = site.narrow(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
        seen = x[:: -(-len(x) // TOKENS_TRIED)]
        tried = [weight[:: -(-len(weight) // ROWS_TRIED)] for weight in weights]
        exact = [F.linear(seen, weight) for weight in tried]
        sizes = _squares(exact).clamp(min=1e-30)

        def loss(factors: torch.Tensor) -> float:
            columns = site.widen(factors)
            with torch.inference_mode():  # of this thread
                q = self.config.round_activations(seen / columns)
                results = [F.linear(q, self._rounded(weight * columns)) for weight in tried]
                errors = _squares([y - other for y, other in zip(exact, results, strict=True)])
            return float((errors / sizes).sum())

        candidates = [
            torch.ones_like(a),
            *(_balanced(a**alpha, w ** (1 - alpha) if self.with_weights else None) for alpha in ALPHAS),
        ]
        with one_thread_each(self.calibration.threads) as pool:
            losses = list(pool.map(loss, candidates))
        return candidates[losses.index(min(losses))]

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return self.config.restore(*self.config.quantize(weight, "weight"))


def _squares(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of what layers give for each token, DOUBLE [tokens]."""
    return torch.stack([y.double().square().sum(1) for y in results]).sum(0)


def _balanced(up: torch.Tensor, down: torch.Tensor | None) -> torch.Tensor:
    """up / down, around 1 and within limits; 1 where either is 0. As BFLOAT16 would hold them, so that what is
    remembered of a calibration does not hang on its last bits."""
    ratio = up if down is None else up / down
    usable = (ratio > 0) & ratio.isfinite()
    if not usable.any():
        return torch.ones_like(ratio)
    ratio = torch.where(usable, ratio, 1.0)
    middle = (ratio[usable].max() * ratio[usable].min()).sqrt()
    return torch.where(usable, ratio / middle, 1.0).clamp(1 / LIMIT, LIMIT).bfloat16().float()
