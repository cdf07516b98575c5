"""llama.cpp as a worker process: python llama_cpp_cpu.py FILE.gguf THREADS SETTINGS

Runs in an environment with llama-cpp-python, whose bindings to llama.cpp's C interface it drives directly: the
package's own class knows one sequence only. SETTINGS is a JSON object: flash_attn (bool), extra_buffers (bool: weights
repacked for the machine), ubatch (tokens computed at once). The file is not named llama_cpp.py because it would then
import itself.
"""

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np
from exchange import Cannot, Prompts, Stepped, Tokens, private_stdout, serve
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

BATCH = 2048  # tokens that one call of llama_decode takes


class LlamaCpp(Stepped):
    def __init__(self, path: str, threads: int, settings: dict[str, Any]) -> None:
        self.threads, self.settings = threads, settings
        params = c.llama_model_default_params()
        params.use_extra_bufts = settings["extra_buffers"]
        self.model = c.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.context, self.shape = None, (0, 0)
        self.last, self.positions = np.zeros(0, np.int32), np.zeros(0, np.int32)

    def _fit(self, sequences: int, length: int) -> None:
        """A context for these numbers of sequences and positions; the existing one is reused if it has them."""
        if self.shape == (sequences, length):
            c.llama_memory_clear(c.llama_get_memory(self.context), False)
            return
        if self.context is not None:
            c.llama_free(self.context)
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * length, sequences
        params.n_batch, params.n_ubatch = BATCH, self.settings["ubatch"]
        params.n_threads = params.n_threads_batch = self.threads
        flash = self.settings["flash_attn"]
        params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context, self.shape = c.llama_init_from_model(self.model, params), (sequences, length)
        if not self.context:
            self.context, self.shape = None, (0, 0)
            raise Cannot(f"llama.cpp makes no context for {sequences} sequences of {length} positions")

    def _decode(self, tokens: NDArray[np.int32], positions: NDArray, sequences: NDArray, wanted: NDArray) -> None:
        """One call, of at most BATCH tokens. wanted: which of them get logits."""
        count = len(tokens)
        numbers = np.arange(self.shape[0], dtype=np.int32)
        arrays = {
            "token": np.ascontiguousarray(tokens, np.int32),
            "pos": np.ascontiguousarray(positions, np.int32),
            "n_seq_id": np.ones(count, np.int32),
            "seq_id": np.ascontiguousarray(numbers.ctypes.data + sequences * numbers.itemsize, np.uint64),
            "logits": np.ascontiguousarray(wanted, np.int8),
        }
        batch = c.llama_batch()
        batch.n_tokens = count
        kinds = dict(c.llama_batch._fields_)
        for name, array in arrays.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, kinds[name]))
        code = c.llama_decode(self.context, batch)
        if code != 0:
            raise Cannot(f"llama_decode returned {code}")

    def _logits(self, index: int) -> NDArray[np.float32]:
        """Logits of a token of the last call, as a view of llama.cpp's memory."""
        return np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, index), shape=(self.vocabulary,))

    def open(self, prompts: Prompts, room: int) -> Tokens:
        count, longest = len(prompts), max(map(len, prompts))
        self._fit(count, longest + room)
        tokens = np.concatenate([np.array(ids, np.int32) for ids in prompts])
        positions = np.concatenate([np.arange(len(ids)) for ids in prompts])
        sequences = np.repeat(np.arange(count), [len(ids) for ids in prompts])
        ends = np.append(np.diff(sequences) > 0, True)
        self.last = np.zeros(count, np.int32)
        for start in range(0, len(tokens), BATCH):
            part = slice(start, start + BATCH)
            self._decode(tokens[part], positions[part], sequences[part], ends[part])
            for index in np.flatnonzero(ends[part]):
                self.last[sequences[start + index]] = self._logits(int(index)).argmax()
        self.positions = np.array([len(ids) for ids in prompts])
        return self.last[:, None].tolist()

    def step(self, tokens: int) -> Tokens:
        count = len(self.last)
        chosen = np.zeros((count, tokens), np.int32)
        for place in range(tokens):
            self._decode(self.last, self.positions, np.arange(count), np.ones(count))
            chosen[:, place] = self.last = np.array([self._logits(index).argmax() for index in range(count)])
            self.positions = self.positions + 1
        return chosen.tolist()

    def close(self) -> None:
        c.llama_memory_clear(c.llama_get_memory(self.context), False)

    def logits(self, texts: Prompts, file: str) -> None:
        longest, found = max(map(len, texts)), []
        for ids in texts:
            self._fit(1, longest)
            for start in range(0, len(ids), BATCH):
                part = np.array(ids[start : start + BATCH], np.int32)
                count = len(part)
                self._decode(part, np.arange(start, start + count), np.zeros(count, np.int64), np.ones(count))
                found += [self._logits(index).copy() for index in range(count)]
        np.save(file, np.stack(found))


def main() -> None:
    path, threads, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    answers = private_stdout()
    c.llama_backend_init()
    engine = LlamaCpp(path, threads, settings)
    system = c.llama_print_system_info().decode()
    serve(answers, {"version": llama_cpp.__version__, "settings": sys.argv[3], "system": system}, engine)


if __name__ == "__main__":
    main()
