"""A real model against transformers in the formats that tests/build/test_smollm2.py leaves out."""

from tests import tolerances
from tests.build import test_smollm2 as short
from tests.helpers.breadth import others, repeated

TEXTS = 5
bf16_logits, reference = short.bf16_logits, short.reference
model, reader, tokenizer = short.model, short.reader, short.tokenizer

test_quantized_engines_stay_close_to_fp32 = repeated(
    short.test_quantized_engines_stay_close_to_fp32, "quant", others(tolerances.SMOLLM2_KL, short.SOME_QUANTS)
)
test_a_kv_cache_of_codes_stays_close_to_fp32 = repeated(
    short.test_a_kv_cache_of_codes_stays_close_to_fp32,
    "kv_cache_dtype",
    others(tolerances.SMOLLM2_KV_KL, short.SOME_KV),
)
