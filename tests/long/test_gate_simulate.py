"""The gate's verdict on targets that are not at hand, in the formats that tests/gate/test_simulate.py leaves out."""

from enginewright.dtypes import KV_CACHES
from tests.gate import test_simulate as short
from tests.helpers.breadth import others, repeated

test_the_simulation_is_what_the_cpu_computes = repeated(
    short.test_the_simulation_is_what_the_cpu_computes, "quant", others(short.QUANTS, short.SOME_QUANTS)
)
test_the_simulation_has_the_kv_cache_of_gpus = repeated(
    short.test_the_simulation_has_the_kv_cache_of_gpus, "kv", others(KV_CACHES, short.SOME_KV_CACHES)
)
test_a_build_for_gpus_alone_is_measured = repeated(
    short.test_a_build_for_gpus_alone_is_measured, ("quant", "kv"), short.OF_GPUS[1:]
)
