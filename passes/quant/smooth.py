"""Smoothing: makes channels of activations that are hard to quantize smaller, and those of weights larger.

It also works the other way, as far as it helps (SmoothQuant, https://arxiv.org/abs/2211.10438; AWQ,
https://arxiv.org/abs/2306.00978). For each site, factors s = a^α / w^β are tried, where a is a statistic of each
channel of the activations and w the amax of each column of the weights; the α with the least error in the layers'
results is chosen: relative to each token's, since a few tokens have results far larger than all others. s = 1 is among
the candidates, so that a layer is never worse than without smoothing, on the texts that were seen.

Experts are judged by their own rows. The input of all experts has factors that suit all; the inside of an expert has
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
from enginewright.passes.streaming import single_threaded_pool, stream
from enginewright.passes.weights import open_rows, read, shape_of

# tokens that are seen, about, from texts all over the data: outlier channels are the same everywhere
TOKENS_SEEN = 1024
TOKENS_TRIED = 256  # tokens of those on which factors are compared; for each expert, its rows
ROWS_TRIED = 512  # rows of each weight on which factors are compared
MIN_ROWS = 16  # rows of each expert's weight where all experts are judged together
ALPHAS = tuple(step / 10 for step in range(11))
# exponents α that are tried
LIMIT = 1e4  # limit of factors, and its inverse

UNSEEN = "no text that smoothing looks at came to this expert, whose factors suit what its nearest neighbour read"


@dataclass(frozen=True)
class Smooth:
    """Scales the inputs of linear layers, and the weights that write and read them."""

    config: QuantConfig  # format of the layers after quantization
    calibration: Calibration  # texts
    statistic: Callable[[torch.Tensor], torch.Tensor]  # |x| [tokens, K] → a, [K]
    with_weights: bool  # True if β is 1 - α, False if it is 0
    name: str = "smooth"  # name of the pass

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
        w = site.narrow(torch.stack([product.column_amax for product in products]).amax(0))
        tried = [(product.x[:: -(-len(product.x) // TOKENS_TRIED)], product.weights) for product in products]
        exact = [[F.linear(x, weight) for weight in weights] for x, weights in tried]
        sizes = [_squares(results).clamp(min=1e-30) for results in exact]

        def loss(factors: torch.Tensor) -> float:
            columns, total = site.widen(factors), 0.0
            with torch.inference_mode():  # the mode belongs to a thread
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
        if site.routers:  # powers of two keep the numbers of routers, which stay BFLOAT16, exact
            candidates = [torch.exp2(factors.log2().round()) for factors in candidates]
        with single_threaded_pool(self.calibration.threads) as pool:
            losses = list(pool.map(loss, candidates))
        return candidates[losses.index(min(losses))]

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return self.config.restore(*self.config.quantize(weight, "weight"))


@dataclass(frozen=True)
class SmoothWithoutData:
    """Scales by 1 whatever Smooth would scale, so that a plan without texts is one of an engine of the same size."""

    name: str = "smooth"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        found, refusals = sites(model)
        for site in found:
            site.apply(torch.ones(site.experts, site.channels))
        return PassResult(len(found), tuple(refusals))


@dataclass(frozen=True)
class _Product:
    """The inputs of some matrices, and rows of the matrices."""

    x: torch.Tensor  # inputs, [tokens, K]
    weights: Sequence[torch.Tensor]  # some rows of each matrix, [n, K]
    column_amax: torch.Tensor  # amax of each column of the whole matrices, [K]


def _products(site: Site, linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Iterator[_Product]:
    """Yields the product of each expert, if the site's first layer has experts, then that of other layers."""
    max_rows = max(ROWS_TRIED * site.experts // linear.experts, MIN_ROWS)

    def product(x: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> _Product:
        # a copy, so that the whole weight can be freed
        some = [weight[:: -(-len(weight) // max_rows)].clone() for weight in weights]
        return _Product(torch.cat(list(x)), some, torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))

    if linear.grouped:
        reader, rows = open_rows(linear.weight), shape_of(linear.weight)[0] // linear.experts
        for expert in range(linear.experts):
            x = linear.rows_of(nearest_seen(linear, expert), inputs)
            yield product(x, [reader(expert * rows, (expert + 1) * rows)])
    dense = [read(other.weight) for other in site.linears if not other.grouped]
    if dense:  # with experts, `inputs` has every token's rows, each the same number of times
        yield product(inputs, dense)


def _squares(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums the squares of layers' results for each token, DOUBLE [tokens]."""
    return torch.stack([y.double().square().sum(1) for y in results]).sum(0)


def _balanced(up: torch.Tensor, down: torch.Tensor | None) -> torch.Tensor:
    """Computes up / down, scaled around 1 and within limits; 1 where either is 0.

    Factors are rounded to BFLOAT16, so that a stored calibration does not depend on their last bits.
    """
    ratio = up if down is None else up / down
    usable = (ratio > 0) & ratio.isfinite()
    if not usable.any():
        return torch.ones_like(ratio)
    ratio = torch.where(usable, ratio, 1.0)
    middle = (ratio[usable].max() * ratio[usable].min()).sqrt()
    return torch.where(usable, ratio / middle, 1.0).clamp(1 / LIMIT, LIMIT).bfloat16().float()
