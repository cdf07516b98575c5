"""Lowers a graph to a plan, and packs weights as the kernels read them."""

from enginewright.builder.lower.lower import Lowered, Weight, lower
from enginewright.builder.lower.pack import PackedForm, pack, pack_rows, unpack_rows

__all__ = ["Lowered", "PackedForm", "Weight", "lower", "pack", "pack_rows", "unpack_rows"]
