"""`engine rebuild`: builds an engine again from the inputs that its manifest names, and compares both."""

import filecmp
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants

from enginewright import __version__
from enginewright.builder.adapters import with_recorded
from enginewright.builder.adapters.merge import ADAPTER_PREFIX
from enginewright.builder.assembly import BuildConfig
from enginewright.builder.build import build_engine
from enginewright.builder.calibration import RECOVERY, samples_without_data
from enginewright.builder.calibration.data import is_remote
from enginewright.builder.calibration.samples import ITSELF
from enginewright.builder.checkpoint import Checkpoint, open_checkpoint
from enginewright.builder.checkpoint.files import sha256
from enginewright.builder.checkpoint.head import HeadFolder, find_head
from enginewright.builder.checkpoint.quantized import format_name
from enginewright.builder.draft import Automatic, Draft, FirstLayers
from enginewright.builder.gate import GateConfig
from enginewright.builder.gate.config import MEASURES
from enginewright.builder.models import check_config
from enginewright.builder.progress import Progress
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.manifest import SKIP, Manifest
from enginewright.output_file import require_writable, same_file
from enginewright.passes.quant import METHODS, Bf16, QuantConfig, quant_config
from enginewright.runtime.commands import diff
from enginewright.runtime.commands.quality import QUALITY, QualityReport

CONFIG = "config.json"
SourceType = TypeVar("SourceType", bound=Checkpoint | HeadFolder)


def rebuild(
    engine: Path,
    progress: Progress,
    *,
    model: str | None = None,
    draft: str | None = None,
    adapters: Sequence[str] = (),
    calib_data: str | None = None,
    evidence: bool = True,
    output: Path | None = None,
) -> dict[str, Any]:
    """Builds an engine again, and compares.

    Args:
        engine: the engine file.
        progress: receiver of progress.
        model: the checkpoint that it was built from; None looks for it next to the engine, in the working directory,
            and in the cache of the hub.
        draft: the draft's checkpoint; None looks for it in the same places.
        adapters: folders of the adapters that were merged into the model, in their order.
        calib_data: the calibration data, if it was not the model's own texts.
        evidence: False leaves out the quality gate, the longest part; the content does not depend on it.
        output: file of the new engine; None keeps none.

    Returns:
        The differences, as in `engine diff`. `same` says if the content is the same, and `same_bytes` if the whole file
        is; None without `evidence`.

    Raises:
        UsageError: an input is missing, or has changed; the message names it.
        CorruptEngineError: the engine is damaged.
        EngineError: the build fails.
    """
    manifest, quality = _read(engine)
    if output is not None:
        require_writable(output, regular=True)
        if same_file(output, engine):
            raise UsageError(f"{output} is the engine itself", "nothing would be left to compare with", "Name another.")
    progress.phase("check the inputs")
    with _as_usage_errors():
        checkpoint = source_model(engine, manifest, model, adapters)
        opened_draft = _draft(engine, manifest, draft)
        config = _config(engine, manifest, quality if evidence else QualityReport("off"), checkpoint)
        config = _with_calibration(manifest, config, checkpoint, calib_data)
    with tempfile.TemporaryDirectory(prefix="enginewright-rebuild-") as folder:
        made = output or Path(folder, "made-again.engine")
        build_engine(checkpoint, config, made, progress, opened_draft)
        report = diff.compare(engine, made) | {"b": str(output) if output else "made again"}
        if evidence:
            return report | {"same_bytes": filecmp.cmp(engine, made, shallow=False)}
        left = {name: entry for name, entry in report["evidence"].items() if name != QUALITY}
        sizes = {name: sizes for name, sizes in report["sizes"].items() if name != "file_bytes"}
        return report | {"evidence": left, "sizes": sizes, "same_bytes": None}


def describe(report: Mapping[str, Any], *, every_line: bool = False) -> str:
    """Formats a comparison.

    Args:
        report: result of `rebuild`.
        every_line: True lists every difference.
    """
    whole = {
        True: "the same, byte for byte",
        False: "differs in its evidence only" if report["same"] else "different",
        None: "not compared (--no-evidence)",
    }
    return f"{diff.describe(report, every_line=every_line)}\nfile      {whole[report['same_bytes']]}"


def _read(engine: Path) -> tuple[Manifest, QualityReport]:
    """Reads manifest and quality report. Raises UsageError if another release built it: that is an input, too."""
    with _as_usage_errors(), EngineFile.open(engine) as file:
        if damaged := file.verify_sections():
            raise CorruptEngineError(f"{engine} is damaged", f"section {', '.join(damaged)}", "Get it again.")
        manifest, quality = file.manifest, QualityReport.from_json(file.read_section(QUALITY))
    if manifest.builder_version != __version__:
        raise UsageError(
            f"{engine} was built by enginewright {manifest.builder_version}",
            f"this is {__version__}, which writes its own version into engines",
            f"Run: pip install 'enginewright[build]=={manifest.builder_version}'",
        )
    return manifest, quality


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """Turns errors of inputs into UsageErrors, since the exit code 1 means that the engines differ."""
    try:
        yield
    except EngineError as error:
        if error.exit_code != EngineError.exit_code:
            raise
        raise UsageError(error.what, error.why, error.fix) from error


def _role_with_files(manifest: Manifest) -> str | None:
    """Returns the role of a draft that has files of its own."""
    return next((role for role in manifest.roles if "name" in manifest.recipe[role]), None)


def source_model(engine: Path, manifest: Manifest, ref: str | None, adapters: Sequence[str]) -> Checkpoint:
    """Opens the checkpoint of an engine's model, and merges its adapters.

    Args:
        engine: the engine file.
        manifest: its manifest.
        ref: the checkpoint; None looks for it where it may be.
        adapters: folders of the adapters that were merged into the model, in their order.

    Raises:
        UsageError: a file is missing, or is not what the engine was built from.
    """
    role = _role_with_files(manifest)
    sources = {
        name: digest for name, digest in manifest.sources.items() if role is None or not name.startswith(f"{role}/")
    }
    own = {name: digest for name, digest in sources.items() if not name.startswith(ADAPTER_PREFIX)}
    name = manifest.recipe.get("merge", {}).get("model", manifest.name)
    ref = _locate(engine, ref, name, own, "--model")
    checkpoint = _checked(open_checkpoint(ref, check_config=check_config, name=name), ref, own, "--model")
    merged = with_recorded(checkpoint, manifest.recipe, adapters)
    return _checked(merged, ", ".join((ref, *adapters)), sources, "--merge")


def _draft(engine: Path, manifest: Manifest, ref: str | None) -> Draft | None:
    """Opens the engine's draft: another checkpoint or a head, which `ref` may name, or one without files."""
    if (role := _role_with_files(manifest)) is not None:
        sources = {
            name.removeprefix(f"{role}/"): digest
            for name, digest in manifest.sources.items()
            if name.startswith(f"{role}/")
        }
        name = str(manifest.recipe[role]["name"])
        ref = _locate(engine, ref, name, sources, "--draft")
        opened = find_head(Path(ref), name) or open_checkpoint(ref, check_config=check_config, name=name)
        return _checked(opened, ref, sources, "--draft")
    if ref is not None:
        raise UsageError("--draft means nothing here", f"{engine} has no other model than its own")
    if SKIP in manifest.roles:
        return FirstLayers(manifest.recipe[SKIP]["layers"])
    return Automatic() if manifest.speculate is not None else None


def _locate(engine: Path, ref: str | None, name: str, sources: Mapping[str, str], option: str) -> str:
    """Finds the checkpoint with these files."""
    if not sources:
        raise UsageError(f"{engine} cannot be made again", "its manifest names no source files")
    ref = ref or _find(engine, name, sources, option)
    if Path(ref).is_dir() and (missing := [one for one in sources if not Path(ref, one).is_file()]):
        raise _other_inputs(ref, [f"{one} is missing" for one in missing], option)
    return ref


def _checked(source: SourceType, ref: str, sources: Mapping[str, str], option: str) -> SourceType:
    """Checks that a checkpoint has exactly the files that the engine was built from."""
    if differing := [*_differing(sources, source.source_hashes())]:
        raise _other_inputs(ref, differing, option)
    return source


def _differing(sources: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*sources, *found}):
        if name not in found:
            yield f"{name} is missing"
        elif name not in sources:
            yield f"{name} is new"
        elif sources[name] != found[name]:
            yield f"{name} has changed (sha256 {found[name][:12]}…, it was {sources[name][:12]}…)"


def _other_inputs(ref: str, differing: list[str], option: str) -> UsageError:
    what = f"{ref} is not what the engine was built from"
    return UsageError(what, ", ".join(differing), f"Name the checkpoint as it was then with {option}.")


def _find(engine: Path, name: str, sources: Mapping[str, str], option: str) -> str:
    """Finds a checkpoint with these files: next to the engine, in the working directory, or in the hub's cache."""
    near = [engine.absolute().parent, Path.cwd()]
    cache = Path(constants.HF_HUB_CACHE)
    snapshots = sorted(cache.glob(f"models--*--{name}/snapshots/*"))
    folders = [*(folder / name for folder in near), *near, *snapshots]
    found = [folder for folder in folders if all((folder / one).is_file() for one in sources)]
    if not found:
        searched = ", ".join(str(path) for path in dict.fromkeys((*near, cache)))
        what = f"the checkpoint {name} was not found"
        raise UsageError(what, f"its files are in none of {searched}", f"Name it with {option}.")
    matching = [folder for folder in found if CONFIG in sources and sha256(folder / CONFIG) == sources[CONFIG]]
    folder = (matching or found)[0]
    ggufs = [one for one in sources if one.lower().endswith(".gguf")]
    return str(folder / ggufs[0] if ggufs else folder)


def _config(engine: Path, manifest: Manifest, quality: QualityReport, checkpoint: Checkpoint) -> BuildConfig:
    """Restores the options of the build, as far as they change the result."""
    recipe = manifest.recipe
    gate = None
    if quality.gate != "off":
        known = {measure.name for measure in MEASURES}
        limits = {name: limit for name, limit in quality.limits.items() if name in known}
        gate = GateConfig(full=quality.gate == "full", limits=limits)
    names = [recipe[role]["quant"] for role in manifest.roles if "quant" in recipe[role]]
    return BuildConfig(
        quant=_quant(engine, recipe, checkpoint),
        draft_quant=quant_config(names[0]) if names else None,
        targets=manifest.targets,
        kv_cache_dtype=recipe["kv_cache_dtype"],
        max_seq_len=recipe["max_seq_len"],
        max_batch_size=recipe["max_batch_size"],
        batch_invariant=recipe["batch_invariant"],
        rotate=recipe.get("rotate", False),
        recover=recipe.get("recover"),
        tensor_parallel_size=recipe.get("tensor_parallel_size", BuildConfig.tensor_parallel_size),
        gate=gate,
    )


def _quant(engine: Path, recipe: Mapping[str, Any], checkpoint: Checkpoint) -> QuantConfig | None:
    """Restores the method; None, as without `--quant`, if weights are as the checkpoint has them."""
    name = recipe["quant"]
    if name in (Bf16.info.name, format_name(checkpoint)):
        return None
    method = next((method for method in METHODS if method.info.name == name), None)
    if method is None:
        raise UsageError(f"{engine} cannot be made again", f"its weights are {name}, and there is no such --quant")
    return quant_config(name, **{field.name: recipe[field.name] for field in fields(method) if field.name in recipe})


def _size(samples: int, config: BuildConfig) -> int:
    """The --calib-size of a number of samples."""
    return max(samples // RECOVERY, 1) if config.recover else samples


def _with_calibration(
    manifest: Manifest, config: BuildConfig, checkpoint: Checkpoint, calib_data: str | None
) -> BuildConfig:
    recorded = manifest.recipe.get("calibration")
    if recorded is None or recorded["source"] == ITSELF:
        if calib_data is not None:
            raise UsageError("--calib-data means nothing here", f"{manifest.name} was calibrated on no data")
        return replace(config, calib_size=_size(recorded["samples"], config)) if recorded else config
    if calib_data is None:
        why = f"the engine does not contain it: {recorded['samples']} texts, sha256 {recorded['sha256']}"
        raise UsageError("the calibration data was not found", why, "Name it with --calib-data.")
    for size in (_size(recorded["samples"], config), None):  # the file may have had fewer texts than requested
        tried = replace(config, calib_data=calib_data, calib_size=size)
        if is_remote(calib_data) or samples_without_data(checkpoint, tried) == recorded | {"source": calib_data}:
            return tried
    what = f"{calib_data} is not what the engine was calibrated on"
    raise UsageError(what, "its texts have changed", "Name it as it was then with --calib-data.")
