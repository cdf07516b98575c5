"""Grammars have processes of their own: none can hold up a step or another grammar, or take memory without end."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

import enginewright
from enginewright import LLM, SamplingParams, StructuredOutputsParams
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.env import worker_environment
from enginewright.runtime.grammar.grammar_processes import FIRST, SECOND, GrammarProcesses
from enginewright.runtime.grammar.grammar_protocol import FORK, FORK_MESSAGE, Forked, WalkReply
from enginewright.runtime.grammar.grammar_protocol import LIMITS as PARSER_LIMITS
from enginewright.runtime.grammar.grammar_worker import answer
from enginewright.runtime.grammar.grammars import Grammars, GrammarWalk
from enginewright.runtime.sampling.token_mask import Mask, num_words
from tests.helpers.late_executor import LateExecutor
from tests.helpers.serving import LIMITS, tiny_engine, wait_until

FOREVER = 60.0  # seconds; nothing takes so long
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["cat", "caterpillar"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
WANTED: list[dict[str, Any]] = [
    {"json": PERSON},
    {"choice": ["the first of two texts", "the first of three"]},
    {"regex": "a{3}(b|cd)*"},
    {"grammar": 'start: "x" /[a-c]{2}/ start?'},
]


@cache
def engine() -> Engine:
    return Engine.open(tiny_engine())


def opened(capacity_bytes: int = 256 << 20) -> Grammars:
    vocab_size, ends = engine().plan.vocab_size, engine().eos_token_ids
    return Grammars(lambda: engine().file.read_section("tokenizer.json"), vocab_size, ends, capacity_bytes)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = opened()
    yield found
    found.close()


def walk(grammars: Grammars, **wanted: Any) -> GrammarWalk:
    """One that has begun."""
    structured = StructuredOutputsParams(**wanted)
    grammars.compile(structured).result(FOREVER)
    (found,) = grammars.walks(structured, 1)
    found.begin()
    return found


def mask(found: GrammarWalk, after: Sequence[int] = ()) -> Mask:
    """Waits for it."""
    bits = np.zeros(num_words(engine().plan.vocab_size), np.uint32)
    assert found.wait(FOREVER, after)
    found.allow(bits, after)
    return bits


def tokens_of(bits: Mask) -> list[int]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def processes_of(grammars: Grammars) -> GrammarProcesses:
    return grammars._processes


def pid_of(grammars: Grammars, found: GrammarWalk) -> int:
    process = processes_of(grammars)._grammars[found._key].process
    assert process is not None and process.pid is not None
    return process.pid


def own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: next(iter(wanted)))
def test_masks_are_those_of_llguidance(grammars: Grammars, wanted: dict[str, Any]) -> None:
    """Masks of the next tokens agree, and so do masks of the same tokens when they are looked at as draft tokens."""
    vocab_size, ends = engine().plan.vocab_size, list(engine().eos_token_ids)
    trie = LLTokenizer(engine().tokenizer.to_json(), vocab_size, ends)
    matcher = LLMatcher(trie, answer(wanted)["source"], log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    found, random, taken, masks = walk(grammars, **wanted), np.random.default_rng(1), [], []
    for _ in range(25):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        assert mask(found).tolist() == bits.tolist()
        masks.append(bits.tolist())
        if matcher.is_stopped():
            break
        taken.append(int(random.choice(tokens_of(bits))))
        matcher.consume_token(taken[-1])
        found.take(taken[-1])
    other = walk(grammars, **wanted)
    for begin in range(0, len(taken) - 4, 4):
        draft_tokens = taken[begin : begin + 4]
        other.look(draft_tokens)
        for place in range(1, 5):
            assert mask(other, draft_tokens[:place]).tolist() == masks[begin + place]
        other.look([draft_tokens[0], 0, 0])  # what is not allowed
        assert not mask(other, [draft_tokens[0], 0]).any()
        for token in draft_tokens:
            other.take(token)
    found.end()
    other.end()


def test_allow_never_waits(grammars: Grammars) -> None:
    """While a grammar's process is stopped, its masks are unknown, and `allow` does not wait; other grammars go on."""
    held, other = walk(grammars, regex="[ab]{30}"), walk(grammars, regex="[cd]{30}")
    (first, *_), (second, *_) = tokens_of(mask(held)), tokens_of(mask(other))
    os.kill(pid_of(grammars, held), signal.SIGSTOP)
    try:
        held.take(first)
        assert not held.wait(0)
        with pytest.raises(AssertionError, match="has not returned"):
            held.allow(np.zeros(num_words(engine().plan.vocab_size), np.uint32))
        for _ in range(10):
            other.take(second)
            assert mask(other).any() and not held.wait(0)
        assert tokens_of(mask(walk(grammars, regex="e")))
    finally:
        os.kill(pid_of(grammars, held), signal.SIGCONT)
    assert mask(held).any()


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_a_step_ends_while_a_grammar_is_held(steps_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other answers get a token in each step; the one that is held gets those that it would have got."""
    monkeypatch.setattr(core, "open_executor", LateExecutor if steps_ahead else CpuExecutor)
    running = core.EngineCore(engine(), runtime_config(**LIMITS))
    wanted = StructuredOutputsParams(regex="[ab]{20}")
    structured = SamplingParams(max_tokens=20, seed=1, temperature=1, structured_outputs=wanted)
    free = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)

    def tokens(hold: Callable[[int], None] = lambda step: None) -> list[list[int]]:
        requests = [running.request([5, 6, 7], params, lambda _: None) for params in (structured, free)]
        for request in requests:
            running.add(request)
        found: list[list[int]] = [[], []]
        step = 0
        while running.has_work:
            hold(step)
            step += 1
            for request, delta in running.step():
                found[requests.index(request)] += [token.token for token in delta.tokens]
        return found

    alone, held = tokens(), []

    def hold(step: int) -> None:
        (grammar,) = running._grammars._processes._grammars.values()
        process = grammar.process
        if step == 3 and process is not None and process.pid is not None:
            os.kill(process.pid, signal.SIGSTOP)
            held.append((process.pid, running.stats().generated_tokens))
        if step == 30:
            held.append((0, running.stats().generated_tokens))
            os.kill(held[0][0], signal.SIGCONT)

    assert tokens(hold) == alone
    assert held[1][1] - held[0][1] in range(26, 30), "a token of the free answer in each step, and few of the other"
    running.close()


def test_what_kills_a_process_takes_no_other_with_it(grammars: Grammars) -> None:
    found, other = walk(grammars, regex="[ab]{30}"), walk(grammars, regex="[ab]{31}")
    expected = []
    for _ in range(5):
        (token, *_) = tokens_of(mask(found))
        found.take(token)
        other.take(token)
        expected.append(token)
    before = mask(found)
    pids = pid_of(grammars, found), pid_of(grammars, other)
    os.kill(pids[0], signal.SIGKILL)
    (token, *_) = tokens_of(before)
    found.take(token)
    other.take(token)
    assert mask(found).tolist() == mask(other).tolist() and pid_of(grammars, other) == pids[1]
    assert pid_of(grammars, found) != pids[0], "it goes on in another process"
    os.kill(pid_of(grammars, found), signal.SIGKILL)  # once more is once too often
    found.take(token)
    assert not mask(found).any() and found.failed
    other.take(token)
    assert mask(other).any() and not other.failed


def test_the_end_of_the_process_that_forks(grammars: Grammars) -> None:
    found = walk(grammars, regex="[ab]{32}")
    (token, *_) = tokens_of(mask(found))
    server = processes_of(grammars)._fork_server
    assert server is not None
    server.kill()
    assert mask(walk(grammars, regex="[cd]{32}")).any(), "another one is started"
    found.take(token)
    assert mask(found).any(), "what it had forked goes on"


FORK_SERVER = """
import signal, threading
from enginewright.runtime.grammar import grammar_worker
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
grammar_worker.main()
"""


def test_an_end_is_reported_while_the_process_that_forks_waits_in_the_kernel() -> None:
    """The signal arrives in another thread, so that, like one just before a call of the kernel, it interrupts none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(FOREVER / 3)
    setup = {"vocab_size": engine().plan.vocab_size, "eos_token_ids": list(engine().eos_token_ids), "limits": {}}
    with ours, theirs, tempfile.TemporaryFile() as tokenizer:
        tokenizer.write(engine().file.read_section("tokenizer.json"))
        tokenizer.seek(0)
        command = [sys.executable, "-S", "-P", "-c", FORK_SERVER]
        server = subprocess.Popen(command, stdin=theirs.fileno(), env=worker_environment())
        try:
            socket.send_fds(ours, [msgspec.json.encode(setup)], [tokenizer.fileno()])
            for _ in range(2):
                engine_end, process_end = socket.socketpair()
                socket.send_fds(ours, [FORK_MESSAGE.pack(FORK, 0)], [process_end.fileno()])
                process_end.close()
                started = msgspec.json.decode(ours.recv(1 << 16), type=Forked).started
                engine_end.close()
                ended = msgspec.json.decode(ours.recv(1 << 16), type=Forked)
                assert (ended.ended, ended.status) == (started, 0) and started
            ours.close()
            assert server.wait(FOREVER) == 0
        finally:
            server.kill()
            server.wait()


def test_grammars_go_on_after_the_system_had_no_more_descriptors() -> None:
    """Those that could not start fail, and neither the thread nor later grammars."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened(64 << 20).close()
    grammars, failures = opened(64 << 20), 0
    for number in range(2):  # before the first process, and while there are some
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for length in range(1, 5):
                future = grammars.compile(StructuredOutputsParams(regex=f"[{'ab'[number]}]{{{length}}}"))
                error = future.exception(FOREVER)
                if error is not None:
                    assert "no process can be started: Too many open files" in str(error)
                    failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert mask(walk(grammars, regex=f"c{{{number + 1}}}")).any()
    assert failures == 4 + 2, "two of the second ones had a process in reserve"
    grammars.close()


HOSTILE = [
    {"regex": "((a{1000}){1000}){1000}"},
    {"json": {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(200)]}},
]


def test_limits_are_named_and_hold_up_nobody(grammars: Grammars) -> None:
    refused = [grammars.compile(StructuredOutputsParams(**wanted)) for wanted in HOSTILE]  # type: ignore[arg-type]
    assert mask(walk(grammars, regex="[gh]")).any()
    for future in refused:
        with pytest.raises(UsageError, match=r"it takes more than (1 s of CPU time|64\.0 MiB of memory)"):
            future.result(FOREVER)


def test_grammars_are_kept_within_their_memory() -> None:
    """Bytes as they are measured, which is what the kernel says, and at most a seventh or 1 MiB old."""
    capacity_bytes = 64 << 20
    grammars = opened(capacity_bytes)
    first = walk(grammars, choice=["x" * 14_000])
    for number in range(12):
        found = walk(grammars, choice=[chr(97 + number) * 14_000])
        mask(found)
        num_bytes, real_bytes = grammars.stats().num_bytes, own_bytes(pid_of(grammars, found))
        assert num_bytes <= capacity_bytes
        key = processes_of(grammars)._grammars[found._key]
        assert abs(key.num_bytes - real_bytes) < real_bytes // 7 + (1 << 20) and real_bytes > 4 << 20
        found.end()
    assert grammars.stats().num_evictions > 0
    assert tokens_of(mask(first)), "one that is in use stays"
    grammars.close()


def test_small_grammars_go_for_a_large_one() -> None:
    grammars, large = opened(64 << 20), StructuredOutputsParams(choice=["ab" * 7_000])
    for number in range(40):
        grammars.compile(StructuredOutputsParams(regex=f"[ab]{{{number + 1}}}")).result(FOREVER)
    before = grammars.stats()
    assert before.num_evictions > 0 and before.num_bytes > 48 << 20, "there is no room for the largest one"
    grammars.compile(large).result(FOREVER)
    with pytest.raises(UsageError, match="it takes more than"):
        grammars.compile(StructuredOutputsParams(**HOSTILE[0])).result(FOREVER)  # type: ignore[arg-type]
    assert grammars.stats().num_evictions > before.num_evictions
    grammars.close()


def test_a_grammar_that_nobody_waits_for_is_not_compiled(grammars: Grammars) -> None:
    wanted = [StructuredOutputsParams(regex=f"({'a' * 5000}|b){{{number}}}") for number in range(20)]
    futures = [grammars.compile(one) for one in wanted]
    assert all(future.cancel() or future.done() for future in futures)
    assert mask(walk(grammars, regex="[jk]")).any()


def test_a_closed_engine_says_so() -> None:
    grammars = opened()
    found = walk(grammars, regex="ab")
    pid = pid_of(grammars, found)
    waiting = grammars.compile(StructuredOutputsParams(**HOSTILE[0]))  # type: ignore[arg-type]
    grammars.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        waiting.result(0)
    with pytest.raises(EngineError, match="the engine is closed"):
        grammars.compile(StructuredOutputsParams(regex="cd")).result(0)
    found.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_engines_process_has_no_llguidance() -> None:
    """Only the worker imports llguidance, because some of its calls hold Python's global lock for long."""
    for path in (Path(enginewright.__file__).parent / "runtime").rglob("*.py"):
        if path.name != "grammar_worker.py":
            imports = re.findall(r"^\s*(?:from|import) .*", path.read_text(), re.MULTILINE)
            assert not any("llguidance" in line or "grammar_worker" in line for line in imports), path


def test_lanes() -> None:
    """The second has more of everything, and leaves room for the first."""
    assert FIRST.compile_s < SECOND.compile_s and FIRST.step_s < SECOND.step_s and FIRST.share < SECOND.share


def test_answers_after_a_grammar_was_evicted() -> None:
    """Between a request and its start, or between its tokens, a grammar may be compiled again."""
    with LLM(tiny_engine(), **LIMITS, grammar_memory="64m") as llm:
        params = SamplingParams(max_tokens=30, structured_outputs={"regex": "abc|abd"})  # type: ignore[arg-type]
        for number in range(3):
            texts = [f"{chr(97 + number)}{chr(97 + other)}" * 7_000 for other in range(4)]
            wanted = [SamplingParams(max_tokens=5, structured_outputs={"choice": [text]}) for text in texts]  # type: ignore[arg-type]
            outputs = llm.generate(["x"] * 5, [params, *wanted])
            assert outputs[0].outputs[0].text in ("abc", "abd")
            assert all(text.startswith(one.outputs[0].text) for text, one in zip(texts, outputs[1:], strict=True))
        assert llm.stats().grammars.num_bytes <= 64 << 20


LARGE: list[dict[str, Any]] = [{"choice": [f"{chr(97 + number)}b" * 8000]} for number in range(9)]  # 2 fit in 64 MiB
SMALL: list[dict[str, Any]] = [{"regex": f"[ab]{{{number + 5}}}c*"} for number in range(21)]
FEW_BLOCKS = {"max_model_len": 64, "kv_cache_memory": 120 << 10}


def texts(wanted: Sequence[dict[str, Any]], max_tokens: int, **limits: Any) -> tuple[list[str], Stats]:
    """Texts of requests that begin together, and the statistics of the engine."""
    running = core.EngineCore(engine(), runtime_config(**LIMITS | limits))
    requests = [
        running.request(
            [*range(20 + number % 9, 40)],
            SamplingParams(max_tokens=max_tokens, temperature=0, structured_outputs=StructuredOutputsParams(**one)),
            lambda _: None,
        )
        for number, one in enumerate(wanted)
    ]
    for request in requests:
        running.add(request)
    found = [""] * len(wanted)
    for _ in range(20_000):
        for request, delta in running.step():
            assert delta.finish_reason != "error"
            found[requests.index(request)] += delta.text
        for sequence in (completion.sequence for request in requests for completion in request.completions):
            if not sequence.is_running and not sequence.state.deferred and isinstance(sequence.grammar, GrammarWalk):
                assert not sequence.grammar._is_active or sequence.finish_reason is not None, "it waits"
        if not running.has_work:
            break
    assert not running.has_work, "some sequences wait for each other"
    stats = running.stats()
    running.close()
    return found, stats


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "limits"),
    [
        ([LARGE[0], *SMALL], 5, {"max_num_seqs": 1}),
        (LARGE, 5, {"max_num_seqs": 1}),
        ([*LARGE[:4], *SMALL[:12], *LARGE[4:]], 5, {"max_num_seqs": 4}),
        ([{"regex": f"[ab]{{90,{100 + number}}}{'cd' * 16000}"} for number in range(15)], 44, FEW_BLOCKS),
    ],
    ids=["small ones fill the memory", "one slot", "mixed", "preempted"],
)
def test_grammars_that_do_not_fit_together_take_turns(
    wanted: list[dict[str, Any]], max_tokens: int, limits: dict[str, Any]
) -> None:
    """Sequences that wait for blocks or a slot give up the memory of their grammars for those that hold them.

    A grammar is compiled in one or two lanes at first, again when its request begins, and once more when its sequence
    is admitted, if it was evicted before that, or was preempted.
    """
    expected, ample = texts(wanted, max_tokens, **limits, grammar_memory=512 << 20)
    found, stats = texts(wanted, max_tokens, **limits, grammar_memory=64 << 20)
    assert found == expected and all(found)
    assert ample.grammars.num_evictions == 0 and ample.grammars.num_compilations <= 2 * len(wanted)
    assert stats.grammars.num_evictions > 0 and stats.grammars.num_bytes <= 64 << 20
    assert stats.grammars.num_compilations <= 4 * len(wanted) + stats.num_preemptions
    assert (ample.num_preemptions > 0) == ("max_num_seqs" not in limits)


def known_as_large(grammars: Grammars) -> dict[str, Any]:
    """Compiles one of LARGE that exceeds the memory of the first lane; on a busy machine some exceed its time first."""
    for wanted in LARGE:
        grammars.compile(StructuredOutputsParams(**wanted)).result(FOREVER)
        if processes_of(grammars)._large:
            return wanted
    raise AssertionError("none has exceeded the memory")


def test_a_grammar_that_was_too_large_for_the_first_lane_begins_in_the_second() -> None:
    grammars = opened(64 << 20)
    wanted = StructuredOutputsParams(**known_as_large(grammars))
    assert grammars.stats().num_compilations >= 2
    for other in LARGE[::-1][:4]:
        grammars.compile(StructuredOutputsParams(**other)).result(FOREVER)
    before = grammars.stats()
    assert before.num_evictions > 0 and wanted.key not in processes_of(grammars)._grammars
    grammars.compile(wanted).result(FOREVER)
    assert grammars.stats().num_compilations == before.num_compilations + 1
    grammars.close()


def test_the_second_lane_gets_memory_while_the_first_is_busy() -> None:
    """Steps need more grammars of the first lane than fit; one of the second starts as soon as a few have ended."""
    grammars = opened(64 << 20)
    wanted = known_as_large(grammars)

    def needed(structure: dict[str, Any]) -> GrammarWalk:
        (found,) = grammars.walks(StructuredOutputsParams(**structure), 1)
        found.begin()
        found.wait(0)
        return found

    walks = [needed(one) for one in SMALL]
    assert all(mask(found).any() for found in walks) and grammars.stats().num_bytes > 56 << 20
    _, large = [needed({"regex": f"[cd]{{{number + 5}}}"}) for number in range(20)], needed(wanted)
    processes = processes_of(grammars)
    for found in walks[:8]:  # 23 MiB, of which it takes 16 MiB
        number = found._number
        found.end()
        wait_until(lambda number=number: number not in processes._walks)  # type: ignore[misc]
        wait_until(lambda: all(one.process is None or one.is_ready for one in list(processes._grammars.values())))
    assert large.wait(FOREVER) and not large.failed, "they leave it memory"
    grammars.close()


def test_a_grammar_whose_sequence_waits_gives_way_and_goes_on_later() -> None:
    grammars = opened(64 << 20)
    walks = [walk(grammars, **one) for one in LARGE[:2]]
    for found in walks:
        found.take(tokens_of(mask(found))[0])
    before = [mask(found).tolist() for found in walks]
    (other,) = grammars.walks(StructuredOutputsParams(**LARGE[2]), 1)
    other.begin()
    assert not other.wait(0.3), "all memory of its lane is in use"
    walks[1].rest()
    assert other.wait(FOREVER) and mask(other).any()
    (token,) = tokens_of(np.array(before[1], np.uint32))
    walks[1].look([token])  # a step needs it again
    assert not walks[1].wait(0.3, [token]), "its grammar waits"
    other.end()
    assert mask(walks[1], [token]).any()
    for found, expected in zip(walks, before, strict=True):
        found.take(tokens_of(np.array(expected, np.uint32))[0])
        assert mask(found).any()
    grammars.close()


def test_grammars_that_grow_beyond_the_memory_fail_nobody() -> None:
    """The latest of them waits until another has ended, although steps use all of them."""
    grammars = opened(64 << 20)
    walks = [walk(grammars, **one) for one in SMALL]
    for found in walks:
        found.take(tokens_of(mask(found))[0])
    assert all(mask(found).any() for found in walks)
    processes, before = processes_of(grammars), grammars.stats()
    grown = processes._grammars[walks[0]._key]
    processes._post(processes._measured, grown, 64 << 20 >> 2)
    for found in walks[1:-6]:
        found.take(tokens_of(mask(found))[0])
        assert mask(found).any()
    assert grammars.stats().num_bytes <= 64 << 20 and grammars.stats().num_evictions > before.num_evictions
    walks[-1].look([0])
    assert not walks[-1].wait(0.3, [0])
    for found in walks[:-1]:
        found.end()
    assert walks[-1].wait(FOREVER, [0]) and not any(found.failed for found in walks)
    grammars.close()


def test_a_walk_that_fails_while_it_takes_a_token_says_so(grammars: Grammars) -> None:
    """The failure has the position before the token."""
    found = walk(grammars, regex="[ab]{33}")
    (token, *_) = tokens_of(mask(found))
    found._replies.put(WalkReply(0, False, 0, True, 0, (), ()))
    found.take(token)
    assert found.wait(0) and found.failed
    found.end()


def test_walks_of_a_closed_engine_fail() -> None:
    grammars = opened()
    grammars.close()
    (found,) = grammars.walks(StructuredOutputsParams(regex="ab"), 1)
    found.begin()
    assert found.wait(0) and found.failed
