"""EAGLE-3: a layer that reads hidden states of several of the model's layers. https://arxiv.org/abs/2503.01840

It reads the embedding of a token and h of the token before it, and predicts the token that follows:

    h = fc(the model's states, side by side);  x = h + attention([norm(embedding), norm(h)]);  x + mlp(norm(x)), a norm,
    and a head of its own, perhaps for the most frequent tokens only

For a further draft token, its layer's output replaces h. So that one graph does both, its input rows have columns for
both: states of the model, and one of its own. The unused columns of a row are zero, and h is a sum. Source:
llama_eagle3.py of vllm/model_executor/models.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from enginewright.builder.checkpoint.head import HeadFolder
from enginewright.builder.config import MAX_TOKENS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.heads.base import HeadGraph, TargetModel, no_head
from enginewright.builder.models import llama
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Heads, Layer, RmsNorm
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.tensors import Tensors
from enginewright.builder.weights import Weights
from enginewright.errors import EngineError
from enginewright.passes.show_hidden import ShowHidden
from enginewright.plugins.elementwise.gather_columns import GATHER_COLUMNS

# Class names of such heads: first those of EAGLE, SpecForge and vLLM, then those of vLLM's speculators.
CLASSES = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
LAYERS = "eagle_aux_hidden_state_layer_ids"
HARMLESS = {
    **llama.HARMLESS,
    "draft_attn_kernel": Harmless("It is about training, which is over."),
    "embed_requires_grad": Harmless("It is about training, which is over."),
    "fc_norm": Harmless("What fc reads has no norms of single layers.", (False,)),
    "has_no_defaults_at_init": Harmless("It is a remark of speculators about its classes."),
    "max_window_layers": Harmless("No layer has a window."),
    "model_type": Harmless("It is that of the layer that counts."),
    "num_aux_hidden_states": Harmless("The shape of fc says it, too."),
    "speculators_config": Harmless("It says how many draft tokens vLLM uses, and for which model."),
    "speculators_version": Harmless("It says where the checkpoint comes from."),
    "target_model_type": Harmless("It is a remark about the model."),
    "tie_word_embeddings": Harmless("The head has a table of its own for logits, which has to be there."),
    "use_sliding_window": Harmless("No layer has a window.", (False,)),
}


def build_eagle(folder: HeadFolder, model: TargetModel) -> HeadGraph:
    """Builds the graph of the head; without an embedding of its own it uses the model's.

    Args:
        folder: the head.
        model: the model that it is for.

    Raises:
        UsageError: it belongs to another model.
        UnsupportedModelError: it has a feature that is not implemented.
        EngineError: config and tensors do not fit together.
    """
    whole, weights = ConfigReader(folder.config, max_seq_len=model.max_seq_len), Weights(Tensors(folder))
    config = whole.section("transformer_layer_config") or whole
    _check_kind(whole, config)
    embedding, norm, heads = Embedding.read(config), RmsNorm.read(config), Heads.read(config)
    width, bias = embedding.hidden, config.read(bool, "attention_bias", default=False)
    attention = Attention(heads, bias=bias, output_bias=bias, output_width=width)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    known = whole.read_size("draft_vocab_size", default=embedding.vocab, maximum=MAX_TOKENS)
    norms_states = whole.read(bool, "norm_before_fc", default=False)
    norms_residual = whole.read(bool, "norm_before_residual", default=False)
    outputs_normed = whole.read(bool, "norm_output", default=False)
    state_width = whole.read(int, "target_hidden_size", default=width)
    layers, has_embedding = _read_layers(whole, folder, model), weights.has_any("embed_tokens.")
    for reader in {id(reader): reader for reader in (config, whole)}.values():
        reader.refuse_unread(HARMLESS)
    for differs, why in (
        (embedding.vocab != model.vocab, f"it has {embedding.vocab} tokens, and the model {model.vocab}"),
        (state_width != model.width, f"it reads states of {state_width} columns, and the model's have {model.width}"),
        (
            not has_embedding and width != model.width,
            f"it has no embedding of its own, and the model's has {model.width} columns, not {width}",
        ),
    ):
        if differs:
            raise no_head(folder.name, model.name, why)

    if not has_embedding:
        weights.borrow("embed_tokens.weight", model.table)
    layer = "midlayer" if weights.has_any("midlayer.") else "layers.0"
    graph, shown_width = GraphWriter(weights, max_positions), len(layers) * model.width
    shown, own = graph.split(graph.hidden_before(shown_width + width), "given", shown_width, width)
    if norms_states:
        shown = norm.write(graph, shown, "input_norm")
    h = graph.add(own, graph.linear(shown, "fc", width))
    token = norm.write(graph, embedding.write(graph, "embed_tokens"), f"{layer}.input_layernorm")
    normed = norm.write(graph, h, f"{layer}.hidden_norm")
    x = graph.join([token, normed], f"{layer}.joined")
    x = attention.write(graph, x, f"{layer}.self_attn", 0, rope.write(graph))
    x = graph.add(normed if norms_residual else h, x)
    x = Layer(None, mlp, norm).write(graph, x, layer, 0, None)
    graph.end_layer(x)
    logits = graph.linear(norm.write(graph, x, "norm"), "lm_head", known)
    if known != embedding.vocab or weights.has_any("d2t"):
        columns = graph.constant("d2t", _read_columns(weights, embedding.vocab, known))
        logits = graph.plugin(
            GATHER_COLUMNS, [logits, columns], "by_token", to=int(ir.DataType.FLOAT), group=0
        ).outputs[0]
    weights.ignore("t2d", "It says what d2t does, from the other side.")
    weights.refuse_left_over()
    return HeadGraph(graph.finish(logits), ShowHidden(layers), ShowHidden() if outputs_normed else ShowHidden((1,)))


def _check_kind(whole: ConfigReader, config: ConfigReader) -> None:
    """Refuses heads of another kind. config: that of the layer."""
    if (kind := whole.read(str, "speculators_model_type", default="eagle3")) != "eagle3":
        raise whole.unsupported(f"speculators_model_type = {kind!r}", "EAGLE-3 is implemented.")
    for name in whole.read_list(str, "architectures") or []:
        if name not in CLASSES:
            raise whole.unsupported(f"architectures = {[name]}", f"Implemented are {_listed(CLASSES)}, of EAGLE-3.")
    if (family := config.read(str, "model_type")) != "llama":
        raise config.unsupported(f"model_type = {family!r}", "Heads with a layer of llama's are implemented.")
    if (count := read_layer_count(config)) != 1:
        raise config.unsupported(f"num_hidden_layers = {count}", "Heads of one layer are implemented.")


def _read_layers(config: ConfigReader, folder: HeadFolder, model: TargetModel) -> tuple[int, ...]:
    """Reads the number of layers after which each state is taken.

    vLLM and its speculators number the layers before which the states are, and take three by default. SpecForge and
    SGLang, in eagle_config, number the layers after which they are.
    """
    layers = config.read_list(int, LAYERS)
    nested = config.section("eagle_config")
    if nested is not None:
        if not nested.read(bool, "use_aux_hidden_state", default=True):
            raise nested.unsupported("use_aux_hidden_state = False", "Heads that read several states are implemented.")
        after = nested.read_list(int, LAYERS)
        nested.refuse_any_unread()
        numbered = after and [layer + 1 for layer in after]
        if layers is not None and numbered is not None and layers != numbered:
            raise config.error(f"{LAYERS} is {layers}, but in eagle_config, which counts from 1 less, {after}")
        layers = layers or numbered
    if layers is None:
        layers = [2, model.layers // 2, model.layers - 3]
    if not layers or layers != sorted({*layers}) or layers[0] < 1 or layers[-1] > model.layers:
        why = f"it reads the states after {_listed(layers)} layers, and the model has {model.layers}"
        raise no_head(folder.name, model.name, why)
    return tuple(layers)


def _read_columns(weights: Weights, vocab: int, known: int) -> NDArray[np.int32]:
    """Reads the column of each token's logit; -1 for tokens that the head does not have.

    Raises:
        EngineError: `d2t` is missing, two columns have the same token, or one has no valid token.
    """
    offsets = weights.tensors.take("d2t", (known,), dtypes=(torch.int64, torch.int32))().numpy()
    tokens = np.arange(known) + offsets
    low, high = tokens.min(), tokens.max()
    if low < 0 or high >= vocab:
        raise EngineError("tensor d2t cannot be used", f"it names tokens from {low} to {high}, and there are {vocab}")
    if (repeated := known - len(np.unique(tokens))) > 0:
        raise EngineError("tensor d2t cannot be used", f"{repeated} of its {known} tokens are repeated")
    columns = np.full(vocab, -1, np.int32)
    columns[tokens] = np.arange(known)
    return columns


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names))
