"""Changes by llama.cpp's converter in the architectures that tests/checkpoint/test_gguf.py leaves out."""

from tests.checkpoint import test_gguf as short
from tests.helpers.breadth import repeated

test_what_the_converter_changed_is_undone = repeated(
    short.test_what_the_converter_changed_is_undone, "case", short.CASES[1::2]
)
