"""Checkpoint → graph → plan: the complete content of an engine, before any of its weights is read."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from enginewright import __version__
from enginewright.builder.adapters.sites import site_sections
from enginewright.builder.ahead import in_order
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.builder.checkpoint.quantized import format_name
from enginewright.builder.embedding_limits import check_embedding
from enginewright.builder.gate import GateConfig
from enginewright.builder.generation_config import check_generation_config
from enginewright.builder.lower import Lowered, Weight, lower, pack_rows
from enginewright.builder.models import build_graph, keeps_latent_vectors
from enginewright.builder.progress import Progress
from enginewright.dtypes import KV_CACHES
from enginewright.embedding import EMBEDDING
from enginewright.engine_file import EngineWriter
from enginewright.errors import EngineError, UsageError
from enginewright.manifest import WEIGHTS, About, Limits, plan_section, rank_plan_section
from enginewright.passes.graph import head_of
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.pipeline import run_for_target, run_pipeline
from enginewright.passes.quant import Bf16, QuantConfig, quant_config
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.recover import Recover
from enginewright.passes.weights import open_rows
from enginewright.plan import Plan
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.target import Target, targets_of
from enginewright.runtime import env
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.tokenizer import SPECIAL_TOKENS
from enginewright.targets import CPU, CUDA

NOT_RECOVERED = ("bf16", "mxfp4")  # methods whose weights have no scales, or only powers of two


@dataclass(frozen=True)
class BuildConfig:
    """Options of a build."""

    # quantization method; None keeps weights as the checkpoint has them, quantized or BF16
    quant: QuantConfig | None = None
    # method of the draft, one that needs no calibration; None is the model's
    draft_quant: QuantConfig | None = None
    targets: tuple[str, ...] = (CPU,)  # targets that the engine has code for
    kv_cache_dtype: str = "bf16"  # dtype of the KV cache, one of KV_CACHES
    max_seq_len: int | None = None  # positions of the longest sequence; None is the model's own limit
    max_batch_size: int = 32  # sequences in a step, recorded as the runtime's default
    recover: int | None = None  # maximum number of steps that train scales and norms; None trains nothing
    rotate: bool = False  # True to rotate activations, so that no channel is far larger than others
    batch_invariant: bool = False  # True if a completion has the same bits in any batch, on GPUs, too
    # GPUs that may compute the model together: the engine has a plan for each; on CPUs, any number can without
    tensor_parallel_size: int = 1
    # source of calibration texts, as in `builder.calibration`; None if the method needs no calibration
    calib_data: str | None = None
    calib_size: int | None = None  # number of calibration texts; None if the method needs no calibration
    dump_graphs: Path | None = None  # folder for one ONNX file a pass
    gate: GateConfig | None = field(default_factory=GateConfig)  # quality gate; None measures nothing
    report: Path | None = None  # .html or .json file for the gate's results
    provenance: Path | None = None  # file for the provenance statement
    builder_id: str | None = None  # identity of the builder, as in `write_provenance`
    notes: tuple[str, ...] = ()  # sentences for users on how these choices were made

    @property
    def method(self) -> QuantConfig:
        """Method of weights that are not quantized yet."""
        return self.quant or Bf16()

    def ranks_of(self, target: Target) -> int:
        """Returns the number of ranks that there are plans for on a target."""
        return self.tensor_parallel_size if target.name == CUDA else 1

    @property
    def for_draft(self) -> "BuildConfig":
        """Options for the draft."""
        return replace(
            self,
            quant=self.draft_quant or self.quant,
            draft_quant=None,
            rotate=False,
            recover=None,
            notes=(),
            tensor_parallel_size=1,
        )


@dataclass(frozen=True)
class Assembly:
    """The content of an engine."""

    checkpoint: Checkpoint  # the checkpoint
    config: BuildConfig  # options of the build
    max_seq_len: int  # positions of the longest sequence
    imported: ir.Model  # graph as the importer wrote it
    dense: ir.Model  # graph before quantization
    plans: Mapping[str, Plan]  # target's name → plan
    weights: Mapping[str, Weight]  # name → source of the bytes
    kernels: Mapping[str, Specialization]  # name → code that GPUs need
    files: Mapping[str, bytes]  # name → section that is neither weights nor code
    results: Mapping[str, PassResult]  # pass → its result
    notes: Sequence[str]  # facts about quantized weights of the checkpoint and its chat template that users should know
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # role → entry of the recipe
    speculate: str | None = None  # default source of draft tokens

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as stored."""
        return sum(weight.form.nbytes for weight in self.weights.values())

    @property
    def section_names(self) -> dict[str, str]:
        """Name of a weight in the graph → its name in the plan."""
        own = {name for plan in self.plans.values() for name in plan.weight_names()}
        return {str(weight.value.name): name for name, weight in self.weights.items() if name in own}

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all KV caches."""
        return next(iter(self.plans.values())).kv_bytes_per_token()

    def writer(self, output: Path, evidence_sections: int) -> EngineWriter:
        """Opens a writer for the engine file.

        Args:
            output: the engine file.
            evidence_sections: number of sections that the build adds as evidence.
        """
        content_bytes = self.weight_bytes + sum(map(len, self.files.values()))
        return EngineWriter(output, len(self.weights) + len(self.files) + evidence_sections, content_bytes)

    def write(self, writer: EngineWriter, progress: Progress) -> None:
        """Adds every section; weights are read, converted and packed now.

        Args:
            writer: writer of the engine file.
            progress: receiver of progress, in bytes.
        """
        for name, data in self.files.items():
            writer.add(name, data)
        for name, weight in self.weights.items():
            writer.add(f"{WEIGHTS}{name}", packed(weight, progress), **asdict(weight.form))

    def about(self, sources: Mapping[str, str], **recipe: Any) -> About:
        """Describes the engine for its manifest.

        Args:
            sources: input file → SHA-256.
            recipe: other choices that change the content.
        """
        config = self.config
        return About(
            builder_version=__version__,
            name=self.checkpoint.name,
            model_type=str(self.checkpoint.config["model_type"]),
            targets=config.targets,
            recipe={
                "quant": format_name(self.checkpoint) or config.method.name,
                **asdict(config.method),
                "kv_cache_dtype": config.kv_cache_dtype,
                "max_seq_len": self.max_seq_len,
                "max_batch_size": config.max_batch_size,
                "batch_invariant": config.batch_invariant,
                **({"rotate": True} if config.rotate else {}),
                **({"recover": config.recover} if config.recover else {}),
                **({"tensor_parallel_size": config.tensor_parallel_size} if config.tensor_parallel_size > 1 else {}),
                **self.roles,
                **recipe,
            },
            sources=dict(sources),
            limits=Limits(max_seq_len=self.max_seq_len, max_batch_size=config.max_batch_size),
            roles=tuple(self.roles),
            speculate=self.speculate,
        )


def assemble(
    checkpoint: Checkpoint, config: BuildConfig, progress: Progress, calibration: Calibration | None = None
) -> Assembly:
    """Imports a model, runs the passes, and lowers the graph.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
        progress: receiver of progress.
        calibration: texts for a method that needs some; without them the passes that need texts are left out.

    Raises:
        UnsupportedModelError: the model, or something in it, is not implemented.
        UsageError: the options do not fit the model.
    """
    progress.phase("import the model")
    model = build_graph(checkpoint, config.max_seq_len)
    embedding = model.metadata_props.get("enginewright.embedding")
    if embedding is not None:
        check_embedding(config.targets, config.method, config.calib_data, config.gate, config.report)
    max_seq_len = _max_seq_len(config, int(model.metadata_props["enginewright.max_seq_len"]))
    imported, dense = model.clone(), list[ir.Model]()
    recover = None
    if config.recover:
        recover = Recover(config.method, calibration or Calibration(), config.recover, progress.advance)
    if recover and calibration:
        progress.phase("choose codes, and recover from the source", config.recover or 0)
    else:
        progress.phase("calibrate and run passes" if calibration else "run the passes")
    kv_dtype = KV_CACHES[config.kv_cache_dtype].name
    first, *others = targets_of(config.targets)
    ragged, results = run_pipeline(
        model,
        config.method,
        config.dump_graphs,
        kv_dtype,
        calibration,
        dense.append,
        first,
        rotate=config.rotate,
        recover=recover,
    )
    graphs = [ragged]
    for target in others:
        dump = config.dump_graphs / target.name if config.dump_graphs else None
        graphs.append(run_for_target(dense[0].clone(), config.method, target, dump, kv_dtype))
    progress.phase("lower to a plan")
    lowered = [
        lower(graph, target, max_seq_len, config.batch_invariant, config.ranks_of(target))
        for graph, target in zip(graphs, (first, *others), strict=True)
    ]
    plans = {entry.plan.target: entry.plan for entry in lowered}
    progress.phase("read the tokenizer")
    check_generation_config(checkpoint.generation_config, plans[first.name].vocab_size)
    files = plan_files(lowered) | _files(checkpoint)
    if embedding is not None:
        files[EMBEDDING] = embedding.encode()
    if not config.rotate:  # adapters are trained for weights that are not rotated
        files |= _adapter_sites(lowered, dense[0])
    notes = Counter(json.loads(model.metadata_props["enginewright.notes"]))
    notes.update(note for result in results.values() for note in result.notes)
    return Assembly(
        checkpoint=checkpoint,
        config=config,
        max_seq_len=max_seq_len,
        imported=imported,
        dense=dense[0],
        plans=plans,
        weights=merged_weights(lowered),
        kernels={name: kernel for entry in lowered for name, kernel in entry.kernels.items()},
        files=files,
        results=results,
        notes=[
            *config.notes,
            *json.loads(model.metadata_props["enginewright.warnings"]),
            *(fact for result in results.values() for fact in result.facts),
            *(f"{count} {'weight' if count == 1 else 'weights'}: {text}" for text, count in notes.items()),
            *_template_notes(checkpoint.tokenizer),
        ],
    )


def check_quant(checkpoint: Checkpoint, config: BuildConfig) -> None:
    """Refuses to quantize or to rotate a checkpoint that is already quantized.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.

    Raises:
        UsageError: the checkpoint is quantized, and the options name a method.
    """
    if config.recover and config.method.name in NOT_RECOVERED:
        why = f"{config.method.name} has no scales that could be trained"
        raise UsageError("--recover is not possible", why, "Name another --quant, such as int4-rtn, or leave it out.")
    stored_as = format_name(checkpoint)
    if stored_as is not None and config.quant is not None:
        raise UsageError(
            f"--quant {config.quant.name} is not possible",
            f"the checkpoint is quantized already, as {stored_as}",
            "Leave --quant out to build it as it is, or build from the original checkpoint.",
        )
    for option, wanted in (("--rotate", config.rotate), ("--recover", config.recover)):
        if stored_as is not None and wanted:
            why = f"the checkpoint is quantized already, as {stored_as}"
            raise UsageError(f"{option} is not possible", why, "Leave it out, or build from the original checkpoint.")


def with_possible_kv(config: BuildConfig, *models: Mapping[str, Any]) -> BuildConfig:
    """Replaces the KV cache's dtype by bf16, with a note, if the config names another one that a model cannot have.

    Args:
        config: options of the build.
        models: config.json of each model of the engine.
    """
    if config.kv_cache_dtype == BuildConfig.kv_cache_dtype or not any(map(keeps_latent_vectors, models)):
        return config
    change = f"the KV cache is bf16, not {config.kv_cache_dtype} as in the recipe"
    note = f"{change}: latent vectors are stored as bf16 only"
    return replace(config, kv_cache_dtype=BuildConfig.kv_cache_dtype, notes=(*config.notes, note))


def chosen_quant(name: str | None, **settings: object) -> QuantConfig | None:
    """Makes the method from --quant and its settings; None leaves the choice to the checkpoint.

    Args:
        name: name in `--quant`.
        settings: settings of the method; None is not given.
    """
    given = name is not None or any(value is not None for value in settings.values())
    return quant_config(name or Bf16.info.name, **settings) if given else None


def default_output(checkpoint: Checkpoint, config: BuildConfig) -> Path:
    """Returns MODEL-QUANT.engine, in the working directory.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
    """
    quant = config.quant.name if config.quant else format_name(checkpoint) or Bf16.info.name
    kv = "" if config.kv_cache_dtype == "bf16" else f"-kv-{config.kv_cache_dtype}"
    return Path(f"{checkpoint.name}-{quant}{kv}.engine")


def _max_seq_len(config: BuildConfig, model_limit: int) -> int:
    if config.max_seq_len is not None and config.max_seq_len > model_limit:
        raise UsageError(
            f"--max-seq-len {config.max_seq_len} is more than the model was made for",
            f"its config says {model_limit} positions",
            f"Use --max-seq-len {model_limit} or less.",
        )
    return config.max_seq_len or model_limit


def merged_weights(lowered: Sequence[Lowered]) -> dict[str, Weight]:
    """Merges the weights of all targets; one that several read is stored once."""
    merged: dict[str, Weight] = {}
    for entry in lowered:
        for name, weight in entry.weights.items():
            if merged.setdefault(name, weight).form != weight.form:
                raise AssertionError(f"{name} is packed as {merged[name].form} and as {weight.form}")
    return merged


def _template_notes(tokenizer: TokenizerFiles) -> list[str]:
    """Explains why the chat template cannot render a message, found by a trial under the limits of each request.

    An engine with such a template is useful for everything but chats, so it is built nevertheless.
    """
    if tokenizer.chat_template is None:
        return []
    names = {name: tokenizer.config.get(name) or "" for name in SPECIAL_TOKENS}
    why = _try_template(tokenizer.chat_template, msgspec.json.encode(names))
    return [] if why is None else [f"no chats of one message: {why}"]


@cache  # a trial takes a process, and most drafts have their model's template
def _try_template(source: str, names: bytes) -> str | None:
    """Renders one message by a template, with special tokens in JSON. Returns why it cannot, or None if it can."""
    try:
        ChatTemplate(source).render([{"role": "user", "content": "Hello"}], msgspec.json.decode(names))
    except EngineError as error:
        return f"{error.what}: {error.why}"
    return None


def plan_files(lowered: Sequence[Lowered]) -> dict[str, bytes]:
    """Makes the sections of a model's plans, of all ranks.

    Args:
        lowered: its plan for each target.
    """
    files = {}
    for entry in lowered:
        target, size = entry.plan.target, len(entry.rank_plans)
        files[plan_section(target)] = entry.plan.to_json()
        files |= {rank_plan_section(target, rank, size): plan.to_json() for rank, plan in enumerate(entry.rank_plans)}
    return files


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Makes the sections that are neither weights nor plans: tokenizer, templates, defaults."""
    tokenizer = checkpoint.tokenizer
    files = {"tokenizer.json": tokenizer.tokenizer_json}
    files["tokenizer_config.json"] = msgspec.json.encode(dict(tokenizer.config), order="sorted")
    files["generation_config.json"] = msgspec.json.encode(dict(checkpoint.generation_config), order="sorted")
    if tokenizer.chat_template is not None:
        files["chat_template"] = tokenizer.chat_template.encode()
    return files


def _adapter_sites(lowered: Sequence[Lowered], dense: ir.Model) -> dict[str, bytes]:
    """Makes the sections for adapters, of engines that generate text: plans of all targets read the same weights.

    Layers of experts, or with a matrix for each head, the output head and embeddings can have adapters on CPUs alone.
    """
    head = head_of(dense)
    name = head.weight.name if head else None
    generating = [entry for entry in lowered if entry.plan.generates]
    sections = [site_sections(entry.plan, entry.weights, name, on_cpu=False) for entry in generating]
    if any(other != sections[0] for other in sections[1:]):
        raise AssertionError("the plans of two targets have different adapter sites")
    for entry in generating:
        if entry.plan.target == CPU:
            return site_sections(entry.plan, entry.weights, name, on_cpu=True)
    return sections[0] if sections else {}


def packed(weight: Weight, progress: Progress) -> Iterator[memoryview]:
    """Reads, converts and packs one weight; fused and quantized weights are computed here.

    Args:
        weight: the weight.
        progress: receiver of progress, in bytes.
    """
    threads = env.num_threads() or num_cores()
    for piece in in_order(pack_rows(open_rows(weight.value), weight.form), threads):
        progress.advance(piece.nbytes)
        yield piece
