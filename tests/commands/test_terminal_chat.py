"""`engine chat`: conversations through a pipe and on a terminal, with history, commands and Ctrl-C."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from click.testing import CliRunner, Result

from enginewright.cli import main
from enginewright.passes.quant import Bf16
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.prompts import Conversation
from tests.api.test_embeddings import engine_of
from tests.helpers.serving import tiny_engine

TINY = ("--kv-cache-memory", "16m", "--threads", "1")


def chat(lines: str, *options: str, kind: str = "") -> Result:
    """Through a pipe."""
    return CliRunner().invoke(main, ["chat", str(tiny_engine(kind)), *TINY, *options], input=lines)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(messages: list[Any], kind: str = "", names: Mapping[str, Any] = {}, **params: Any) -> str:
    """The library's answer in a conversation."""
    with LLM(tiny_engine(kind), kv_cache_memory="16m", threads=1) as llm:
        conversation = Conversation(messages, template_kwargs=names)
        (output,) = llm.generate(conversation, default_params(llm.engine, **params))
    return output.outputs[0].text


def test_answers_go_on_with_the_history() -> None:
    first = answer([user("Hello")], max_tokens=20)
    messages = [user("Hello"), {"role": "assistant", "content": first}, user("more")]
    second = answer(messages, max_tokens=20)
    cleared = answer([{"role": "system", "content": "Be brief."}, user("more")], max_tokens=20)
    assert len({first, second, cleared}) == 3
    done = chat("Hello\n\nmore\n/clear\n/system Be brief.\nmore\n/system\n/clear\n Hello\n", "--max-tokens", "20")
    assert (done.exit_code, done.stdout) == (0, f"{first}\n{second}\n{cleared}\n{first}\n")
    assert done.stderr == "[stopped at 20 tokens, the limit of --max-tokens]\n" * 4


def test_options_are_those_of_a_request() -> None:
    given = ("--system", "Be brief.", "--temperature", "0.9", "--seed", "5", "--max-tokens", "9")
    expected = answer([{"role": "system", "content": "Be brief."}, user("Hi")], temperature=0.9, seed=5, max_tokens=9)
    assert chat("Hi\n", *given).stdout == f"{expected}\n" != chat("Hi\n", *given[2:]).stdout


def test_an_engine_that_writes_no_text_is_refused() -> None:
    done = CliRunner().invoke(main, ["chat", str(engine_of("bert", "mean", Bf16()))], input="")
    assert done.exit_code == 2 and "writes no text: it is a model that gives a vector for a text" in done.stderr


def test_no_thinking() -> None:
    shown = answer([user("Hi")], "thinks", {"enable_thinking": False}, max_tokens=9)
    assert chat("Hi\n", "--no-thinking", "--max-tokens", "9", kind="thinks").stdout == f"{shown}\n"
    assert shown != answer([user("Hi")], "thinks", max_tokens=9)


def test_what_the_model_thinks_is_not_on_stdout() -> None:
    """This template begins the reasoning, and a model of noise never ends it."""
    names = '{"enable_thinking": true}'
    done = chat("Hi\n", "--chat-template-kwargs", names, "--max-tokens", "9", kind="calls tools")
    thought = answer([user("Hi")], "calls tools", {"enable_thinking": True}, max_tokens=9)
    assert done.stdout == "\n" and done.stderr.startswith(thought.strip())


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("", ("--no-thinking",), "engine: --no-thinking has no effect: the model's chat template has no variable"),
        ("/frob\n", (), "engine: there is no command /frob\n/help lists those that there are.\n"),
        ("word " * 5000, (), "engine: the prompt has "),
        ("", ("--temperature", "-1"), "engine: temperature must be between 0 and 1000"),
        ("", ("--system", "word " * 5000), "engine: the prompt has "),
    ],
)
def test_what_is_refused_is_2(lines: str, options: tuple[str, ...], message: str) -> None:
    done = chat(lines, *options)
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.startswith(message)


def test_thinking_on_and_off_is_refused() -> None:
    done = chat("", "--no-thinking", "--chat-template-kwargs", '{"enable_thinking": true}', kind="thinks")
    assert done.exit_code == 2 and "set different values of enable_thinking" in done.stderr


def test_the_oldest_turns_are_forgotten_where_the_context_is_full() -> None:
    """Each message takes a fifth of it: with the fourth it is full, and the last two take less than its half."""
    long = "abcd " * 45
    done = chat(f"{long}\n" * 5 + "/help\n", "--max-tokens", "1", "--max-model-len", "1024")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 5
    assert done.stderr.count("the context is full") == 1
    assert "[the context is full: the oldest 4 messages are dropped]\n" in done.stderr
    assert "/system TEXT  set" in done.stderr


def test_an_answer_that_fills_the_context_says_so() -> None:
    done = chat("abcd\n", "--max-model-len", "128")
    assert done.exit_code == 0 and done.stderr == "[the context is full: prompt and answer have 128 tokens]\n"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT", *command],  # a shell's background jobs, tests too, do not hear it
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, end: str, seconds: float = 20) -> str:
        """Reads the terminal up to a text, and including it."""
        seen, limit = b"", time.monotonic() + seconds
        while end.encode() not in seen:
            assert select.select([self._master], [], [], limit - time.monotonic())[0], seen
            seen += os.read(self._master, 1 << 16)
        return seen.decode(errors="replace")

    def interrupt(self) -> None:
        """Sends the signal of Ctrl-C to the group of the terminal's programs."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def terminal(*options: str) -> Iterator[Terminal]:
    opened = Terminal(sys.executable, "-m", "enginewright.cli", "chat", str(tiny_engine()), *TINY, *options)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened._master)


def leave(talk: Terminal) -> int:
    """The exit status after Ctrl-C at the prompt, whose line editor may not have begun to listen at the first one."""
    for _ in range(20):
        talk.interrupt()
        with suppress(subprocess.TimeoutExpired):
            return talk.process.wait(1)
    pytest.fail("Ctrl-C at the prompt does not leave")


def test_ctrl_c_stops_an_answer_and_leaves_at_the_prompt() -> None:
    with terminal("--max-tokens", "4000") as talk:
        assert "tiny: Ctrl-C stops an answer" in talk.until("> ")
        talk.type("Hello\n")
        talk.until("ital")
        talk.interrupt()
        assert talk.until("> ").endswith("[stopped]\r\n> ")
        talk.type("/frob\n")
        assert "engine: there is no command /frob" in talk.until("> ")
        talk.type("more\n")
        talk.until("\ufffd")
        talk.interrupt()
        talk.until("[stopped]\r\n> ")
        talk.type("abc")
        talk.until("abc")
        assert leave(talk) == 0
