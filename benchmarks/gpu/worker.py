"""The process of one part: `python -m benchmarks.gpu.worker MODULE RESULTS SETTINGS`."""

import json
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.report import Report

if __name__ == "__main__":
    module, results, settings = sys.argv[1:]
    import_module(module).run(Report(Path(results), **json.loads(settings)))
