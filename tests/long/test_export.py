"""ONNX files of the families that tests/build/test_export.py leaves out."""

from tests.build import test_export as short
from tests.helpers.breadth import others, repeated
from tests.helpers.tiny import FAMILIES, OF_EACH_BLOCK

test_an_exported_file_runs = repeated(short.test_an_exported_file_runs, "family", others(FAMILIES, OF_EACH_BLOCK))
