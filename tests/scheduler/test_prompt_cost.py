"""Costs of a prompt's tokens by position: from a plan's operations, against a count in transformers' model."""

from pathlib import Path

import pytest
from torch import nn

from enginewright.runtime.engine import Engine
from enginewright.runtime.step.prompt_cost import ATTENTION_FACTOR, PromptCost
from tests.helpers.engines import built
from tests.helpers.tiny import tiny_checkpoint, tiny_config, tiny_model


@pytest.mark.parametrize(("family", "windows"), [("llama", (0, 0, 0)), ("gemma3_text", (7, 0, 7))])
def test_cost_is_that_of_the_models_operations(tmp_path: Path, family: str, windows: tuple[int, ...]) -> None:
    model = tiny_model(tiny_config(family))
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and name != "lm_head"}
    # After the last attention, only rows whose logits are wanted are computed.
    every = [
        one for name, one in linears.items() if "layers.2." not in name or name[-6:] in ("q_proj", "k_proj", "v_proj")
    ]
    operations = sum(2 * one.weight.numel() for one in every)
    (width,) = {one.in_features for name, one in model.named_modules() if name.endswith("o_proj")}  # heads x head_dim
    with Engine.open(built(tiny_checkpoint(tmp_path, family), "bf16")) as engine:
        cost = PromptCost(engine.plan)
    assert cost.at(0) == 1
    for position in (3, 8, 300):
        seen = sum(min(position, window) if window else position for window in windows)
        assert cost.at(position) == pytest.approx(1 + ATTENTION_FACTOR * 4 * width * seen / operations)
