"""Results as a Markdown table."""

from collections.abc import Iterator, Sequence
from typing import Any

from protocol.figures import Shown, Spread, ratios, shown, spread
from protocol.idle_guard import DISTURBED_CORES


def table(found: dict[str, Any]) -> str:
    """The whole report. Everything in it is computed from the JSON file."""
    lines = [
        "# Measured on a CPU",
        "",
        "Written by `python benchmarks/cpu.py`; [benchmarks/README.md](../README.md) says how to read it. Figures are",
        "medians of rounds with their range; a ratio is taken within each round. Greedy, forced length, synthetic",
        "token ids, no prefix caching.",
        "",
    ]
    lines += _machines(found)
    lines += _summary(found)
    for group, points in found.get("speed", {}).items():
        lines += _speed(group, points, found)
    lines += _quality(found)
    lines += _starts(found)
    lines += _builds(found)
    lines += _left_out(found)
    return "\n".join(lines).rstrip() + "\n"


def _machines(found: dict[str, Any]) -> Iterator[str]:
    used = {entry["run"] for entry in _entries(found)}
    for number, run in enumerate(found["runs"]):
        if number not in used:
            continue
        machine, settings = run["machine"], run["settings"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        cores = f"{settings['threads']} threads on processors {machine['processors']}"
        yield f"**Run {number + 1}.** {machine['cpu']}, {cores}, {machine['memory_bytes'] / 1e9:.0f} GB;"
        yield f"{machine['system']}; {versions}. {settings['rounds']} rounds."
        for isa, dots in machine["dots"].items():
            rates = [f"{name} {rate['ops_per_s'] / 1e12:.2f} ({rate['instruction']})" for name, rate in dots.items()]
            yield f"- {isa}, on registers, Tera-operations/s: {', '.join(rates)}"
        if settings["noisy"] or settings["quick"]:
            yield "- **Not to be quoted**: taken with --noisy or --quick."
        yield ""


def _entries(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in ("build", "start", "quality"):
        yield from found.get(part, {}).values()
    for points in found.get("speed", {}).values():
        yield from points.values()


def _summary(found: dict[str, Any]) -> Iterator[str]:
    values = [entry["value"] for points in found.get("speed", {}).values() for entry in points.values()]
    found_ratios = [ratio.value for value in values for ratio in ratios(value)]
    if not found_ratios:
        return
    wins, losses = sum(value.min > 1 for value in found_ratios), sum(value.max < 1 for value in found_ratios)
    yield "## Wins and losses"
    yield ""
    yield "Each build of this engine next to the fastest peer of its class, at each point:"
    neither = len(found_ratios) - wins - losses
    yield f"faster in every round {wins} times, slower in every round {losses} times, neither {neither} times."
    yield ""


def _speed(group: str, points: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    measured = {name: shown(entry["value"]) for name, entry in points.items()}
    names = list(dict.fromkeys(name for there in measured.values() for name in there))
    yield f"## {group}"
    yield ""
    rows = {row["name"]: row for entry in points.values() for row in entry["value"].get("contestants", [])}
    header = ["", *(f"KL (same first choice), {model}" for model in found.get("quality", {})), "precision", "version"]
    about = {name: [rows[name]["precision"], rows[name].get("about", {}).get("version", "")] for name in names}
    yield from _rows(header, [[name, *_costs(name, found), *about[name]] for name in names])
    yield "Tokens/s (range), share of the roofline:"
    yield ""
    cells = []
    for name, there in measured.items():
        cells.append([name, *(_cell(there[other]) if other in there else "–" for other in names)])
    yield from _rows(["point", *names], cells)
    named_ratios = [(name, ratio) for name, entry in points.items() for ratio in ratios(entry["value"])]
    if named_ratios:
        ours = list(dict.fromkeys(ratio.ours for _, ratio in named_ratios))
        yield "Over the fastest peer, within rounds:"
        yield ""
        cells = []
        for name in dict.fromkeys(name for name, _ in named_ratios):
            by_name = {ratio.ours: ratio for point, ratio in named_ratios if point == name}
            peer = next(iter(by_name.values())).peer
            cells.append([name, *(_times(by_name[one].value) if one in by_name else "–" for one in ours), peer])
        yield from _rows(["point", *ours, "fastest peer"], cells)
    for name, there in measured.items():
        tried = [f"{one.name} with {one.setting}" for one in there.values() if one.setting]
        if tried:
            yield f"- {name}: {'; '.join(tried)}"
    for name, entry in points.items():
        yield from (f"- {name}: {note}" for note in _notes(entry["value"]))
    yield ""


def _notes(value: dict[str, Any]) -> Iterator[str]:
    """Yields the reasons why figures of a point are doubtful."""
    if value.get("rounds_measured_again"):
        yield f"{value['rounds_measured_again']} rounds were disturbed by other work, and measured again"
    yield from (note for note in _disturbed(value.get("cores_taken_by_others", [])) if note)
    for row in value.get("contestants", []):
        if row.get("idle_share_of_a_core", 0.0) > 0.02:
            share = f"{row['idle_share_of_a_core']:.1%} of a core"
            yield f"**{row['name']} was not idle ({share}) while others ran: distrust these figures**"


def _disturbed(cores: Sequence[float]) -> Iterator[str]:
    max_cores = max(cores, default=0.0)
    if max_cores > DISTURBED_CORES:
        yield f"**others took up to {max_cores:.2f} cores: distrust these figures**"
        yield ""


def _costs(name: str, found: dict[str, Any]) -> Iterator[str]:
    base = name.removesuffix(", AVX2")  # the same weights
    for entry in found.get("quality", {}).values():
        row = next((row for row in entry["value"] if row["name"] == base), None)
        yield "–" if row is None or "kl_nats" not in row else f"{row['kl_nats']:.5f} ({row['top1_agreement']:.1%})"


def _quality(found: dict[str, Any]) -> Iterator[str]:
    for model, entry in found.get("quality", {}).items():
        yield f"## Quality on {model}"
        yield ""
        rows = []
        for row in entry["value"]:
            if "not_measured" not in row:
                kl = f"{row['kl_nats']:.5f} ± {row['kl_standard_error']:.5f}"
                rows.append([row["name"], row["class"], kl, f"{row['top1_agreement']:.2%}", row["precision"]])
        header = ["", "class", "KL to the BF16 checkpoint in fp32, nats", "same first choice", "precision"]
        yield from _rows(header, rows)
        positions = {row["positions"] for row in entry["value"] if "positions" in row}
        yield f"{', '.join(map(str, positions))} positions of held-out text; ± is a standard error of the mean."
        yield ""


def _starts(found: dict[str, Any]) -> Iterator[str]:
    for model, entry in found.get("start", {}).items():
        yield f"## Process start to first token, {model}, prompt of 32 tokens"
        yield ""
        rows = [row for row in entry["value"]["contestants"] if "seconds" in row]
        rows.sort(key=lambda row: spread(row["seconds"]).median)
        yield from _rows(["", "class", "s"], [[row["name"], row["class"], _seconds(row["seconds"])] for row in rows])
        yield from _disturbed(entry["value"]["cores_taken_by_others"])


def _builds(found: dict[str, Any]) -> Iterator[str]:
    for model, entry in found.get("build", {}).items():
        yield f"## `engine build`, {model}"
        yield ""
        rows = []
        for row in entry["value"]:
            if "not_measured" not in row:
                share = row["rss_anon_bytes"] / row["checkpoint_bytes"]
                memory = f"{row['rss_anon_bytes'] / 1e6:.0f} MB, {share:.2f} × the checkpoint"
                rows.append([row["name"], f"{row['seconds']:.1f}", memory, f"{row['weight_bytes'] / 1e6:.0f} MB"])
        yield from _rows(["", "s", "RssAnon at most", "weights"], rows)
        yield from _disturbed([row.get("cores_taken_by_others", 0.0) for row in entry["value"]])


def _left_out(found: dict[str, Any]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for group, points in found.get("speed", {}).items():
        for name, entry in points.items():
            if "not_measured" in entry["value"]:
                reasons.setdefault(f"all: {entry['value']['not_measured']}", []).append(f"{group}, {name}")
            for row in entry["value"].get("contestants", []):
                if "not_measured" in row:
                    label = f"{row['name']}, {row['setting']}" if row["setting"] else row["name"]
                    reasons.setdefault(f"{label}: {row['not_measured']}", []).append(f"{group}, {name}")
    for part in ("build", "start", "quality"):
        for model, entry in found.get(part, {}).items():
            rows = entry["value"]["contestants"] if part == "start" else entry["value"]
            for row in rows:
                if "not_measured" in row:
                    reasons.setdefault(f"{row['name']}: {row['not_measured']}", []).append(f"{part}, {model}")
    if reasons:
        yield "## Not measured"
        yield ""
        yield from (f"- {reason} ({len(where)} places, such as {where[0]})" for reason, where in reasons.items())
        yield ""


def _cell(one: Shown) -> str:
    rate = one.rate
    return f"{_number(rate.median)} ({_number(rate.min)}–{_number(rate.max)}), {one.roofline_share.median:.0%}"


def _times(value: Spread) -> str:
    text = f"{value.median:.2f} × ({value.min:.2f}–{value.max:.2f})"
    return text if value.max >= 1 else f"{text} slower"


def _seconds(values: Sequence[float]) -> str:
    one = spread(values)
    return f"{one.median:.2f} ({one.min:.2f}–{one.max:.2f})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
