"""Adapters that come, go and are replaced under load: each answer is that of an adapter which its name has meant.

And adapters of experts, and of the projections of latent attention, in the families that tests/adapters leaves out.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.runtime.server.config import ServerConfig
from tests.adapters import test_prepare, test_served
from tests.helpers.adapters import prepared, trained
from tests.helpers.breadth import others, repeated
from tests.helpers.engines import folder_of_engines
from tests.helpers.process_facts import held, resident_bytes
from tests.helpers.serving import COMPLETIONS, Running
from tests.helpers.tiny import FAMILIES, HYBRIDS, LATENT, MemoryCheckpoint, tiny_config, tiny_model

ADMIN = {"Authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAMES = ("a", "b", "c")  # names that clients use
FILES, ROUNDS, CLIENTS = 6, 200, 4
MAX_GROWTH_BYTES = 16 << 20  # bytes of memory from the middle of the rounds to their end
PROMPTS = [[(seed * 17 + place * 5) % 200 + 5 for place in range(40 + 9 * seed)] for seed in range(3)]
GONE = "gone"  # what a name means without an adapter

# Families with experts that adapters can change, and a layer of theirs that they change, too.
EXPERTS = {
    **dict.fromkeys(("gpt_oss", "minimax_m2", "ernie4_5_moe", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next"), "q_proj"),
    **dict.fromkeys(("mixtral", "glm4_moe", "qwen3_moe"), "q_proj"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear"), "o_proj"),
}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {
    family: {
        "target_modules": [own, "kv_b_proj"] if family in (*LATENT, "kimi_linear") else [own],
        "target_parameters": PARAMETERS,
    }
    for family, own in EXPERTS.items()
}

# Recurrent states of tiny models add up what the base rounds, beyond the tolerance of these tests.
SERVED = [(family, quant) for family in EXPERTS if family not in HYBRIDS for quant in ("bf16", "int8-wo")]

test_answers_are_those_of_peft = repeated(
    test_served.test_answers_are_those_of_peft,
    ("family", "quant", "lora"),
    [(family, quant, LORA[family]) for family, quant in SERVED],
    ids=[f"{family}-{quant}" for family, quant in SERVED],
)

TABLES = {"gpt2": "wte"}  # families whose embedding has another name than embed_tokens
VOCABULARY = others(
    [family for family in FAMILIES if family not in HYBRIDS], [one[0] for one in test_served.VOCABULARY]
)

test_answers_with_heads_and_embeddings = repeated(
    test_served.test_answers_with_heads_and_embeddings,
    ("family", "overrides", "quant", "lora"),
    [
        (family, {}, "bf16", {"target_modules": [TABLES.get(family, "embed_tokens"), "lm_head"]})
        for family in VOCABULARY
    ],
    ids=VOCABULARY,
)

test_a_prepared_adapter_is_the_merged_weights = repeated(
    test_prepare.test_a_prepared_adapter_is_the_merged_weights,
    ("family", "overrides", "quant", "lora"),
    [(family, {}, "int8-sq", LORA[family]) for family in EXPERTS],
    ids=[*EXPERTS],
)


class History:
    """The meanings of each name, with the time since which it has had them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meanings: dict[str, list[tuple[float, str]]] = {name: [(0.0, GONE)] for name in NAMES}

    def add(self, name: str, file: str) -> None:
        """Notes a change, before it is made and after it was made: an answer in between may be of either."""
        with self._lock:
            self._meanings[name].append((time.monotonic(), file))

    def of(self, name: str, begin: float, end: float) -> set[str]:
        """Meanings of a name between two times."""
        with self._lock:
            changes = self._meanings[name]
            before = [file for when, file in changes if when <= begin][-2:]
            return {*before, *(file for when, file in changes if begin <= when <= end)}


@pytest.fixture(params=[1, 2], ids=["one process", "two ranks"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    config, folder = tiny_config("llama"), folder_of_engines() / f"adapters-under-load-{request.param}"
    folder.mkdir()
    model, engine = tiny_model(config), folder / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), engine)
    for number in range(FILES):
        trained(model, folder / str(number), seed=number, target_modules=["q_proj", "v_proj", "down_proj"])
        shutil.copy(prepared(engine, folder / str(number)), tmp_path / f"file{number}.lora")
    settings = ServerConfig(
        served_model_names=("base",), lora_dir=str(tmp_path), enable_lora_updates=True, admin_keys=("admin",)
    )
    limits = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 4, "kv_cache_memory": 4 << 20}
    limits |= {"tensor_parallel_size": request.param, "threads": 1}
    with Running(engine, settings, limits) as running:
        yield running


def ask(server: Running, model: str, prompt: int, **options: Any) -> Any:
    """The text of an answer; GONE if there is no such model."""
    body = {"model": model, "prompt": PROMPTS[prompt], "max_tokens": 6, "temperature": 0, **options}
    answer = server.post(COMPLETIONS, body)
    if answer.status == 404:
        return GONE
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def test_no_answer_is_of_another_adapter(server: Running) -> None:
    files = [f"file{number}" for number in range(FILES)]
    right = {
        (file, prompt): ask(server, file, prompt, cache_salt=f"{file} {prompt}")  # computed, and found in no cache
        for file in files
        for prompt in range(len(PROMPTS))
    }
    assert len(set(right.values())) == len(right)
    history, wrong, ended, counts = History(), list[str](), threading.Event(), {GONE: 0, "answers": 0}

    def client(seed: int) -> None:
        choose = random.Random(seed)
        while not ended.is_set():
            name, prompt, begin = choose.choice(NAMES), choose.randrange(len(PROMPTS)), time.monotonic()
            text = ask(server, name, prompt)
            meant = history.of(name, begin, time.monotonic())
            allowed = {GONE if file == GONE else right[file, prompt] for file in meant}
            if text not in allowed:
                wrong.append(f"{name}: {text!r} is not of {sorted(meant)}")
            counts[GONE if text == GONE else "answers"] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    choose, first = random.Random(7), None
    for number in range(ROUNDS):
        name, file = choose.choice(NAMES), choose.choice([*files, GONE])
        history.add(name, file)
        if file == GONE:
            assert server.post(UNLOAD, {"lora_name": name}, ADMIN).status in (200, 404)
        else:
            body = {"lora_name": name, "lora_path": f"{file}.lora"}
            assert server.post(LOAD, body, ADMIN).status == 200
        history.add(name, file)
        time.sleep(choose.random() / 20)
        if number == ROUNDS // 2:
            first = held(os.getpid()), resident_bytes(os.getpid())
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong and min(counts.values()) > 20, (wrong[:3], counts)
    assert first is not None
    after, growth = held(os.getpid()), resident_bytes(os.getpid()) - first[1]
    assert after["files"] <= first[0]["files"] and after["threads"] <= first[0]["threads"] and growth < MAX_GROWTH_BYTES
