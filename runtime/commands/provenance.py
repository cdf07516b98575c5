"""Provenance of an engine: its inputs, its builder and its recipe, in SLSA's format (https://slsa.dev/provenance/v1).

It is an in-toto Statement in a JSON file next to the engine. All of it comes from the engine's manifest and from the
versions of the builder's packages, so that two builds with the same inputs and packages write the same bytes.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from enginewright import __version__
from enginewright.engine_file import EngineFile
from enginewright.errors import SignatureError, UsageError
from enginewright.manifest import Manifest
from enginewright.output_file import write_file
from enginewright.regular_file import read_regular
from enginewright.runtime import env
from enginewright.runtime.commands.quality import QUALITY, QualityReport

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "pkg:pypi/enginewright#engine-build/v1"  # docs/build.md explains its parameters
BUILDER = f"pkg:pypi/enginewright@{__version__}"  # the default; --builder-id names the platform of the build
# Packages whose versions may change what a build computes.
PACKAGES = ("gguf", "nvidia-cuda-nvrtc", "numpy", "onnx-ir", "safetensors", "tokenizers", "torch", "triton")
LIMIT_BYTES = 16 << 20

Origins = Mapping[str, str | None]  # prefix of a checkpoint's file names → `Checkpoint.origin`


def write_provenance(engine: Path, output: Path, origins: Origins, builder_id: str | None = None) -> None:
    """Writes the provenance of an engine that this process has just built.

    Args:
        engine: the engine file.
        output: the file to write.
        origins: the origins of its checkpoints.
        builder_id: the URI of a trusted platform that built the engine; None names only this program.

    Raises:
        EngineError: the file cannot be written.
    """
    text = json.dumps(statement(engine, origins, builder_id), indent=2, sort_keys=True, ensure_ascii=False)
    write_file(output, f"{text}\n".encode())


def statement(engine: Path, origins: Origins, builder_id: str | None = None) -> dict[str, Any]:
    """The in-toto Statement about an engine, ready for JSON.

    Args:
        engine: the engine file.
        origins: the origins of its checkpoints.
        builder_id: the URI of the platform that built the engine.
    """
    with EngineFile.open(engine) as file:
        manifest = file.manifest
        gate = QualityReport.from_json(file.read_section(QUALITY))
    subject = {
        "name": engine.name,
        "digest": {"sha256": _sha256(engine)},
        "annotations": {"content_hash": manifest.content_hash},
    }
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "model": manifest.name,
            "model_type": manifest.model_type,
            "targets": list(manifest.targets),
            "recipe": manifest.recipe,
            "gate": {"level": gate.gate, "limits": gate.limits},
        },
        "resolvedDependencies": [*_sources(manifest, origins), *_packages()],
    }
    details: dict[str, Any] = {
        "builder": {
            "id": builder_id or BUILDER,
            "version": {"enginewright": manifest.builder_version, "python": platform.python_version()},
        }
    }
    if finished := env.source_date():
        details["metadata"] = {"finishedOn": finished.strftime("%Y-%m-%dT%H:%M:%SZ")}
    predicate = {"buildDefinition": definition, "runDetails": details}
    return {"_type": STATEMENT, "subject": [subject], "predicateType": PREDICATE, "predicate": predicate}


def check_provenance(engine: Path, provenance: Path) -> str:
    """Checks that a provenance belongs to these very bytes, and names the same inputs as the engine.

    Args:
        engine: the engine file.
        provenance: the file of its provenance.

    Returns:
        The id of the builder.

    Raises:
        UsageError: there is no such file.
        SignatureError: it is no provenance, or that of another engine.
    """
    found = _read(provenance)
    try:
        digests = [subject["digest"]["sha256"] for subject in found["subject"]]
        definition, details = found["predicate"]["buildDefinition"], found["predicate"]["runDetails"]
        named = {one["name"]: one["digest"]["sha256"] for one in definition["resolvedDependencies"] if "digest" in one}
        build_type, builder = definition["buildType"], str(details["builder"]["id"])
    except (KeyError, TypeError) as error:
        raise SignatureError(f"{provenance} is no provenance of an engine", f"it lacks {error}") from error
    what = f"{provenance} is not the provenance of {engine}"
    if build_type != BUILD_TYPE:
        raise SignatureError(what, f"its buildType is not {BUILD_TYPE}")
    if digests != [_sha256(engine)]:
        raise SignatureError(what, "it is about other bytes", "Get both again, from one build.")
    with EngineFile.open(engine, check_sections=False) as file:
        if named != file.manifest.sources:
            raise SignatureError(what, "it names other inputs than the engine itself")
    return builder


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = read_regular(path, LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", (error.strerror or str(error)).lower()) from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or (found.get("_type"), found.get("predicateType")) != (STATEMENT, PREDICATE):
        raise SignatureError(f"{path} is no provenance of an engine", f"it is no in-toto Statement of {PREDICATE}")
    return found


def _sources(manifest: Manifest, origins: Origins) -> Iterator[dict[str, Any]]:
    for name, digest in sorted(manifest.sources.items()):
        prefix = max((prefix for prefix in origins if name.startswith(prefix)), key=len, default="")
        origin = origins.get(prefix)
        uri = {"uri": f"{origin}#{name.removeprefix(prefix)}"} if origin else {}
        yield {"name": name, "digest": {"sha256": digest}, **uri}


def _packages() -> list[dict[str, Any]]:
    found = []
    for name in PACKAGES:
        try:
            found.append({"name": name, "uri": f"pkg:pypi/{name}@{metadata.version(name)}"})
        except metadata.PackageNotFoundError:
            continue  # a package that is not installed took no part in the build
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
