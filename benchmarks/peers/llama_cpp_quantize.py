"""llama.cpp's own quantizer: python llama_cpp_quantize.py IN.gguf OUT.gguf TYPE, where TYPE is Q4_0, Q8_0, …

Runs in an environment with llama-cpp-python.
"""

import sys

from llama_cpp import llama_cpp as c


def main() -> None:
    source, target, kind = sys.argv[1:4]
    params = c.llama_model_quantize_default_params()
    params.ftype = getattr(c, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = c.llama_model_quantize(source.encode(), target.encode(), params)
    if code != 0:
        raise SystemExit(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    main()
