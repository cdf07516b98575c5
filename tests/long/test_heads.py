"""Heads of the kinds that tests/speculation/test_heads.py leaves out, and of all of them with every method."""

from tests.helpers.breadth import others, repeated
from tests.speculation import test_heads as short

test_engines_draft_what_heads_would = repeated(
    short.test_engines_draft_what_heads_would, "case", others(short.DRAFTING, short.SOME_DRAFTING)
)
test_no_answer_depends_on_heads = repeated(
    short.test_no_answer_depends_on_heads, "case", others(short.HEADS, short.SOME_HEADS)
)
test_heads_are_quantized_as_the_model_is = repeated(
    short.test_heads_are_quantized_as_the_model_is, ("case", "quant"), others(short.QUANTIZED, short.SOME_QUANTIZED)
)
test_no_answer_depends_on_quantized_heads = repeated(
    short.test_no_answer_depends_on_quantized_heads, ("case", "quant"), others(short.ANSWERING, short.SOME_ANSWERING)
)
