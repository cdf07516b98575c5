"""Memory plans of the engines that tests/core/test_memory_plan.py leaves out."""

from tests.core import test_memory_plan as short
from tests.helpers.breadth import others, repeated

test_the_executor_allocates_what_the_memory_plan_says = repeated(
    short.test_the_executor_allocates_what_the_memory_plan_says,
    ("family", "kv_cache_dtype"),
    others(short.BUILT, short.SOME_BUILT),
)
