"""Resources of the kernels of models that tests/cuda/test_kernel_resources.py leaves out."""

from tests.cuda import test_kernel_resources as short
from tests.helpers.breadth import repeated

test_kernels_of_tiny_models_take_no_more_than_they_should = repeated(
    short.test_kernels_of_tiny_models_take_no_more_than_they_should,
    ("family", "sizes", "sms"),
    [("llama", {}, ("sm_80", "sm_90a")), ("gemma3_text", {}, ("sm_80", "sm_90a")), ("gpt2", {}, ("sm_80",))],
)
