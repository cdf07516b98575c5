"""Smoothing: channels of activations that are hard to quantize become smaller, and those of weights larger, or the
other way, as far as it helps (SmoothQuant, https://arxiv.org/abs/2211.10438; AWQ, https://arxiv.org/abs/2306.00978).

For each site, factors s = a^α / w^β are tried, a being a statistic of each channel of the activations and w the largest
of each column of the weights; the α that leaves the least error in the layers' results is taken: relative to each
token's, since a few tokens have results far larger than all others. s = 1 is among what is tried, so that a layer is
never worse than without, on what was seen.

Experts are judged by their own rows. What all of them read has factors that suit all; what one of them has inside has
its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.passes.graph import LinearLayer
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.choose import nearest_seen
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.quant.smoothing_sites import Site, sites
from enginewright.passes.streaming import one_thread_each, stream
from enginewright.passes.weights import open_rows, read, shape_of

TOKENS_SEEN = 1024  # about as many, of texts that are spread over all: channels that stick out do so everywhere
TOKENS_TRIED = 256  # of those, on which factors are compared; of each expert's rows as many
ROWS_TRIED = 512  # of each weight that is judged by itself
LEAST_ROWS = 16  # of each expert's where all are judged together
ALPHAS = tuple(step / 10 for step in range(11))
LIMIT = 1e4  # of factors, either way

UNSEEN = "no text that smoothing looks at came to this expert, whose factors suit what its nearest neighbour read"


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
        notes: list[str] = []

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            site = first.get(linear.weight)
            if site is None:
                return
            products = _products(site, linear, inputs)
            if site.experts == 1:
                factors[linear.weight] = self._factors(site, list(products)).unsqueeze(0)
                return
            factors[linear.weight] = torch.stack([self._factors(site, [product]) for product in products])
            notes.extend(UNSEEN for expert in range(site.experts) if nearest_seen(linear, expert) != expert)

        texts = self.calibration.texts
        seen = texts[:: max(sum(map(len, texts)) // TOKENS_SEEN, 1)]
        stream(model, seen, visit, self.calibration.threads)
        for weight, site in first.items():
            site.apply(factors[weight])
        return PassResult(len(found), tuple(refusals), tuple(notes))

    def _factors(self, site: Site, products: Sequence["_Product"]) -> torch.Tensor:
        a = site.narrow(self.statistic(torch.cat([product.x for product in products]).abs()))
        w = site.narrow(torch.stack([product.largest for product in products]).amax(0))
        tried = [(product.x[:: -(-len(product.x) // TOKENS_TRIED)], product.weights) for product in products]
        exact = [[F.linear(x, weight) for weight in weights] for x, weights in tried]
        sizes = [_squares(results).clamp(min=1e-30) for results in exact]

        def loss(factors: torch.Tensor) -> float:
            columns, total = site.widen(factors), 0.0
            with torch.inference_mode():  # of this thread
                for (x, weights), results, size in zip(tried, exact, sizes, strict=True):
                    q = self.config.round_activations(x / columns)
                    others = [F.linear(q, self._rounded(weight * columns)) for weight in weights]
                    errors = _squares([y - other for y, other in zip(results, others, strict=True)])
                    total += float((errors / size).sum())
            return total

        candidates = [
            torch.ones_like(a),
            *(_balanced(a**alpha, w ** (1 - alpha) if self.with_weights else None) for alpha in ALPHAS),
        ]
        if site.routers:  # they stay BFLOAT16, and the same numbers in it
            candidates = [torch.exp2(factors.log2().round()) for factors in candidates]
        with one_thread_each(self.calibration.threads) as pool:
            losses = list(pool.map(loss, candidates))
        return candidates[losses.index(min(losses))]

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return self.config.restore(*self.config.quantize(weight, "weight"))


@dataclass(frozen=True)
class _Product:
    """What some matrices are multiplied by."""

    x: torch.Tensor  # [tokens, K]
    weights: Sequence[torch.Tensor]  # some rows of each matrix, [n, K]
    largest: torch.Tensor  # of each column of the whole matrices, [K]


def _products(site: Site, linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Iterator[_Product]:
    """Of each expert, where the site's first layer is that of experts; and of the layers that read every token."""
    most = max(ROWS_TRIED * site.experts // linear.experts, LEAST_ROWS)

    def product(x: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> _Product:
        some = [weight[:: -(-len(weight) // most)].clone() for weight in weights]  # so that the whole weight can go
        return _Product(torch.cat(list(x)), some, torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))

    if linear.grouped:
        reader, rows = open_rows(linear.weight), shape_of(linear.weight)[0] // linear.experts
        for expert in range(linear.experts):
            x = linear.rows_of(nearest_seen(linear, expert), inputs)
            yield product(x, [reader(expert * rows, (expert + 1) * rows)])
    dense = [read(other.weight) for other in site.linears if not other.grouped]
    if dense:  # experts' rows are those of every token, each as often
        yield product(inputs, dense)


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
