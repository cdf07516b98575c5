"""Speed of large models on many machines as the cost model predicts it; nothing is measured, and no weight is read.

    python benchmarks/predicted_ranks.py [--config CONFIG.JSON …] [--machines 2 4 8] [--quant int4-rtn]

The cost model is the one that ranks.py has compared with measurements on one machine (docs/devices.md): a step takes
the time of the rank with the most to read or to compute, and for each exchange its latency, and the bytes received ÷
their rate. Bytes, operations and exchanges are those of the plan of the engine that would be built from a config.json.
All else are the assumptions below, each with its source. Prints a Markdown table.

A layout "tensor T" has T ranks with a part of each layer. "pipeline P × tensor T" has P stages, each a part of the
layers, that T ranks compute. Its step takes as long as all stages one after another; with P micro-batches in flight,
one ends each time that the slowest stage has ended.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from enginewright.builder.assembly import Assembly, assemble
from enginewright.builder.build import BuildConfig, quant_config
from enginewright.builder.checkpoint.base import TensorInfo, TokenizerFiles
from enginewright.builder.pooling import Pooling
from enginewright.builder.progress import Silent
from enginewright.plan import KernelCall, Plan, WeightOperand
from enginewright.rank_layout import RankLayout
from enginewright.rank_plan import plan_of_rank, units_of_rank
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.weight_parts import columns_of, part_of_weight
from enginewright.runtime.device.ranks.shares import RankShare, rank_shares

PUBLISHED = Path(__file__).parents[1] / "tests/golden/published_configs.json"
# Of a published config.json: names of code and versions, and the format of weights that are quantized again here.
LEFT_OUT = ("architectures", "auto_map", "quantization_config", "torch_dtype", "transformers_version")
SEQUENCES, PROMPT, CONTEXT = 32, 512, 1024  # sequences of a batch, tokens of a prompt, positions before a decoded token
GIB = 1 << 30
TRIALS = 64  # random routings of which the mean is taken


@dataclass(frozen=True)
class Chip:
    """A device that computes a rank: a socket, or a GPU."""

    name: str  # name in the table
    memory_bytes: int  # memory of one
    read_rate: float  # bytes of memory that it reads in a second
    ops_rate: float  # operations on int8 in a second; a multiply-add counts as two


@dataclass(frozen=True)
class Link:
    """A link over which ranks exchange."""

    latency_s: float  # seconds of an exchange of few bytes
    message_s: float  # seconds that each further rank adds to it
    rate: float  # bytes that a socket, a GPU or, over a network, a machine receives in a second


# AMD EPYC 9004: 12 channels of DDR5-4800 are 460.8 GB/s (data sheet); 80% of it is read, as STREAM reaches. 64 cores
# at 3 GHz multiply 64 pairs of int8 in a cycle (AVX512-VNNI, 512 bits in two halves); half of that is reached.
SOCKET = Chip("socket", 384 * GIB, 0.8 * 460.8e9, 0.5 * 64 * 3e9 * 128)
# NVIDIA H200 SXM: 141 GB, 4.8 TB/s and 1979 TOPS of int8 (data sheet), 80% and half of it. There are no ranks on GPUs
# yet: the row says what the same plan would take.
H200 = Chip("H200", 141 * 10**9, 0.8 * 4.8e12, 0.5 * 1979e12)

# Shared memory of two sockets: rate as ranks.py has measured on one socket, 12 GB/s; latency 0.2 µs there, and five
# times as much is assumed between sockets.
SHARED = Link(1e-6, 0.0, 12e9)
# 25 GbE: 25e9 / 8 bytes/s. TCP between two machines over one switch is assumed to take 20 µs, and each further rank,
# to which a rank sends and from which it receives apart, 3 µs.
NETWORK = Link(20e-6, 3e-6, 25e9 / 8)
# NVLink 4: 900 GB/s for both directions (data sheet), so 450 GB/s are received. 10 µs for a collective are assumed.
NVLINK = Link(10e-6, 0.0, 450e9)
# Bytes of a number of the hidden state that a stage sends: the sum of the layers in fp32, and its norm in bf16.
HIDDEN_BYTES = 6

# Configs that are not in PUBLISHED, in the keys that decide about sizes: from the model cards, and for Qwen3.5 also
# https://github.com/THUDM/slime/blob/main/scripts/models/qwen3.5-397B-A17B.sh. The heads of its linear attention have
# not been compared with a published config; a test sees that the weights add up to 396 billion.
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN35_397B = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class ShapesOnly:
    """A Checkpoint that has a config and the shapes of its tensors, and no weights."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    origin: str | None = None

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> "ShapesOnly":
        """The checkpoint that transformers would save for a config."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
        shapes = {key: TensorInfo(torch.bfloat16, tuple(value.shape)) for key, value in model.state_dict().items()}
        return cls(name, config, {key: info for key, info in shapes.items() if key != tied})

    @property
    def tokenizer(self) -> TokenizerFiles:
        """A tokenizer without words, since no text is read."""
        return TokenizerFiles(Tokenizer(models.BPE()).to_str().encode(), {}, None)

    def read(self, name: str) -> torch.Tensor:
        """Raises AssertionError."""
        raise AssertionError(f"{name} is read, but a plan needs no weights")

    def source_hashes(self) -> Mapping[str, str]:
        """Hashes of no files."""
        return {}


@dataclass(frozen=True)
class RankWork:
    """Work of a rank in a step of all layers: bytes that it reads, and operations."""

    share: RankShare  # its weights, caches and exchanges
    dense_bytes: int  # bytes of the weights that each step reads
    expert_bytes: int  # bytes of the weights of its experts, of which a step reads those that its tokens take
    ops_of_token: int  # operations for a token
    ops_of_position: int  # operations for each position that a token sees


@dataclass(frozen=True)
class Work:
    """Work of all ranks of a model."""

    ranks: Sequence[RankWork]
    hidden_bytes: int  # bytes of the hidden state of a token, which a stage passes to the next one
    experts: int  # number of experts of a layer; 0: there are none
    active: int  # number of experts that a token takes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the largest rank, with the caches of a full batch."""
        tokens = SEQUENCES * (CONTEXT + PROMPT)
        return max(
            rank.share.weight_bytes
            + tokens * rank.share.kv_bytes_per_token
            + SEQUENCES * rank.share.state_bytes_per_sequence
            for rank in self.ranks
        )


def _is_of_experts(call: KernelCall) -> bool:
    return "starts" in call.operands and any(isinstance(one, WeightOperand) for one in call.operands.values())


def work_of(assembly: Assembly, config: Mapping[str, Any], size: int) -> Work:
    """Computes what each of a number of ranks does.

    Args:
        assembly: the engine that would be built.
        config: the config of its model.
        size: number of ranks.
    """
    (plan,) = assembly.plans.values()

    def ranges(calls: Sequence[KernelCall]) -> int:
        read = {
            (operand.name, *one)
            for call in calls
            for operand in call.operands.values()
            if isinstance(operand, WeightOperand)
            for one in part_of_weight(assembly.weights[operand.name].form, operand).ranges
        }
        return sum(end - begin for _, begin, end in read)

    def rank_work(part: Plan, share: RankShare) -> RankWork:
        experts = [call for call in part.calls if _is_of_experts(call)]
        dense = [call for call in part.calls if not _is_of_experts(call) and not call.kernel.startswith("embed_")]
        return RankWork(
            share,
            ranges(dense),
            ranges(experts),
            sum(call.cost.of_token for call in part.calls),
            sum(call.cost.of_position for call in part.calls),
        )

    def form(name: str) -> Any:
        return assembly.weights[name].form

    plans = [plan_of_rank(plan, rank, size, lambda name: columns_of(form(name))) for rank in range(size)]
    parts = zip(plans, rank_shares(plan, form, RankLayout(size)), strict=True)
    experts = next((config[key] for key in ("n_routed_experts", "num_experts") if config.get(key)), 0)
    active = config["num_experts_per_tok"] if experts else 0
    return Work([rank_work(*part) for part in parts], HIDDEN_BYTES * config["hidden_size"], experts, active)


def expert_share(experts: int, active: int, tokens: int, size: int) -> float:
    """Share of its experts that the rank with the most of them reads in a layer, if tokens choose evenly at random.

    Args:
        experts: number of experts.
        active: number of experts that a token takes.
        tokens: number of tokens.
        size: number of ranks, each with an equal part of the experts.
    """
    random, shares = np.random.default_rng(0), []
    bounds = [units_of_rank(experts, rank, size) for rank in range(size)]
    for _ in range(TRIALS):
        chosen = np.argpartition(random.random((tokens, experts)), active - 1)[:, :active]
        is_read = np.bincount(chosen.reshape(-1), minlength=experts) > 0
        shares.append(max(is_read[first : first + count].mean() if count else 0.0 for first, count in bounds))
    return float(np.mean(shares))


@dataclass(frozen=True)
class Layout:
    """A way to divide a model."""

    chip: Chip
    stages: int  # stages of the pipeline
    tensor: int  # ranks of a stage
    machines: int  # machines over which the ranks of a stage are divided
    inside: Link  # link between ranks of a stage
    between: Link  # link between stages

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"tensor {self.tensor}" if self.stages == 1 else f"pipeline {self.stages} × tensor {self.tensor}"

    def exchange_s(self, work: Work, tokens: int, rows: int) -> float:
        """Seconds of the exchanges of a step of all layers.

        Args:
            work: what the ranks do.
            tokens: number of tokens.
            rows: rows of logits.
        """
        if self.tensor == 1:
            return 0.0
        received = max(
            tokens * rank.share.received_bytes_per_token + rows * rank.share.received_bytes_per_logits
            for rank in work.ranks
        )
        if self.machines > 1:  # the ranks of a machine share its network, and need it for other machines' parts alone
            of_machine = self.tensor // self.machines
            received = received * of_machine * (self.tensor - of_machine) / (self.tensor - 1)
        latency_s = self.inside.latency_s + self.inside.message_s * (self.tensor - 2)
        return work.ranks[0].share.exchanges * latency_s + received / self.inside.rate

    def compute_s(self, work: Work, tokens: int, sequences: int) -> float:
        """Seconds in which the slowest rank reads and computes, for all layers.

        Args:
            work: what the ranks do.
            tokens: number of tokens.
            sequences: number of sequences; each token of a decoding one sees CONTEXT positions.
        """
        share = expert_share(work.experts, work.active, tokens, self.tensor) if work.experts else 0.0
        positions = CONTEXT if tokens == sequences else tokens // sequences // 2
        seconds = []
        for rank in work.ranks:
            caches = positions * rank.share.kv_bytes_per_token + 2 * rank.share.state_bytes_per_sequence
            read = rank.dense_bytes + share * rank.expert_bytes + sequences * caches
            ops = tokens * (rank.ops_of_token + positions * rank.ops_of_position)
            seconds.append(max(read / self.chip.read_rate, ops / self.chip.ops_rate))
        return max(seconds)

    def hop_s(self, work: Work, tokens: int) -> float:
        """Seconds in which the hidden states of tokens reach the next stage; 0 with one stage."""
        return 0.0 if self.stages == 1 else self.between.latency_s + tokens * work.hidden_bytes / self.between.rate

    def latency_s(self, work: Work, tokens: int, sequences: int) -> float:
        """Seconds of a step from its tokens to the next ones: all stages one after another, and back to the first.

        Args:
            work: what the ranks of a stage do, for all layers.
            tokens: number of tokens.
            sequences: number of sequences.
        """
        step = self.compute_s(work, tokens, sequences) + self.exchange_s(work, tokens, sequences)
        return step + self.stages * self.hop_s(work, tokens)

    def tokens_per_s(self, work: Work, sequences: int) -> float:
        """Tokens that decoding sequences get in a second. With stages, there is a micro-batch for each, if possible.

        Args:
            work: what the ranks of a stage do, for all layers.
            sequences: number of sequences.
        """
        if self.stages == 1 or sequences == 1:
            return sequences / self.latency_s(work, sequences, sequences)
        in_flight = min(self.stages, sequences)
        size = -(-sequences // in_flight)
        stage = (self.compute_s(work, size, size) + self.exchange_s(work, size, size)) / self.stages
        return sequences / (self.stages * max(stage, self.hop_s(work, size)))


def layouts(machines: Sequence[int]) -> list[tuple[str, Layout]]:
    """Layouts of the table, with the name of their machines.

    Args:
        machines: numbers of machines of two sockets each.
    """
    found = []
    for count in machines:
        name = f"{count} machines, {2 * count} sockets"
        found += [
            (name, Layout(SOCKET, 1, 2 * count, count, NETWORK, NETWORK)),
            (name, Layout(SOCKET, count, 2, 1, SHARED, NETWORK)),
            (name, Layout(SOCKET, 2 * count, 1, 1, SHARED, NETWORK)),
        ]
    return [
        *found,
        ("8 × H200", Layout(H200, 1, 8, 1, NVLINK, NVLINK)),
        ("8 × H200", Layout(H200, 8, 1, 1, NVLINK, NVLINK)),
    ]


def rows_of(name: str, config: Mapping[str, Any], quant: str, machines: Sequence[int]) -> list[str]:
    """Rows of the table for a model.

    Args:
        name: the name of the model.
        config: its config.
        quant: the quantization method.
        machines: numbers of machines of two sockets each.
    """
    assembly = assemble(ShapesOnly.of(name, config), BuildConfig(quant=quant_config(quant), gate=None), Silent())
    works: dict[int, Work] = {}
    found = []
    for place, layout in layouts(machines):
        if layout.tensor not in works:
            works[layout.tensor] = work_of(assembly, config, layout.tensor)
        work = works[layout.tensor]
        nbytes = work.memory_bytes // layout.stages
        memory = format_bytes(nbytes) + ("" if nbytes <= layout.chip.memory_bytes else ", too much")
        one, batch = layout.tokens_per_s(work, 1), layout.tokens_per_s(work, SEQUENCES)
        prompt = layout.latency_s(work, PROMPT, 1)
        row = (name, place, layout.name, memory, f"{one:.1f}", f"{batch:.0f}", f"{prompt:.2f} s")
        found.append(f"| {' | '.join(row)} |")
    return found


def models_of_docs() -> dict[str, Mapping[str, Any]]:
    """The models of the table in docs/devices.md, by name."""
    deepseek = json.loads(PUBLISHED.read_text())["deepseek-ai/DeepSeek-V3"]
    return {
        "Llama-3.3-70B": LLAMA_70B,
        "Qwen3.5-397B-A17B": QWEN35_397B,
        "DeepSeek-V3": {key: value for key, value in deepseek.items() if key not in LEFT_OUT},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", help="config.json of other models than those of the docs")
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--quant", default="int4-rtn")
    arguments = parser.parse_args()
    configs = models_of_docs()
    if arguments.config:
        read = {str(path): json.loads(path.read_text()) for path in arguments.config}
        configs = {
            name: {key: value for key, value in one.items() if key not in LEFT_OUT} for name, one in read.items()
        }
    print(f"Predicted, not measured, for {arguments.quant}:\n")
    head = ("model", "on", "layout", "memory of a rank", "1 sequence", f"{SEQUENCES} sequences", f"{PROMPT} tokens")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name, config in configs.items():
        for row in rows_of(name, config, arguments.quant, arguments.machines):
            print(row, flush=True)


if __name__ == "__main__":
    main()
