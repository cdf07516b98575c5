"""`engine diff`: compares two engines. Their content decides; measurements of their builds are compared apart.

Sections are compared by the hashes that the files declare, so that no weight is read; `engine verify` checks those.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.manifest import PLANS, WEIGHTS, SectionForm
from enginewright.plan import Plan
from enginewright.runtime.commands.goldens import GOLDENS, Golden, Goldens
from enginewright.runtime.commands.quality import QUALITY, QualityReport

ABOUT = ("name", "model_type", "targets", "limits", "builder_version", "format_version", "roles", "speculate", "engine")
PARTS = ("about", "recipe", "sources", "sizes", "kernels")  # parts of the report with both values of each difference
FORM = ("dtype", "shape", "layout", "nbytes")  # properties of a section, in the order of the report
LINES_SHOWN = 16  # lines of a part, without --all
_HASH = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Pairs = dict[str, list[Any]]  # name of a difference → values in a and b, None if missing


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Compares two engine files.

    Args:
        a: an engine file.
        b: an engine file.

    Returns:
        The differences, ready for JSON. `same` is True if the content is equal. `about`, `recipe`, `sources`, `sizes`,
        `kernels` (numbers of calls) and `sections` have the differences by name, with both values. `evidence` has the
        differences of measurements, by section.

    Raises:
        CorruptEngineError: a file is damaged.
        UsageError: a file cannot be read, for any other reason. (The exit code 1 means that engines differ.)
    """
    with _open(a) as file_a, _open(b) as file_b:
        files = file_a, file_b
        content = [file.manifest.content_hash for file in files]
        return {
            "a": str(a),
            "b": str(b),
            "same": content[0] == content[1],
            "content_hash": content,
            "about": _differences(*map(_about, files)),
            "recipe": _differences(*(file.manifest.recipe for file in files)),
            "sources": _differences(*(file.manifest.sources for file in files)),
            "sizes": _differences(*map(_sizes, files)),
            "kernels": _differences(*map(_kernels, files)),
            "sections": _sections(*(_forms(file, evidence=False) for file in files)),
            "evidence": _evidence(*files),
        }


def _open(path: Path) -> EngineFile:
    try:
        return EngineFile.open(path, adapters=True)
    except CorruptEngineError:
        raise
    except EngineError as error:
        raise UsageError(error.what, error.why, error.fix) from error


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], *, prefix: str = "") -> Pairs:
    """Entries with different values; those of nested objects are named `key.inner`."""
    found: Pairs = {}
    for key in [*a, *(key for key in b if key not in a)]:
        one, other = a.get(key), b.get(key)
        within = [each for each in (one, other) if each is not None]
        if within and all(isinstance(each, Mapping) for each in within):
            found |= _differences(one or {}, other or {}, prefix=f"{prefix}{key}.")
        elif one != other:
            found[f"{prefix}{key}"] = [one, other]
    return found


def _about(file: EngineFile) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(file.manifest, name)) for name in ABOUT}


def _forms(file: EngineFile, *, evidence: bool) -> dict[str, SectionForm]:
    return {name: form for name, form in file.sections.items() if form.evidence == evidence}


def _plans(file: EngineFile) -> Iterator[tuple[str, Plan]]:
    for name in _forms(file, evidence=False):
        if name.startswith(PLANS):
            yield name.removeprefix(PLANS), Plan.from_json(file.read_section(name))


def _sizes(file: EngineFile) -> dict[str, Any]:
    weights = [form.nbytes for name, form in file.sections.items() if name.startswith(WEIGHTS)]
    kv = {target: plan.kv_bytes_per_token() for target, plan in _plans(file)}
    return {"file_bytes": file.file_bytes, "weight_bytes": sum(weights), "kv_bytes_per_token": kv}


def _kernels(file: EngineFile) -> dict[str, Any]:
    return {target: dict(Counter(call.kernel for call in plan.calls)) for target, plan in _plans(file)}


def _sections(a: Mapping[str, SectionForm], b: Mapping[str, SectionForm]) -> dict[str, Any]:
    """Differences of sections' forms; the form of a section that only one engine has."""
    found: dict[str, Any] = {}
    for name in sorted({*a, *b}):
        both = {"a": a.get(name), "b": b.get(name)}
        forms = {side: msgspec.to_builtins(form) for side, form in both.items() if form is not None}
        if len(forms) == 1:
            ((side, form),) = forms.items()
            found[name] = {"only_in": side, **form}
        elif changes := _differences(forms["a"], forms["b"]):
            found[name] = changes
    return found


def _evidence(file_a: EngineFile, file_b: EngineFile) -> dict[str, Any]:
    a, b = (_forms(file, evidence=True) for file in (file_a, file_b))
    found: dict[str, Any] = {}
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            found[name] = {"only_in": "a" if name in a else "b"}
        elif a[name].sha256 != b[name].sha256:
            found[name] = _measured(name, file_a.read_section(name), file_b.read_section(name))
    return found


def _measured(name: str, a: bytes, b: bytes) -> dict[str, Any]:
    """Differences of a section of evidence: known ones by their numbers, other JSON objects entry by entry."""
    if name == GOLDENS:
        return _golden_differences(Goldens.from_json(a).entries, Goldens.from_json(b).entries)
    if name == QUALITY:
        return _differences(QualityReport.from_json(a).figures(), QualityReport.from_json(b).figures())
    try:
        return _differences(*(msgspec.json.decode(data, type=dict[str, Any]) for data in (a, b)))
    except msgspec.MsgspecError:
        return {"nbytes": [len(a), len(b)]}


def _golden_differences(a: Sequence[Golden], b: Sequence[Golden]) -> dict[str, Any]:
    """Differences of goldens; other_first_tokens counts the prompts whose likeliest next token differs."""
    tops = {golden.prompt: dict(golden.top) for golden in b}
    pairs = [(dict(golden.top), tops[golden.prompt]) for golden in a if golden.prompt in tops]
    gaps = [abs(one[token] - other[token]) for one, other in pairs for token in one.keys() & other.keys()]
    return {
        "prompts_in_both": len(pairs),
        "other_first_tokens": sum(_likeliest(one) != _likeliest(other) for one, other in pairs),
        "largest_logprob_difference": round(max(gaps), 2) if gaps else None,
    }


def _likeliest(logprobs: Mapping[int, float]) -> int:
    return max(logprobs, key=logprobs.__getitem__)


def describe(report: Mapping[str, Any], *, every_line: bool = False) -> str:
    """Formats a comparison for people.

    Args:
        report: the result of `compare`.
        every_line: whether to list all differences.
    """
    measured = [(f"{name}: {key}", value) for name, entry in report["evidence"].items() for key, value in entry.items()]
    parts = {
        "content": [f"{'the same' if report['same'] else 'different'}: {_listed(report['content_hash'])}"],
        **{part: [_line(*entry) for entry in report[part].items()] for part in PARTS},
        "sections": _section_lines(report["sections"]),
        "evidence": [_line(*entry) for entry in measured],
    }
    lines = [f"a         {report['a']}", f"b         {report['b']}"]
    for part, entries in parts.items():
        shown = entries if every_line or len(entries) <= LINES_SHOWN else entries[: LINES_SHOWN - 1]
        left = [f"and {len(entries) - len(shown)} more (--all lists them)"] if len(shown) < len(entries) else []
        lines += [f"{'' if index else part:<9} {entry}" for index, entry in enumerate([*shown, *left])]
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    return f"{name} {' → '.join(map(_short, value)) if isinstance(value, list) else _short(value)}"


def _listed(hashes: Sequence[str]) -> str:
    return " → ".join(f"sha256:{one}" for one in dict.fromkeys(hashes))


def _short(value: Any) -> str:
    """A value in a few characters: of a hash, enough to recognize it."""
    if value is None:
        return "nothing"
    return f"{value[:12]}…" if isinstance(value, str) and _HASH.fullmatch(value) else str(value)


def _section_lines(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for all sections with the same name except for a number, and the same difference."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, change in sections.items():
        alike.setdefault((_NUMBER.sub("*", name), _change(change)), []).append(name)
    return [
        f"{names[0]}: {change}" if len(names) == 1 else f"{pattern} ({len(names)}): {change}"
        for (pattern, change), names in alike.items()
    ]


def _change(change: Mapping[str, Any]) -> str:
    if "only_in" in change:
        form = f"{change['dtype']} {change['shape']} {change['layout']}, " if "dtype" in change else ""
        return f"only in {change['only_in']}, {form}{change['nbytes']:,} bytes"
    return ", ".join(_line(key, change[key]) for key in FORM if key in change) or "other bytes"
