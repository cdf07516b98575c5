"""A model's chat template, rendered in a process that can be stopped (template_worker.py)."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from weakref import finalize

from enginewright.errors import EngineError, UsageError, shorten
from enginewright.runtime.env import worker_environment
from enginewright.runtime.template_protocol import MAX_CPU_SECONDS, MAX_SECONDS, read_frames, to_frame
from enginewright.runtime.tokenizer import SPECIAL_TOKENS, TEMPLATE_NAMES

MAX_TEMPLATE_CHARS = 1 << 20
# What template_kwargs may not set: it comes from the request or the engine, or the template relies on it.
RESERVED_NAMES = frozenset((*SPECIAL_TOKENS, *TEMPLATE_NAMES, "raise_exception", "strftime_now"))
_ENDED_BY: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {MAX_CPU_SECONDS:g} s of CPU time",
    signal.SIGALRM: f"it takes more than {MAX_SECONDS:g} s",
}


class ChatTemplate:
    """A compiled template in a process of its own, which is started again where the template had to be stopped.

    May be used from any thread; one conversation is rendered at a time.

    Args:
        source: Jinja.
        now: the time that the template may print.

    Raises:
        EngineError: the template is too long, or no Jinja.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(
                "the chat template is too long", f"{len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        self._source, self._now = source, now
        self._lock = threading.Lock()
        self._process = self._start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            names: the special tokens, by the names that templates know.
            template_kwargs: further variables, such as Qwen3's enable_thinking.

        Raises:
            UsageError: the template refuses the messages, they hold what JSON does not, or a name is reserved.
            EngineError: the template fails, or takes too long or too much memory.
        """
        given = {} if template_kwargs is None else template_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise UsageError(f"chat_template_kwargs is {shorten(given)}", "it must have values by name")
        if reserved := sorted(RESERVED_NAMES & set(given)):
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(reserved)}", "the name is reserved")
        variables = {
            **given,
            **names,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            frame = to_frame({"variables": variables, "now": self._now().isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError("a message or a template argument holds what JSON does not", str(error)) from error
        with self._lock:
            if self._process.poll() is not None:
                self._process = self._start()
            reply = _ask(self._process, frame)
        match reply:
            case {"text": text}:
                return str(text)
            case {"refused": why}:
                raise UsageError("the model's chat template refuses these messages", why)
            case {"too_long": why}:
                raise EngineError("the chat template does not come to an end", why)
        raise EngineError("the chat template failed", reply["failed"])

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and give it the template."""
        process = subprocess.Popen(
            # Without site, which may take longer than all the rest; worker_environment has the path.
            [sys.executable, "-S", "-P", "-m", "enginewright.runtime.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            process_group=0,  # Ctrl-C in a terminal is for its parent
        )
        finalize(self, _end, process)
        reply = _ask(process, to_frame(self._source))
        if reply:
            raise EngineError("the chat template cannot be read", *reply.values())
        return process


def _ask(process: subprocess.Popen[bytes], frame: bytes) -> dict[str, str]:
    """The reply to a frame, or why the process has ended instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(frame)
        process.stdin.flush()
        reply: dict[str, str] | None = next(read_frames(process.stdout), None)
    except BrokenPipeError:
        reply = None
    if reply is not None:
        return reply
    _end(process)
    status = process.returncode
    return {"too_long": _ENDED_BY.get(-status) or f"its process has ended with status {status}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it has not ended, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # what it did not read is of no use any more
            continue
