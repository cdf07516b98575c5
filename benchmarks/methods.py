"""Cost of each quantization method: quality, bits per weight, and the time and memory of its build.

    python benchmarks/methods.py [--model smollm2-rescaled] [--work FOLDER] [--output FILE] [METHOD ...]

A method is the options of `engine build`, in one word with commas: int4-awq,group-size=64. Quality is what the build's
own gate measures on its held-out text, whatever it is; methods that calibrate do so on text that the model writes.
"""

import argparse
import tempfile
from pathlib import Path

from protocol.builds import Built, build
from protocol.models import KINDS, SMOLLM2, Model, model

from enginewright.runtime.commands.quality import QualityReport

GATE = "full,kl=1000,top1=0,ppl=1000,layer=1000,needle=0"  # full: all positions, whatever the figures
STATIC = "int8-sq,activation-scheme=static"
METHODS = (
    "bf16",
    "int8-wo",
    *(f"fp8{scales}" for scales in ("", ",fp8-scales=tensor", ",fp8-scales=block")),
    "mxfp4",
    *(f"{name}{group}" for group in ("", ",group-size=0") for name in ("w8a8", "int8-sq", STATIC)),
    *(f"{name},group-size={group}" for group in (32, 64, 128) for name in ("int4-rtn", "int4-awq", "int4-gptq")),
    *(f"auto,bits={bits}" for bits in ("4.25", "4.6", "5", "6")),
)
COLUMNS = (
    "method",
    "MB",
    "KL to the source, nats",
    "same token first",
    "perplexity ×",
    "build and gate, s",
    "RssAnon, MB",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def options(method: str) -> tuple[str, ...]:
    """Options of `engine build` for a method, such as --quant int4-awq --group-size 64."""
    name, *settings = method.split(",")
    pairs = (setting.partition("=") for setting in settings)
    return ("--quant", name, *(word for key, _, value in pairs for word in (f"--{key}", value)))


def row(method: str, built: Built, quality: QualityReport) -> str:
    assert quality.measured is not None
    whole = quality.measured.whole
    assert whole.perplexity is not None and whole.source_perplexity is not None and whole.top1 is not None
    return (
        f"| `{method}` | {built.path.stat().st_size / 1e6:.0f} | {whole.kl:g} ± {whole.kl_standard_error:g} "
        f"| {whole.top1:.1%} | {whole.perplexity / whole.source_perplexity:.3f} | {built.seconds:.1f} "
        f"| {built.rss_anon_bytes / 1e6:.0f} |"
    )


def measured(method: str, of: Model, folder: Path) -> str:
    """A method's row, of one build."""
    built = build(of, "methods", options(method), folder, gate=GATE)
    line = row(method, built, QualityReport.from_dict(built.quality))
    built.path.unlink()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD")
    parser.add_argument("--model", choices=KINDS, default="smollm2-rescaled")
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2)
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="for models and engines")
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    of = model(arguments.model, arguments.work, arguments.smollm2)
    lines = [HEAD]
    print(HEAD)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        for method in arguments.methods:
            lines.append(measured(method, of, Path(folder)))
            print(lines[-1], flush=True)
    if arguments.output is not None:
        command = f"`python benchmarks/methods.py --model {arguments.model} {' '.join(arguments.methods)}`"
        arguments.output.write_text("\n".join([command, "", *lines, ""]))


if __name__ == "__main__":
    main()
