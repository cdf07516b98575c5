"""Mixture of experts: each token goes through a few of many MLPs, and perhaps through one shared by all tokens.

https://arxiv.org/abs/1701.06538
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, short
from enginewright.builder.models.blocks.mlp import GatedMlp, Mlp, read_activation
from enginewright.plugins.experts.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.experts.grouped_linear import GROUPED_LINEAR
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.experts.sort_rows import SORT_ROWS
from enginewright.plugins.gemm.gemm import GATED
from enginewright.plugins.plugin import width_of

MAX_EXPERTS = 2**12
# By the activation of config.json: the epilogue of the product with gate and up (plugins/gemm/gemm.py).
EPILOGUES: Mapping[str, str] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}


@dataclass(frozen=True)
class Routing:
    """Choice of each token's experts, and their weights in the sum: plugins/experts/route.py."""

    experts: int  # number of experts
    top: int  # experts of a token
    scores: str = "softmax"  # function of the products with the router; "sigmoid": of each product alone
    bias: bool = False  # True if these products have a bias
    # Possible names, below the block's, of a tensor [experts] that is added to the scores for the choice only.
    correction: tuple[str, ...] = ()
    groups: int = 1  # groups of experts / groups neighbours
    chosen_groups: int = 1  # groups that experts are chosen from
    group_best: int = 2  # number of best scores that are summed to the score of a group
    normalized: bool = True  # True if the chosen scores are divided by their sum
    scale: float = 1.0  # factor of the result

    @staticmethod
    def read(
        config: ConfigReader, *count_keys: str, top_keys: tuple[str, ...] = ("num_experts_per_tok",), **settings: object
    ) -> "Routing":
        """Reads the routing.

        Args:
            config: config of the model.
            count_keys: possible keys of the number of experts.
            top_keys: possible keys of the number of a token's experts.
            settings: fields that the family sets.
        """
        routing = Routing(
            experts=config.read_size(*(count_keys or ("num_experts",)), maximum=MAX_EXPERTS),
            top=config.read_size(*top_keys, maximum=MAX_EXPERTS),
            **settings,  # type: ignore[arg-type]
        )
        if routing.top > routing.experts:
            raise config.error(f"num_experts_per_tok is {routing.top}, but there are {routing.experts} experts")
        return routing

    @staticmethod
    def read_grouped(
        config: ConfigReader,
        *count_keys: str,
        scores: str = "sigmoid",
        correction: tuple[str, ...] = ("gate.e_score_correction_bias",),
        groups: int = 1,
        chosen_groups: int = 1,
        scale: float = 1.0,
    ) -> "Routing":
        """Reads DeepSeek V3's routing: sigmoids, groups, and a correction that balances the load of experts.

        Args:
            config: config of the model.
            count_keys: possible keys of the number of experts.
            scores: as in Routing.
            correction: as in Routing.
            groups: number of groups if the config has none.
            chosen_groups: number of chosen groups if the config has none.
            scale: scale if the config has none.
        """
        groups = config.read_size("n_group", "num_expert_group", default=groups)
        routing = Routing.read(
            config,
            *(count_keys or ("n_routed_experts",)),
            scores=scores,
            correction=correction,
            groups=groups,
            chosen_groups=config.read_size("topk_group", default=chosen_groups),
            top_keys=("num_experts_per_tok", "num_experts_per_token"),
            normalized=config.read(bool, "norm_topk_prob", "moe_renormalize", default=True),
            scale=config.read_positive("routed_scaling_factor", default=scale),
        )
        experts, chosen = routing.experts, routing.chosen_groups
        if experts % groups or (groups > 1 and experts // groups < routing.group_best):
            raise config.error(f"{experts} experts cannot be cut into n_group = {groups} groups")
        if chosen > groups:
            raise config.error(f"topk_group is {chosen}, but there are {groups} groups")
        if routing.top > chosen * (experts // groups):
            raise config.error(f"num_experts_per_tok is {routing.top}, more than {chosen} groups have")
        return routing


@dataclass(frozen=True)
class ExpertNames:
    """Names of the block's tensors in a family's checkpoints, below the block's name.

    Weights of experts are stored either one by one (`experts.3.gate_proj.weight`), or in one tensor of gate and up, and
    one of down ([experts, rows, columns], as in transformers 5).
    """

    block: str = ""  # alternative name of the block, if a layer's `mlp` is missing; "" if it never is
    router: str = "gate"  # router
    one: str = "experts.{}"  # expert, by number
    gate: str = "gate_proj"  # gate of an expert
    up: str = "up_proj"  # up of an expert
    down: str = "down_proj"  # down of an expert
    gate_up_fused: str = "experts.gate_up_proj"  # fused gate and up, or up alone if experts have no gate
    down_fused: str = "experts.down_proj"  # fused down
    shared: str = "shared_expert"  # shared MLP
    shared_gate: str = "shared_expert_gate"  # gate of the shared MLP
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")  # projections to and from latent columns
    factors: str = ""  # tensor [experts] of factors of the experts' results; "": there is none


@dataclass(frozen=True)
class Experts:
    """Σ share · down(act(gate(x)) · up(x)) over a token's experts, and the shared MLP's result if there is one.

    Without a gate it is down(act(up(x))). With latent columns experts read a projection of x, and another projection of
    their sum is the result.
    """

    routing: Routing  # choice of experts
    width: int  # columns of gate and of up of one expert
    # Epilogue of gate and up (plugins/gemm/gemm.py); without a gate, the one of up (plugins/elementwise/activation.py).
    activation: str = "swiglu"
    bias: bool = False  # True if gate, up and down have a bias
    interleaved: bool = False  # True if fused tensors are [experts, columns, rows] with alternating rows of gate and up
    latent: int = 0  # columns of the experts' inputs and outputs; 0: as many as x
    shared: GatedMlp | Mlp | None = None  # MLP for all tokens; None: there is none
    # True if its result is multiplied by a sigmoid of x; not together with latent columns
    shared_is_gated: bool = False
    names: ExpertNames = field(default_factory=ExpertNames)  # names of tensors

    @staticmethod
    def read_activation(config: ConfigReader, *keys: str, default: str = "silu") -> str:
        """Reads the activation of experts with a gate.

        Args:
            config: config of the model.
            keys: possible keys.
            default: activation if the config has none.
        """
        return EPILOGUES[read_activation(config, *keys, default=default)]

    @staticmethod
    def read_width(config: ConfigReader, key: str = "moe_intermediate_size") -> int:
        """Reads the columns of one expert."""
        return config.read_size(key, maximum=MAX_COLUMNS)

    @staticmethod
    def read_shared(
        config: ConfigReader, routing: Routing, mlp: GatedMlp, key: str = "n_shared_experts", default: int = 1
    ) -> "Experts":
        """Reads DeepSeek V3's experts, with the shared ones merged into one MLP.

        Args:
            config: config of the model.
            routing: choice of experts.
            mlp: MLP of layers without experts.
            key: key of the number of shared experts.
            default: number of shared experts if the config has none.
        """
        width, shared = Experts.read_width(config), config.read(int, key, default=default)
        return Experts(
            routing,
            width,
            Experts.read_activation(config),
            shared=replace(mlp, width=shared * width) if shared else None,
            names=ExpertNames(shared="shared_experts"),
        )

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, scored: ir.Value | None = None) -> ir.Value:
        """Writes the mixture.

        Args:
            graph: graph to write into.
            x: input.
            tensor: name of the block in the checkpoint.
            scored: input of the router; None means x.
        """
        if self.names.block:
            router, layer = f".{self.names.router}.weight", tensor.rpartition(".")[0]
            either = (f"{tensor}{router}", f"{layer}.{self.names.block}{router}")
            tensor = graph.weights.first_of(*either).removesuffix(router)
        name = short(tensor)
        places, share, starts = self._route(graph, x if scored is None else scored, tensor, name)
        inner, outer = (f"{tensor}.{own}" for own in self.names.latent)
        read = graph.linear(x, inner, self.latent) if self.latent else x
        (rows,) = graph.plugin(SORT_ROWS, [read, places], f"{name}.sorted", to=int(ir.DataType.FLOAT), group=0).outputs
        up, down = self._weights(graph, tensor, width_of(read))
        gated = self.activation in GATED
        first = short(f"{tensor}.{self.names.gate_up_fused}")
        h = self._product(graph, rows, up, starts, first, self.activation if gated else "none")
        if not gated:
            h = graph.activation(self.activation, h, f"{name}.experts.active")
        parts = [self._product(graph, h, down, starts, f"{name}.experts.down_proj", "none"), places, share]
        shared = list[ir.Value]()
        if self.shared is not None:
            shared.append(self.shared.write(graph, x, f"{tensor}.{self.names.shared}"))
            if self.shared_is_gated:
                shared.append(graph.linear(x, f"{tensor}.{self.names.shared_gate}", 1))
        if not self.latent:
            return graph.plugin(COMBINE_EXPERTS, [*parts, *shared], f"{name}.mixed").outputs[0]
        mixed = graph.linear(graph.plugin(COMBINE_EXPERTS, parts, f"{name}.mixed").outputs[0], outer, width_of(x))
        return graph.add(mixed, shared[0]) if shared else mixed

    def _route(self, graph: GraphWriter, x: ir.Value, tensor: str, name: str) -> Sequence[ir.Value]:
        routing, router = self.routing, f"{tensor}.{self.names.router}"
        weight = graph.weights.tensor(f"{router}.weight", (routing.experts, width_of(x)))
        bias = graph.weights.tensor(f"{router}.bias", (routing.experts,)) if routing.bias else None
        correction = None
        if routing.correction:
            names = (f"{tensor}.{name}" for name in routing.correction)
            correction = graph.weights.exact(graph.weights.first_of(*names), routing.experts)
        outputs = graph.plugin(
            ROUTE,
            [x, weight, bias, correction],
            f"{name}.route",
            top=routing.top,
            scores=routing.scores,
            groups=routing.groups,
            chosen_groups=routing.chosen_groups,
            group_best=routing.group_best,
            normalized=int(routing.normalized),
            scale=routing.scale,
        ).outputs
        for output, part in zip(outputs, ("places", "share", "starts"), strict=True):
            output.name = f"{name}.{part}"
        return outputs

    def _weights(
        self, graph: GraphWriter, tensor: str, columns: int
    ) -> tuple[tuple[ir.Value, ir.Value | None], tuple[ir.Value, ir.Value | None]]:
        """Returns weights and biases of gate and up (for each expert gate, then up) or of up alone, and of down."""
        weights, names, experts, width = graph.weights, self.names, self.routing.experts, self.width
        first = (names.gate, names.up) if self.activation in GATED else (names.up,)
        rows = len(first) * width
        up_fused, down_fused = f"{tensor}.{names.gate_up_fused}", f"{tensor}.{names.down_fused}"
        order = [*range(0, rows, 2), *range(1, rows, 2)] if self.interleaved else None
        factors = f"{tensor}.{names.factors}" if names.factors else None
        if weights.has_fused(up_fused):
            up = weights.fused(up_fused, (experts, rows, columns), self.interleaved, order)
            down = weights.fused(down_fused, (experts, columns, width), self.interleaved, factors=factors)
            if not self.bias:
                return (up, None), (down, None)
            up_bias = weights.fused(f"{up_fused}_bias", (experts, rows), order=order)
            return (up, up_bias), (down, weights.fused(f"{down_fused}_bias", (experts, columns)))
        each = [f"{tensor}.{names.one.format(expert)}" for expert in range(experts)]

        def stacked(
            name: str, parts: Sequence[str], shape: tuple[int, ...], kind: str, factors: str | None = None
        ) -> ir.Value:
            names = [f"{one}.{part}.{kind}" for one in each for part in parts]
            return weights.stacked(f"{name}.{kind}", names, shape, factors)

        return (
            (
                stacked(up_fused, first, (width, columns), "weight"),
                stacked(up_fused, first, (width,), "bias") if self.bias else None,
            ),
            (
                stacked(down_fused, (names.down,), (columns, width), "weight", factors),
                stacked(down_fused, (names.down,), (columns,), "bias") if self.bias else None,
            ),
        )

    def _product(
        self,
        graph: GraphWriter,
        x: ir.Value,
        weight: tuple[ir.Value, ir.Value | None],
        starts: ir.Value,
        name: str,
        epilogue: str,
    ) -> ir.Value:
        to = int(ir.DataType.FLOAT)
        return graph.plugin(GROUPED_LINEAR, [x, *weight, starts], name, epilogue=epilogue, to=to).outputs[0]
