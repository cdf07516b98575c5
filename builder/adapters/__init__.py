"""LoRA adapters as PEFT saves them: reads them, and merges them into a checkpoint."""

from enginewright.builder.adapters.adapter import Adapter
from enginewright.builder.adapters.merge import MergedCheckpoint, merge_recipe, open_merged, with_recorded

__all__ = ["Adapter", "MergedCheckpoint", "merge_recipe", "open_merged", "with_recorded"]
