"""Tensors of checkpoints that cannot change what a model computes, with the reason.

A tensor that is neither read nor listed is refused by name (`Weights.refuse_left_over`). A family names tensors of its
own (`Weights.ignore`); parts of a model that are left out are noted for users (`Weights.leave_out`).
"""

from collections.abc import Mapping

# End of a tensor's name → the reason why it need not be read: a sentence whose subject is the tensor.
HARMLESS_TENSORS: Mapping[str, str] = {
    "rotary_emb.inv_freq": "It is a buffer of old checkpoints: frequencies are made from config.json.",
}
