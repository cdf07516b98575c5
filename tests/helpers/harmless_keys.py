"""Odd values of keys that a family excuses, and transformers' results with them."""

import importlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import HARMLESS, Harmless
from enginewright.builder.pooling import Pooling
from enginewright.builder.tensors import AssumedTensors
from enginewright.builder.weights import Weights
from tests.checkpoint.test_models import reference_logits
from tests.helpers.tiny import ENCODERS, kind_of, tiny_config, tiny_model, use_long_factors

# Of each type: neither what models have, nor near it. Of texts: those that transformers knows somewhere.
ODD: Mapping[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (3, 977),
    float: (0.013, 0.7, 7.5),
    str: ("odd", "stranger", "mean", "cls", "*E", "regression", "single_label_classification"),
    list: ([1, 2], [3], [0.1, 0.2], [0.3, 0.4], ["attention", "moe"], ["moe", "attention"], ["a"]),
    dict: ({"a": 1}, {"b": 2}, {"0": "a"}, {"1": "b"}),
}
# Keys of which transformers takes other values, or runs with others alone.
BY_KEY: Mapping[str, tuple[Any, ...]] = {
    "auto_map": ({"AutoConfig": "odd.Config"}, {"AutoTokenizer": "stranger.Tokenizer"}),
    "mtp_hybrid_override_pattern": ("*E", "M-"),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 777.0}, {"rope_type": "default", "rope_theta": 5.0}),
    "rope_scaling": ({"rope_type": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 0.7}),
    "num_labels": (1, 2),  # as many as id2label has
    "id2label": ({"0": "odd"}, {"0": "odd", "1": "stranger"}),
    "dtype": ("float32",),  # of the reference, whose buffers keep the roundings of any other
    "torch_dtype": ("float32",),
    "cache_implementation": ("static", "offloaded_static"),
    "chunk_size_feed_forward": (1, 23),  # has to divide the number of tokens
    "pad_token_id": (3, 5),  # below the size of the vocabulary
    "return_dict": (True,),  # without it, logits are in a tuple
    "use_return_dict": (),  # has no setter
    "embedding_dropout": (0.013, 0.7),
    "residual_dropout": (0.013, 0.7),
}
TOKENS = 23


def excused_by(family: str, table: str = "HARMLESS") -> dict[str, Harmless]:
    """The keys that a family excuses itself, in a table of its file."""
    return dict(vars(importlib.import_module(f"enginewright.builder.models.{family}")).get(table, {}))


def excused(family: str) -> dict[str, Harmless]:
    """All keys that a family excuses; its own come first, and count where it has them both."""
    own, config = excused_by(family), ConfigReader(tiny_config(family), pooling=Pooling("mean"))
    config.read(str, "model_type")
    importlib.import_module(f"enginewright.builder.models.{family}").build(config, Weights(AssumedTensors()))
    return {**own, **{key: entry for key, entry in HARMLESS.items() if key not in own.keys() | config.known()}}


def odd_values(key: str, entry: Harmless, default: object) -> Iterator[Any]:
    """Values that the entry allows, those of the default's type first."""
    if entry.values is not None:
        yield from entry.values
    elif key in BY_KEY:
        yield from BY_KEY[key]
    else:
        first = [type(default)] if type(default) in ODD else []
        for kind in dict.fromkeys([*first, int, float, bool, str, list, dict]):
            yield from ODD[kind]


class Reference:
    """transformers' model of a tiny config, in fp32."""

    def __init__(self, family: str, overrides: Mapping[str, Any]) -> None:
        self.family, self.config = family, tiny_config(family, **overrides)
        self.model = tiny_model(self.config, kind=kind_of(family))
        self.tokens = np.random.default_rng(0).integers(0, self.config["vocab_size"], (1, TOKENS))
        self.defaults = AutoConfig.for_model(family).to_dict()

    def numbers(self, model: PreTrainedModel | None = None) -> npt.NDArray[np.float32]:
        """Logits of a model, or hidden states of an encoder."""
        model = model or self.model
        if self.family not in ENCODERS:
            return reference_logits(model, self.tokens)
        with torch.no_grad():
            return model(torch.from_numpy(self.tokens)).last_hidden_state.numpy()  # type: ignore[no-any-return]

    def with_odd(self, entries: Mapping[str, Harmless], which: int) -> "Odd":
        """A model of the same weights, with each of these keys at an odd value that transformers accepts: the first
        one, or the `which`-th after it.
        """
        settings, taken = dict(self.config), dict[str, Any]()
        for key, entry in entries.items():
            values = odd_values(key, entry, self.defaults.get(key))
            accepted = list(islice((value for value in values if _takes({**settings, key: value})), which + 1))
            if accepted:
                settings[key] = taken[key] = accepted[-1]
        model = kind_of(self.family).from_config(
            _config_of(settings), attn_implementation="eager", experts_implementation="eager"
        )
        model.float().eval().load_state_dict(self.model.state_dict(), strict=True)
        use_long_factors(model)
        return Odd(settings, taken, self.numbers(model))


class Odd(NamedTuple):
    """A model with odd values."""

    config: Mapping[str, Any]
    taken: Mapping[str, Any]  # those that were changed
    numbers: npt.NDArray[np.float32]


def _config_of(settings: Mapping[str, Any]) -> PretrainedConfig:
    own = {key: value for key, value in settings.items() if key != "model_type"}
    return AutoConfig.for_model(settings["model_type"], **json.loads(json.dumps(own)))


def _takes(settings: Mapping[str, Any]) -> bool:
    try:
        _config_of(settings)
    except (StrictDataclassError, ValueError, TypeError, AttributeError):
        return False
    return True
