"""Commands that read or sign an existing engine file: `engine inspect`, `verify`, `sign`, `doctor` and `diff`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from enginewright.cli.help import JSON_OPTION, SectionCommand, section
from enginewright.cli.options import DEVICE_OPTION, EVERY_LINE_OPTION, ISA_OPTION, LIMIT_OPTIONS, THREADS_OPTION
from enginewright.cli.printing import show
from enginewright.cli.values import BytesType, CountType, EnginePathType

output_section, trust_section, signer_section = section("Output"), section("Trust"), section("Signer")
SIGNATURE_OPTION = section("Signature")(
    "--signature",
    type=click.Path(path_type=Path),
    show_default="FILE.sig, next to the file",
    help="File of the signature.",
)


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType())
@output_section(
    "--memory",
    type=BytesType(),
    show_default="the free memory of this machine",
    help="Show how many sequences fit this much memory, weights included: 8GiB, 8g (the same) or 8GB.",
)
@output_section(
    "--tensor-parallel-size",
    "-tp",
    type=CountType(),
    default=1,
    help="Show which part of the weights and of the KV cache each of this many processes has.",
)
@output_section(
    "--pipeline-parallel-size",
    "-pp",
    type=CountType(),
    default=1,
    help="The same for this many stages of layers, each of --tensor-parallel-size processes.",
)
@output_section("--sections", is_flag=True, help="List every section of the file, with its size and format.")
@JSON_OPTION
def inspect(
    engine: Path,
    memory: int | None,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    sections: bool,
    as_json: bool,
) -> None:
    """Show what is in an engine file, or in an adapter file.

    That is the model, how it was built, what the quality gate measured, and how many sequences fit into memory.
    """
    from enginewright.rank_layout import RankLayout
    from enginewright.runtime.commands.inspect import describe, summarize

    summary = summarize(engine, memory, RankLayout(tensor_parallel_size, pipeline_parallel_size))
    show(summary, None if as_json else partial(describe, every_section=sections))


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType())
@section("Checks")(
    "--goldens/--no-goldens",
    default=True,
    help="Also run the prompts whose results the build recorded, and compare the results of this machine.",
)
@trust_section(
    "--key",
    type=click.Path(path_type=Path),
    show_default="nobody is trusted",
    help="Public key (PEM) that ENGINE must be signed with.",
)
@trust_section(
    "--certificate",
    "certificates",
    type=click.Path(path_type=Path),
    multiple=True,
    show_default="none",
    help="Root certificate (PEM) of the signer's certificate; may be given several times.",
)
@trust_section(
    "--identity",
    show_default="none",
    help="Who must have signed ENGINE without a key: an e-mail address, or the URL of a CI workflow.",
)
@trust_section("--issuer", show_default="none", help="URL of the OpenID provider of the --identity.")
@SIGNATURE_OPTION
@trust_section(
    "--provenance",
    type=click.Path(path_type=Path),
    show_default="not checked",
    help="Also check that this file, written by `engine build --provenance`, describes ENGINE and has the same signer.",
)
@DEVICE_OPTION
@THREADS_OPTION
@ISA_OPTION
@JSON_OPTION
def verify(
    engine: Path,
    goldens: bool,
    key: Path | None,
    certificates: tuple[Path, ...],
    identity: str | None,
    issuer: str | None,
    signature: Path | None,
    provenance: Path | None,
    threads: int | None,
    isa: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Check that an engine file is intact, and who signed it.

    The hash of every part of the file is checked, weights included, and the signature if you name whom you trust.
    Then the engine is run, to check that it computes the same results on this machine as where it was built.
    """
    from enginewright.runtime.commands.signing import choose_trust
    from enginewright.runtime.commands.verify import verify as run_verify

    report = run_verify(
        engine,
        goldens=goldens,
        threads=threads,
        isa=isa,
        device=device,
        trust=choose_trust(key, certificates, identity, issuer),
        signature=signature,
        provenance=provenance,
    )
    show(report, None if as_json else lambda one: "\n".join(f"{name:<12} {text}" for name, text in one.items()))


@click.command(cls=SectionCommand)
@click.argument("file", type=click.Path(path_type=Path))
@signer_section(
    "--key",
    type=click.Path(path_type=Path),
    show_default="none",
    help="Private key (PEM, on the curve P-256, P-384 or P-521, without a password) to sign with.",
)
@signer_section(
    "--certificate",
    type=click.Path(path_type=Path),
    show_default="the key alone",
    help="Certificate (PEM) of the key, for verifiers that trust its root.",
)
@signer_section(
    "--chain",
    type=click.Path(path_type=Path),
    multiple=True,
    show_default="none",
    help="Intermediate certificate (PEM) between it and the root; may be given several times.",
)
@signer_section(
    "--keyless",
    is_flag=True,
    help="Sign with a certificate of Sigstore, as the CI job that runs this command, or as the person who logs in on "
    "the web page that opens. The file's hash and the signer are then in a public log.",
)
@SIGNATURE_OPTION
@JSON_OPTION
def sign(
    file: Path,
    key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    keyless: bool,
    signature: Path | None,
    as_json: bool,
) -> None:
    """Sign FILE, an engine or its provenance.

    The signature is a Sigstore bundle in the form of OpenSSF Model Signing. It is a separate file; FILE is not changed.
    """
    from enginewright.runtime.commands.signing import choose_signer
    from enginewright.runtime.commands.signing import sign as run_sign

    written = run_sign(file, choose_signer(key, certificate, chain, keyless), signature)
    report = {"file": str(file), "signature": str(written)}
    show(report, None if as_json else lambda one: f"signed {one['file']}: {one['signature']}")


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType(), required=False)
@LIMIT_OPTIONS
@JSON_OPTION
@click.pass_context
def doctor(context: click.Context, /, engine: Path | None, as_json: bool, **limits: Any) -> None:
    """Show the abilities of this machine, and how ENGINE would run on it.

    Nothing is run. The exit code is 0, or 1 if the engine cannot run here; warnings name what makes it slow.
    """
    from enginewright.runtime.api.vllm_options import runtime_config
    from enginewright.runtime.commands.doctor import describe, examine

    report = examine(engine, runtime_config(**limits))
    show(report, None if as_json else describe)
    context.exit(1 if report["problems"] else 0)


@click.command(cls=SectionCommand)
@click.argument("a", type=EnginePathType())
@click.argument("b", type=EnginePathType())
@EVERY_LINE_OPTION
@JSON_OPTION
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, every_line: bool, as_json: bool) -> None:
    """Compare two engine files, A and B.

    The exit code is 0 if their content is the same, and 1 if it differs.
    """
    from enginewright.runtime.commands.diff import compare, describe

    report = compare(a, b)
    show(report, None if as_json else partial(describe, every_line=every_line))
    context.exit(0 if report["same"] else 1)
