"""The sizes of a decoder, and the window of each of its layers."""

from dataclasses import dataclass

from enginewright.builder.config import MOST, ConfigReader

ACTIVATIONS = ("gelu_pytorch_tanh", "silu")

# Far above any model that is known: what is larger is an error, which must not be allocated before it is noticed.
MOST_TOKENS = 2**24
MOST_LAYERS = 2**12
MOST_HEADS = 2**14
MOST_HEAD_DIM = 2**13
MOST_COLUMNS = 2**22


@dataclass(frozen=True)
class Sizes:
    """What a decoder's config says in numbers. intermediate: columns of gate and up each. epsilon: of its norms."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    epsilon: float

    @staticmethod
    def read(config: ConfigReader, default_head_dim: int | None = None) -> "Sizes":
        """Without a default, a head_dim that is not given is hidden_size / num_attention_heads."""
        hidden, heads = (
            config.read_size("hidden_size", most=MOST_COLUMNS),
            config.read_size("num_attention_heads", most=MOST_HEADS),
        )
        head_dim = config.read_size("head_dim", default=default_head_dim or max(hidden // heads, 1), most=MOST_HEAD_DIM)
        kv_heads = config.read_size("num_key_value_heads", default=heads, most=MOST_HEADS)
        if heads % kv_heads:
            raise config.error(f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}")
        if head_dim % 2:
            raise config.error(f"head_dim is {head_dim}: rotary embeddings need an even one")
        return Sizes(
            vocab=config.read_size("vocab_size", most=MOST_TOKENS),
            hidden=hidden,
            intermediate=config.read_size("intermediate_size", most=MOST_COLUMNS),
            layers=config.read_size("num_hidden_layers", most=MOST_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=config.read_size("max_position_embeddings"),
            epsilon=config.read_positive("rms_norm_eps", default=1e-6),
        )


def read_activation(config: ConfigReader, *keys: str, default: str) -> str:
    """The name of the activation, one of ACTIVATIONS."""
    activation = config.read(str, *keys, default=default)
    if activation not in ACTIVATIONS:
        raise config.unsupported(f"{keys[0]} = {activation!r}", f"Implemented are {', '.join(ACTIVATIONS)}.")
    return activation


def read_windows(config: ConfigReader, default: list[bool], window: int | None) -> list[int]:
    """The window of each layer in tokens, 0 for a layer that sees everything.

    default: which layers have the window, where the config has no `layer_types` that says so.
    """
    kinds = {"full_attention": False, "sliding_attention": True}
    types = config.read_list(str, "layer_types")
    slides = default
    if types is not None:
        if len(types) != len(default):
            raise config.error(f"layer_types names {len(types)} layers, but num_hidden_layers is {len(default)}")
        for name in types:
            if name not in kinds:
                raise config.unsupported(f"layer_types has {name!r}", f"Implemented are {', '.join(kinds)}.")
        slides = [kinds[name] for name in types]
    if not any(slides):
        return [0] * len(default)
    if window is None or window <= 0:
        raise config.error(f"there are layers with a sliding window, but sliding_window is {window}")
    if window > MOST:
        raise config.unsupported(f"sliding_window = {window}", f"At most {MOST} is possible.")
    return [window if slide else 0 for slide in slides]


def read_optional_windows(config: ConfigReader, layers: int) -> list[int]:
    """Qwen's windows: with `use_sliding_window`, from layer `max_window_layers` on."""
    window = config.read(int, "sliding_window", default=4096)
    first = config.read(int, "max_window_layers", default=28)
    used = config.read(bool, "use_sliding_window", default=False)
    return read_windows(config, [used and layer >= first for layer in range(layers)], window if used else None)
