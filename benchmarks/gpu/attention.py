"""Paged attention of decode and prefill, compared with torch's SDPA, FlashInfer if installed, and the roofline."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.bench import Bench, GpuBench, Replay, copies, interleaved, ratio
from benchmarks.gpu.calls import OpCall, Tensors, buffer, call_of, empty, random_bytes, random_rows, vector
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import Roofline, reported
from enginewright.plan import COMMON_DIMS, Linear, StepSizes, linear, step_sizes
from enginewright.plugins.attention import attention_cuda
from enginewright.plugins.attention.kv_write import BLOCK_SIZE, kv_row_bytes
from enginewright.plugins.kernel import Call, Matrix
from enginewright.runtime.step.dims import SPLIT_TOKENS

Dense = tuple[torch.Tensor, torch.Tensor]  # keys and values
Attend = Callable[[int], object]  # with a set of them

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BATCHES, CONTEXTS = (1, 8, 32, 128), (1024, 4096, 32768)
PROMPT = 8192
KV_DTYPES = {"bf16": ir.DataType.BFLOAT16, "i8": ir.DataType.INT8, "e4m3": ir.DataType.FLOAT8E4M3FN}
WGMMA = "bf16 wgmma"  # like bf16, with Hopper's kernel for prompts
SAME = 2e-2  # largest difference of bf16 results from torch's, relative to the largest value
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def tile_bytes(kv: str) -> int:
    """Bytes of one head's keys, or values, in a block."""
    return BLOCK_SIZE * kv_row_bytes(HEAD_DIM, kv)


DIMS = (*COMMON_DIMS, "kv_blocks", "kv_splits")


def pages_of(contestant: str) -> str:
    return contestant.removesuffix(" wgmma")


def attention_call(contestant: str) -> OpCall:
    """contestant: a dtype of pages, or WGMMA."""
    kv = pages_of(contestant)
    width, dtypes = HEADS * HEAD_DIM, ir.DataType
    pool = Matrix(kv, Linear(), HEAD_DIM, HEAD_DIM, HEAD_DIM, block_stride=2 * KV_HEADS * tile_bytes(kv))
    matrices = {
        "q": buffer("bf16", width),
        "key": pool,
        "value": pool,
        "query_start": vector(linear(1, sequences=1)),
        "kv_len": vector(linear(sequences=1)),
        "block_table": vector(linear(sequences=1)),
        "out": buffer("bf16", width),
    }
    attributes: dict[str, int | float | str] = {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "scale": HEAD_DIM**-0.5,
        "window": 0,
        "softcap": 0.0,
        "lookahead": 0,
        "block_size": BLOCK_SIZE,
        "stored": int(KV_DTYPES[kv]),
        "queries": int(dtypes.BFLOAT16),
        "to": int(dtypes.BFLOAT16),
    }
    call = call_of("PagedAttention", matrices, dims=DIMS, **attributes)
    launches = {launch.kernel.partition("<")[0]: launch for launch in call.launches}
    (prefill,) = (
        attention_cuda.wgmma_launches(Call(call.matrices, attributes, dims=DIMS))
        if contestant == WGMMA
        else [launches["paged_prefill"]]
    )
    return replace(call, launches=(prefill, launches["paged_decode"]))


@dataclass(frozen=True)
class Problem:
    """tokens: of each sequence, at its end. context: positions of each, these among them."""

    kv: str
    batch: int
    context: int
    tokens: int = 1

    @property
    def sizes(self) -> StepSizes:
        blocks, splits = -(-self.context // BLOCK_SIZE), -(-self.context // SPLIT_TOKENS)
        return step_sizes(
            tokens=self.batch * self.tokens,
            sequences=self.batch,
            logit_rows=self.batch,
            kv_blocks=blocks,
            kv_splits=splits,
        )

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.sizes["kv_blocks"] * 2 * KV_HEADS * tile_bytes(self.kv)


class Prepared:
    """A problem's memory: `sets` pools in turn, each with block tables in no order."""

    def __init__(self, bench: Bench, call: OpCall, problem: Problem, sets: int) -> None:
        at, sizes = bench.at, problem.sizes
        self.call, self.problem, self._bench = call, problem, bench
        blocks = problem.batch * sizes["kv_blocks"]
        self.pool = random_pool(problem.kv, sets * blocks, at)
        order = torch.randperm(sets * blocks, device=at).to(torch.int32)
        self.tables = order.view(sets, problem.batch, sizes["kv_blocks"])
        ends = torch.arange(problem.batch + 1, dtype=torch.int32, device=at)
        self.operands: dict[str, torch.Tensor] = {
            "q": random_rows(call.matrices["q"], sizes, at),
            "key": self.pool,
            "value": self.pool.view(-1)[KV_HEADS * tile_bytes(problem.kv) :],
            "query_start": ends * problem.tokens,
            "kv_len": torch.full((problem.batch,), problem.context, dtype=torch.int32, device=at),
            "out": empty(call.matrices["out"], sizes, at),
            **call.scratch(sizes, at),
        }

    def replay(self) -> Replay:
        bind = self.call.bind
        each: list[Tensors] = [{**self.operands, "block_table": table.contiguous()} for table in self.tables]
        return self._bench.ours([bind(self._bench.device, operands, self.problem.sizes) for operands in each])

    @property
    def out(self) -> torch.Tensor:
        """[batch, heads, tokens, head_dim]"""
        return self._heads(self.operands["out"])

    @property
    def q(self) -> torch.Tensor:
        return self._heads(self.operands["q"]).contiguous()

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        whole = rows[:, : HEADS * HEAD_DIM].view(self.problem.batch, self.problem.tokens, HEADS, HEAD_DIM)
        return whole.transpose(1, 2)

    def dense(self, one: int) -> Dense:
        """Keys and values of a set as torch has them, [batch, kv_heads, context, head_dim]; of bf16 pools."""
        blocks = self.pool.view(torch.bfloat16).view(-1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        found = []
        for half in range(2):
            tiles = blocks[self.tables[one].long(), half]  # [batch, blocks, kv_heads, 32, head_dim]
            whole = tiles.transpose(1, 2).reshape(self.problem.batch, KV_HEADS, -1, HEAD_DIM)
            found.append(whole[:, :, : self.problem.context])
        return found[0], found[1]


def random_pool(kv: str, blocks: int, at: str) -> torch.Tensor:
    """UINT8 [blocks · 2 · kv_heads, tile_bytes]: codes, then a scale for each of 32 (csrc/cuda/kv.cuh)."""
    pool = torch.empty(blocks * 2 * KV_HEADS, tile_bytes(kv), dtype=torch.uint8, device=at)
    codes = pool[:, : BLOCK_SIZE * HEAD_DIM * (2 if kv == "bf16" else 1)]
    for begin in range(0, len(pool), 1 << 16):  # numbers come from wider ones
        part = codes[begin : begin + (1 << 16)]
        part.copy_(random_bytes(kv, part.numel(), at).view(part.shape))
    if kv != "bf16":
        pool[:, codes.shape[1] :].view(torch.float32).uniform_(0.005, 0.02)
    return pool


def sdpa(prepared: Prepared, backend: SDPBackend, kv: list[Dense]) -> Attend:
    q, causal = prepared.q, prepared.problem.tokens > 1

    def attend(one: int) -> None:
        keys, values = kv[one]
        with sdpa_kernel(backend):
            scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)

    return attend


def flashinfer(prepared: Prepared) -> Attend:
    """Raises ImportError where it is not."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    problem, pool = prepared.problem, prepared.pool
    cache = pool.view(torch.bfloat16).view(-1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    count, wrappers = problem.sizes["kv_blocks"], []
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device="cuda") * count
    last = torch.full((problem.batch,), (problem.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device="cuda")
    q = prepared.q[:, :, 0].contiguous()
    for table in prepared.tables:
        room = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(starts, table.flatten(), last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, **types)
        wrappers.append(wrapper)
    return lambda one: wrappers[one].run(q, cache)


def peers(prepared: Prepared, bench: Bench, report: Report, name: str) -> dict[str, Replay]:
    """Replays by name."""
    problem, sets = prepared.problem, len(prepared.tables)
    kv = [prepared.dense(one) for one in range(sets)]
    made: dict[str, Callable[[], Attend]] = {
        f"sdpa {backend}": lambda value=value: sdpa(prepared, value, kv) for backend, value in BACKENDS.items()
    }
    if problem.tokens == 1 and isinstance(bench, GpuBench):
        made["flashinfer"] = lambda: flashinfer(prepared)
    found: dict[str, Replay] = {}
    for peer, make in made.items():
        try:
            attend = make()
            found[peer] = bench.torch([lambda one=one, attend=attend: attend(one) for one in range(sets)])
        except (RuntimeError, ImportError, ValueError, TypeError) as why:
            report.skip(f"{name}/{peer}", str(why))
    return found


def error(prepared: Prepared) -> float:
    """Difference of the result with the last set of bf16 pages from torch's, relative to its largest value."""
    keys, values = prepared.dense(len(prepared.tables) - 1)
    causal = prepared.problem.tokens > 1
    expected = scaled_dot_product_attention(prepared.q, keys, values, is_causal=causal, enable_gqa=True)
    return float((prepared.out - expected).abs().max() / expected.abs().max())


def measure(
    bench: Bench, report: Report, roofline: Roofline, problem: Problem, calls: dict[str, OpCall], only: str = ""
) -> None:
    """Measures a batch and a context with all calls; peers have pages of bf16.

    Args:
        only: Name of the call that is reported, compared with the others. "": all are.
    """
    kind = "decode" if problem.tokens == 1 else "prefill"
    name = f"attention/{kind}/{problem.batch}x{problem.context}"
    contestants: dict[str, Replay] = {}
    problems = {who: Problem(pages_of(who), problem.batch, problem.context, problem.tokens) for who in calls}
    wrong = {}
    for who, one in problems.items():
        prepared = Prepared(
            bench, calls[who], one, copies(bench, one.kv_bytes, max_copies=64) if kind == "decode" else 1
        )
        contestants[who] = prepared.replay()
        if who == "bf16":
            contestants |= peers(prepared, bench, report, name)
        if one.kv == "bf16":
            wrong[who] = error(prepared)
        elif not bool(torch.isfinite(prepared.out.float()).all()):
            wrong[who] = float("inf")
    seconds = interleaved(bench, contestants)
    for contestant, found in seconds.items():
        if only and contestant != only:
            continue
        typical = sorted(found)[len(found) // 2]
        values: dict[str, float | str] = {"seconds": typical}
        if kind == "decode":
            rate = problems.get(contestant, problem).kv_bytes / typical
            values |= {"bytes per s": rate, "of the memory roofline": rate / roofline.memory}
        else:
            flops = 2 * problem.batch * HEADS * HEAD_DIM * problem.tokens * problem.context
            values |= {"flops": flops / typical, "of the matmul roofline": flops / typical / roofline.bf16_flops}
        rivals = [times for peer, times in seconds.items() if peer not in problems]
        if contestant in problems and rivals:
            values["over the best peer"] = ratio([min(times) for times in zip(*rivals, strict=True)], found)
        if contestant in problems and "flashinfer" in seconds:
            values["over flashinfer"] = ratio(seconds["flashinfer"], found)
        if contestant == WGMMA:
            values["over mma.sync"] = ratio(seconds["bf16"], found)
        if not wrong.get(contestant, 0.0) < SAME:
            values["error"] = f"it is off by {wrong[contestant]:.2g} of the largest number"
        report.add(f"{name}/{contestant}", **values)


def run(report: Report) -> None:
    bench = GpuBench()
    roofline = reported(bench, report)
    calls = {kv: attention_call(kv) for kv in KV_DTYPES}
    prompt = Problem("bf16", 1, PROMPT, PROMPT)
    some = [Problem("bf16", 1, 1024).sizes, prompt.sizes]
    bench.compile(kernel for call in calls.values() for sizes in some for kernel in call.instances(sizes))
    for problem in (prompt, *(Problem("bf16", batch, context) for context in CONTEXTS for batch in BATCHES)):
        with report.case(f"attention/{problem.batch}x{problem.context}"):
            measure(bench, report, roofline, problem, calls)
        torch.cuda.empty_cache()
    if bench.sm == "sm_90a":  # last: no GPU has run it yet, and a fault would take the others along
        both = {"bf16": calls["bf16"], WGMMA: attention_call(WGMMA)}
        bench.compile(both[WGMMA].instances(prompt.sizes))
        measure(bench, report, roofline, prompt, both, only=WGMMA)
