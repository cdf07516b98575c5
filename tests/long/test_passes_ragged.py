"""Packed tokens over KV pools in the graphs and formats that tests/passes/test_ragged.py leaves out."""

from tests.helpers.breadth import others, repeated
from tests.passes import test_ragged as short

test_packed_sequences_are_as_each_by_itself = repeated(
    short.test_packed_sequences_are_as_each_by_itself,
    ("case", "quant"),
    others(short.PACKED, short.SOME_PACKED),
    ids=short.name_of,
)
test_results_are_the_same_before_and_after = repeated(
    short.test_results_are_the_same_before_and_after,
    ("name", "case", "kv_dtype"),
    others(short.PASSES, short.SOME_PASSES),
)
test_the_finished_graph_is_near_the_imported_one = repeated(
    short.test_the_finished_graph_is_near_the_imported_one,
    ("case", "quant"),
    others(short.FINISHED, short.SOME_FINISHED),
    ids=short.name_of,
)
test_pools_of_codes_are_near_those_of_bf16 = repeated(
    short.test_pools_of_codes_are_near_those_of_bf16, ("case", "kv_dtype"), others(short.CODES, short.SOME_CODES)
)
test_the_finished_graph_is_what_a_lowering_takes = repeated(
    short.test_the_finished_graph_is_what_a_lowering_takes,
    ("case", "quant", "kv_dtype"),
    others(short.LOWERED, short.SOME_LOWERED),
    ids=short.name_of,
)
