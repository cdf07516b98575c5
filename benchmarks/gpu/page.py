"""Page benchmarks/results/gpu.md: goals, measurements and failures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.parts import DONE, NOT_RUN, PARTS
from benchmarks.gpu.report import Figure

Results = Mapping[str, Any]  # machine: what it was run on. parts: name → a parts.Result as a dict
Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Measured:
    """value: in the aim's unit. text: as it is shown."""

    value: float
    text: str


@dataclass(frozen=True)
class Aim:
    """measured: of all figures by name; None where they are not there. reached: whether a value is good enough."""

    what: str
    aim: str
    measured: Callable[[Figures], Measured | None]
    reached: Callable[[float], bool]
    not_run: str = NOT_RUN


def _values(figures: Figures, names: Sequence[str], key: str) -> list[float]:
    """Values of the figures without an error."""
    found = [figures[name] for name in names if name in figures]
    return [one[key] for one in found if key in one and "error" not in one]


def _typical(names: Sequence[str], key: str, unit: str = "×") -> Callable[[Figures], Measured | None]:
    def measured(figures: Figures) -> Measured | None:
        values = _values(figures, names, key)
        if not values:
            return None
        low, typical, high = min(values), median(values), max(values)
        span = f" ({_shown(low, unit)} to {_shown(high, unit)} in {len(values)} cases)" if len(values) > 1 else ""
        return Measured(typical, _shown(typical, unit) + span)

    return measured


def _shown(value: float, unit: str) -> str:
    match unit:
        case "%":
            return f"{100 * value:.0f} %"
        case "µs":
            return f"{1e6 * value:.0f} µs"
    return f"{value:.2f} {unit}"


BODY = ("o", "qkv", "gate_up", "down")
AIMS = (
    Aim(
        "decode attention, batch ≥ 32, 4K context, of the memory roofline",
        "≥ 85 %",
        _typical([f"attention/decode/{batch}x4096/bf16" for batch in (32, 128)], "of the memory roofline", "%"),
        lambda share: share >= 0.85,
    ),
    Aim(
        "decode attention, batch 1, below 8K, over FlashInfer",
        "≥ 1.5 ×",
        _typical([f"attention/decode/1x{context}/bf16" for context in (1024, 4096)], "over flashinfer"),
        lambda ratio: ratio >= 1.5,
    ),
    Aim(
        "FP8 GEMM, 4096 tokens, over cuBLAS FP8",
        "≥ 0.95 ×",
        _typical([f"gemm/{shape}/4096/fp8a8" for shape in BODY], "over cublas fp8"),
        lambda ratio: ratio >= 0.95,
    ),
    Aim(
        "INT4 weights, up to 16 tokens, over cuBLAS BF16",
        "≥ 3.5 ×",
        _typical([f"gemm/{shape}/{tokens}/int4" for shape in BODY for tokens in (1, 8, 16)], "over cublas"),
        lambda ratio: ratio >= 3.5,
    ),
    Aim(
        "decode, batch 1, 1B BF16, of the memory roofline",
        "≥ 80 %",
        _typical(["models/bf16/decode-1"], "of the memory roofline", "%"),
        lambda share: share >= 0.8,
    ),
    Aim(
        "between kernels in a step, batch 1, 1B BF16",
        "< 50 µs",
        _typical(["models/bf16/decode-1"], "between kernels", "µs"),
        lambda seconds: seconds < 50e-6,
    ),
    Aim(
        "prefill attention, 8K, causal, over the best of SDPA's backends",
        "≥ 0.9 ×",
        _typical(["attention/prefill/1x8192/bf16"], "over the best peer"),
        lambda ratio: ratio >= 0.9,
    ),
    Aim(
        "8B FP8, offline throughput, of the run's own roofline",
        "≥ 60 %",
        _typical(["large/fp8/256x128x2048"], "of the roofline", "%"),
        lambda share: share >= 0.6,
    ),
    Aim("start to ready, 8B FP8", "< 2 s", _typical(["large/fp8/ready"], "seconds", "s"), lambda seconds: seconds < 2),
)


def page(results: Results) -> str:
    """In Markdown. Without results, everything is "not run"."""
    parts, machine = results.get("parts", {}), results.get("machine", {})
    figures = {figure["name"]: figure for part in parts.values() for figure in part["figures"]}
    lines = ["# GPU figures", ""]
    if machine:
        lines += [", ".join(f"{key}: {value}" for key, value in machine.items()), ""]
    else:
        lines += ["Not run: no GPU has been at hand. `python -m benchmarks.gpu` makes this page where one is.", ""]
    lines += ["| what | aim | measured | reached |", "|---|---|---|---|"]
    lines += [_aim(aim, figures) for aim in AIMS]
    lines += [
        "",
        "Ratios are medians of rounds within one run; the roofline is read in the same process. The memory roofline is",
    ]
    lines += ["the faster of a device-to-device copy and a streaming read.", ""]
    lines += ["| part | what | came of it | date | s |", "|---|---|---|---|---|"]
    for part in PARTS:
        found = parts.get(part.name)
        came = _cell(": ".join(filter(None, (found["status"], found["why"])))) if found else NOT_RUN
        lines.append(
            f"| `{part.name}` | {part.what} | {came} | {found['date'] if found else ''} | "
            f"{found['seconds'] if found else ''} |"
        )
    for key, title in (("error", "What went wrong"), ("not run", "What cannot be had there")):
        some = [figure for figure in figures.values() if key in figure]
        if some:
            lines += ["", f"## {title}", "", "| what | why |", "|---|---|"]
            lines += [f"| {figure['name']} | {_cell(str(figure[key]))} |" for figure in some]
    for part in PARTS:
        found = parts.get(part.name)
        sound = [one for one in found["figures"] if "error" not in one and "not run" not in one] if found else []
        if sound:
            lines += ["", f"## {part.what}", "", *_table(sound)]
    return "\n".join(lines) + "\n"


def _aim(aim: Aim, figures: Figures) -> str:
    found = aim.measured(figures)
    if found is None:
        return f"| {aim.what} | {aim.aim} | {aim.not_run} | |"
    return f"| {aim.what} | {aim.aim} | {found.text} | {'yes' if aim.reached(found.value) else 'no'} |"


def _table(figures: Sequence[Figure]) -> list[str]:
    """A column for each value that one of them has."""
    columns = list(dict.fromkeys(key for figure in figures for key in figure if key not in ("name", "failures")))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for figure in figures:
        lines.append(f"| {figure['name']} | {' | '.join(_value(figure.get(column, '')) for column in columns)} |")
    return lines


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def all_done(results: Results) -> bool:
    """Returns True if every part that was run has ended without a failure."""
    parts = results.get("parts", {}).values()
    return all(part["status"] == DONE and not any("error" in one for one in part["figures"]) for part in parts)
