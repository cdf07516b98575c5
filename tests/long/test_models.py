"""Graphs and folders of the families that tests/checkpoint/test_models.py leaves out."""

from tests.checkpoint import test_models as short
from tests.helpers.breadth import others, repeated
from tests.helpers.tiny import ENCODERS, FAMILIES, HYBRIDS

test_logits_are_those_of_transformers = repeated(
    short.test_logits_are_those_of_transformers,
    ("family", "overrides"),
    others(short.CASES, short.SOME_CASES),
    ids=short.case_id,
)
test_graphs_are_valid_and_say_their_shapes = repeated(
    short.test_graphs_are_valid_and_say_their_shapes, ("family", "overrides"), others(short.GRAPHS, short.SOME_GRAPHS)
)
test_a_checkpoint_in_a_folder_is_the_same_model = repeated(
    short.test_a_checkpoint_in_a_folder_is_the_same_model,
    "family",
    others([*FAMILIES, *HYBRIDS, *ENCODERS], short.IN_FOLDERS),
)
