"""This project's engine as a worker process: python ours.py ENGINE LIMITS

The library's LLM. LIMITS: what differs from its defaults, a JSON object of fields of RuntimeConfig.
"""

import json
import sys

from exchange import Prompts, Tokens, private_stdout, serve

from enginewright import __version__
from enginewright.runtime.llm import LLM
from enginewright.runtime.sampling import SamplingParams


def main() -> None:
    engine, limits = sys.argv[1:3]
    answers = private_stdout()
    llm = LLM(engine, **json.loads(limits))

    def run(prompts: Prompts, tokens: int) -> Tokens:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]

    with llm:
        serve(answers, {"version": __version__, "limits": limits}, run)


if __name__ == "__main__":
    main()
