"""The golden table, rewrites.json: model → quantization → pass → number of rewrites.

After an intended change, `python -m tests.golden.rewrites` writes it again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from enginewright.passes.pipeline import run_pipeline
from enginewright.passes.quant import METHODS, QuantConfig
from tests.helpers.graphs import CASES, dense_graph

TABLE = Path(__file__).with_suffix(".json")
Table = dict[str, dict[str, dict[str, int]]]


EACH = [(case, method) for case in CASES for method in METHODS]


def rewrites(pairs: Iterable[tuple[str, type[QuantConfig]]] = EACH) -> Table:
    """The table as the passes are now. Every refusal is counted as a pass of its own, by its sentence."""
    table: Table = {}
    for case, method in pairs:
        _, results = run_pipeline(dense_graph(case), method())
        counts = {name: result.rewrites for name, result in results.items()}
        refusals = {f"refused: {sentence}": 1 for result in results.values() for sentence in result.refusals}
        table.setdefault(case, {})[method.info.name] = counts | refusals
    return table


if __name__ == "__main__":
    TABLE.write_text(json.dumps(rewrites(), indent=2) + "\n")
