"""Tensors of checkpoints that cannot change what a model computes, with the reason.

A tensor that is neither read nor listed is refused by name (`Weights.refuse_left_over`). What only some families have,
each of them names itself (`Weights.ignore`); parts that are left out are noted for people (`Weights.leave_out`).
"""

from collections.abc import Mapping

# End of a tensor's name → why it may be there without being read: a sentence, of which the tensor is the subject.
HARMLESS_TENSORS: Mapping[str, str] = {
    "rotary_emb.inv_freq": "It is a buffer of old checkpoints: frequencies are made from config.json.",
}
