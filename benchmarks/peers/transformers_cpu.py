"""transformers as a worker process: python transformers_cpu.py CHECKPOINT THREADS DTYPE

Runs in an environment with torch and transformers. Eager, its default attention (SDPA) and cache. The file is not named
transformers.py because it would then import itself.
"""

import sys

import numpy as np
import torch
import transformers
from exchange import Prompts, Stepped, Tokens, private_stdout, serve

CHUNK = 512  # positions that a batch of prompts is read by


class Transformers(Stepped):
    """Prompts of one length, as a batch without padding."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model, self.cache, self.last = model, None, None

    @torch.inference_mode()
    def open(self, prompts: Prompts, room: int) -> Tokens:
        ids = torch.tensor(prompts)  # [prompts, length]
        chunk = ids.shape[1] if len(prompts) == 1 else CHUNK
        cache = None
        for piece in ids.split(chunk, dim=1):
            output = self.model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        self.cache, self.last = cache, output.logits[:, -1:].argmax(-1)
        return self.last.tolist()

    @torch.inference_mode()
    def step(self, tokens: int) -> Tokens:
        chosen = []
        for _ in range(tokens):
            output = self.model(self.last, past_key_values=self.cache, use_cache=True)
            self.last = output.logits[:, -1:].argmax(-1)
            chosen.append(self.last)
        return torch.cat(chosen, dim=1).tolist()

    def close(self) -> None:
        self.cache = self.last = None

    @torch.inference_mode()
    def logits(self, texts: Prompts, file: str) -> None:
        found = [self.model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy() for ids in texts]
        np.save(file, np.concatenate(found))


def main() -> None:
    checkpoint, threads, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    answers = private_stdout()
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    about = {"version": transformers.__version__, "torch": torch.__version__, "dtype": dtype}
    serve(answers, about, Transformers(model))


if __name__ == "__main__":
    main()
