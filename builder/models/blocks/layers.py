"""Readers of the number of layers, and of the kind of each."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from enginewright.builder.config import MAX_COUNT, MAX_LAYERS, MAX_TAPS, ConfigReader

Kind = TypeVar("Kind")


def read_layer_count(config: ConfigReader) -> int:
    """Reads the number of layers."""
    return config.read_size("num_hidden_layers", maximum=MAX_LAYERS)


def read_taps(config: ConfigReader, key: str, default: int) -> int:
    """Reads the width of a convolution in tokens, the current one included.

    Args:
        config: config of the model.
        key: key of the width.
        default: width if the config has none.
    """
    taps = config.read_size(key, default=default, maximum=MAX_TAPS)
    if taps < 2:
        raise config.error(f"{key} is {taps}: a convolution reads at least two tokens")
    return taps


def check_conv_activation(config: ConfigReader, key: str = "hidden_act") -> None:
    """Refuses a convolution with an activation other than silu, the only one that its kernel has.

    Raises:
        UnsupportedModelError: `key`, which transformers also uses for the convolution, names another one.
    """
    if (activation := config.read(str, key, default="silu")) != "silu":
        raise config.unsupported(f"{key} = {activation!r}", "Convolutions have it, too, and only silu is implemented.")


def read_kinds(
    config: ConfigReader, kinds: Mapping[str, Kind], default: Sequence[Kind], key: str = "layer_types"
) -> Sequence[Kind]:
    """Reads the kind of each layer from the list `key`.

    Args:
        config: config of the model.
        kinds: kinds by their names in the list.
        default: kind of each layer if the config has no such list.
        key: key of the list.
    """
    types = config.read_list(str, key)
    if types is None:
        return default
    if len(types) != len(default):
        raise config.error(f"{key} names {len(types)} layers, but num_hidden_layers is {len(default)}")
    for name in types:
        if name not in kinds:
            raise config.unsupported(f"{key} has {name!r}", f"Implemented are {', '.join(kinds)}.")
    return [kinds[name] for name in types]


def read_window(config: ConfigReader, default: int | None = None) -> int:
    """Reads `sliding_window` in tokens; 0 means none.

    Args:
        config: config of the model.
        default: window if the config has no such key; a null is no window.
    """
    window = config.read(int, "sliding_window", default=None if config.has("sliding_window") else default)
    if window is None:
        return 0
    if window <= 0:
        raise config.error(f"sliding_window is {window}, not above 0")
    if window > MAX_COUNT:
        raise config.unsupported(f"sliding_window = {window}", f"At most {MAX_COUNT} is possible.")
    return window


def read_windows(config: ConfigReader, default: list[bool], window: int | None) -> list[int]:
    """Reads the window of each layer in tokens; 0 means no window.

    Args:
        config: config of the model.
        default: True for each layer with the window, if the config has no `layer_types`.
        window: window in tokens; None: there is none.
    """
    slides = read_kinds(config, {"full_attention": False, "sliding_attention": True}, default)
    if not any(slides):
        return [0] * len(default)
    if window is None or window <= 0:
        raise config.error(f"there are layers with a sliding window, but sliding_window is {window}")
    if window > MAX_COUNT:
        raise config.unsupported(f"sliding_window = {window}", f"At most {MAX_COUNT} is possible.")
    return [window if slide else 0 for slide in slides]


def read_upper_windows(config: ConfigReader) -> list[int]:
    """Reads Qwen's windows: with `use_sliding_window`, from layer `max_window_layers` on."""
    window = config.read(int, "sliding_window", default=4096)
    first = config.read(int, "max_window_layers", default=28)
    used = config.read(bool, "use_sliding_window", default=False)
    slides = [used and layer >= first for layer in range(read_layer_count(config))]
    return read_windows(config, slides, window if used else None)


def read_windows_everywhere(config: ConfigReader) -> list[int]:
    """Reads windows that all layers have if `use_sliding_window` is true."""
    used = config.read(bool, "use_sliding_window", default=False)
    window = config.read(int, "sliding_window", default=4096)
    return read_windows(config, [used] * read_layer_count(config), window if used else None)


def read_sparse_layers(config: ConfigReader) -> list[bool]:
    """Reads which layers have experts: in Qwen every `decoder_sparse_step`-th, except for `mlp_only_layers`."""
    every = config.read_size("decoder_sparse_step", default=1)
    without = config.read_list(int, "mlp_only_layers") or []
    count = read_layer_count(config)
    if not all(0 <= layer < count for layer in without):
        raise config.error(f"mlp_only_layers is {without}, but there are {count} layers")
    return [layer not in without and (layer + 1) % every == 0 for layer in range(count)]
