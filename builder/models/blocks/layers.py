"""How many layers a decoder has, and of which kind each is."""

from enginewright.builder.config import MOST, MOST_LAYERS, ConfigReader


def read_layer_count(config: ConfigReader) -> int:
    return config.read_size("num_hidden_layers", most=MOST_LAYERS)


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


def read_upper_windows(config: ConfigReader) -> list[int]:
    """Qwen's windows: with `use_sliding_window`, from layer `max_window_layers` on."""
    window = config.read(int, "sliding_window", default=4096)
    first = config.read(int, "max_window_layers", default=28)
    used = config.read(bool, "use_sliding_window", default=False)
    slides = [used and layer >= first for layer in range(read_layer_count(config))]
    return read_windows(config, slides, window if used else None)
