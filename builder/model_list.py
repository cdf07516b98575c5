"""Lists the families of models that can be built: `engine build --list-models`, and docs/models.md.

`python -m enginewright.builder.model_list > docs/models.md` writes the latter.
"""

import importlib
from dataclasses import dataclass

from enginewright.builder.checkpoint.gguf.families import FAMILIES
from enginewright.builder.models import model_types
from enginewright.builder.wrappers import WRAPPERS
from enginewright.targets import CPU, CUDA

# Family → published weights that its tests use; tests of all others use random ones.
PUBLISHED_WEIGHTS = {"bert": "all-MiniLM-L6-v2", "llama": "SmolLM2-135M"}


@dataclass(frozen=True)
class ListedFamily:
    """A row of the table."""

    model_type: str  # `model_type` of config.json
    about: str  # description in one line
    paper: str  # address of the paper
    gguf: tuple[str, ...]  # `general.architecture` of the GGUF files that can be read
    tested_against: str  # reference of the tests


def families() -> list[ListedFamily]:
    """Lists the families, each from the docstring of its file."""
    rows = []
    for model_type in model_types():
        about, _, paper = " ".join(str(module_of(model_type).__doc__).split()).rpartition(" https://")
        gguf = tuple(dict.fromkeys(each.architecture for each in FAMILIES if each.model_type == model_type))
        real = f", {PUBLISHED_WEIGHTS[model_type]}" if model_type in PUBLISHED_WEIGHTS else ""
        rows.append(ListedFamily(model_type, about, f"https://{paper}", gguf, f"transformers{real}"))
    return rows


def wrappers() -> list[ListedFamily]:
    """Lists models that contain a text model; their other parts are left out."""
    page = "https://huggingface.co/docs/transformers/model_doc"
    return [ListedFamily(name, found.about, f"{page}/{name}", (), "transformers") for name, found in WRAPPERS.items()]


def module_of(model_type: str) -> object:
    """Imports the file of a family."""
    return importlib.import_module(f"enginewright.builder.models.{model_type}")


def as_text() -> str:
    """Formats a line for each family."""
    rows = [*families(), *wrappers()]
    width = max(len(row.model_type) for row in rows)
    return "\n".join(f"{row.model_type:<{width}}  {row.about}" for row in rows)


PAGE = """# Models

An engine is built from a checkpoint whose `config.json` has one of these as its `model_type`. Each is one file of
`builder/models/`; a key of a config that it does not know is refused by name. This page is made from the code:
`python -m enginewright.builder.model_list > docs/models.md`.

| `model_type` | what it is | GGUF | tested against |
|---|---|---|---|
{rows}

- **GGUF**: the `general.architecture` of files that are read as well, in all formats that the `gguf` package
  restores. Files of Mistral 7B and Nemo are of architecture `llama`; those of GLM 4.7 Flash are of `deepseek2`, and
  read as `deepseek_v3`, which computes the same. Files of Mistral Small 4 that were made of transformers' checkpoint do
  not say how much queries grow: engines of them are as long as the model was trained first, within which they do not.
- **Quantizations**: all families have all methods of [quantize.md](quantize.md).
- **Targets**: all families run on `{cpu}`, and have code for `{cuda}`; [cuda.md](cuda.md) says how far that is tested.
- **Tested against**: tiny models with random weights and awkward sizes give transformers' logits, as a graph in
  onnxruntime and as an engine; where weights are named, these as well.
- **LongRoPE** (`phi3`) has factors for sequences up to a model's original length, and others for longer ones. Which
  they are must not depend on a sequence, whose keys would have to be rotated again as it grows: an engine has those of
  its longest one. `--max-seq-len 4k` gives a model whose original length is 4096 the factors for short ones.
"""


def as_markdown() -> str:
    """Formats docs/models.md."""
    rows = (
        f"| [`{row.model_type}`]({row.paper}) | {row.about} | "
        f"{', '.join(f'`{name}`' for name in row.gguf) or 'no'} | {row.tested_against} |"
        for row in [*families(), *wrappers()]
    )
    return PAGE.format(rows="\n".join(rows), cpu=CPU, cuda=CUDA)


if __name__ == "__main__":
    print(as_markdown(), end="")
