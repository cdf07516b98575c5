"""Names of modules in transformers' models, by which PEFT saves adapters, and in checkpoints.

Both may differ, since transformers renames what it loads: GPT-2 is published without the `transformer.` of its model
with a head, Nemotron-H with `backbone.` for `model.`, and the text model of one with pictures has had several places.
Source: transformers/conversion_mapping.py, and `base_model_prefix` in transformers/modeling_utils.py.
"""

from collections.abc import Collection, Iterable, Iterator

# Beginning of a name in transformers' model → in a checkpoint, or an engine.
BEGINNINGS = (
    ("transformer.", ""),
    ("model.", "backbone."),
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head", "language_model.lm_head"),
    ("model.", ""),
)
# The same of embedding models, from which PEFT makes adapters without a head, and so without its model's beginning.
BEGINNINGS_WITHOUT_HEAD = (("", "model."), ("", "bert."))
# Part of a name in transformers' model → in a checkpoint.
INSIDE = ((".mlp.", ".block_sparse_moe."), (".forget_gate.", "."))


class BaseNames:
    """Finds the names that modules of an adapter have in its base.

    Args:
        names: names of the base's tensors, or modules.
        is_without_head: True if transformers' model of the base has no head, as that of an embedding model.
    """

    def __init__(self, names: Iterable[str], *, is_without_head: bool = False) -> None:
        self._known = frozenset(one for name in names for one in _with_parents(name))
        self._beginnings = (*BEGINNINGS, *(BEGINNINGS_WITHOUT_HEAD if is_without_head else ()))

    def find(self, module: str) -> str:
        """Finds the name of a module in the base; its own if the base has none.

        Args:
            module: its name in transformers' model.
        """
        return next((name for name in self._candidates(module) if name in self._known), module)

    def _candidates(self, module: str) -> Iterator[str]:
        for name in (module, *_replaced(module)):
            yield name
            for beginning, instead in self._beginnings:
                if name.startswith(beginning):
                    yield instead + name.removeprefix(beginning)


def _replaced(module: str) -> Collection[str]:
    return [module.replace(old, new) for old, new in INSIDE if old in module]


def _with_parents(name: str) -> Iterator[str]:
    """A name, and the names of all modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]
