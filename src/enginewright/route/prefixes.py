"""Recognizes prompts that begin like earlier ones, without a tokenizer.

A prompt is the text of the keys of a body that make it, in the order in which templates show them. It is cut into
chunks, and each has a key that is chained to those before it, as the keys of blocks in a replica's KV cache are. The
next turn of a conversation repeats the earlier ones, so its first keys are those of the turn before.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import msgspec
from starlette.types import Scope

from enginewright.runtime.server.wire import header

CHUNK_BYTES = 128  # about 32 tokens
MAX_KEYS = 4096  # keys of one prompt; text after them does not count
MAX_REMEMBERED = 1 << 16  # keys that are remembered of one replica: 8 MiB of text
NO_RAW = msgspec.Raw()
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # errors of JSON that cannot be read


class RoutedBody(msgspec.Struct):
    """The keys of a body that decide where it goes, as JSON."""

    model: msgspec.Raw = NO_RAW  # name of the model
    cache_salt: msgspec.Raw = NO_RAW  # salt of the prefix cache
    session_id: msgspec.Raw = NO_RAW  # name of the session
    tools: msgspec.Raw = NO_RAW  # tools of all APIs
    system: msgspec.Raw = NO_RAW  # system prompt of Anthropic's API
    instructions: msgspec.Raw = NO_RAW  # system prompt of the Responses API
    messages: msgspec.Raw = NO_RAW  # messages of chats
    input: msgspec.Raw = NO_RAW  # items or text of the Responses API
    prompt: msgspec.Raw = NO_RAW  # text of completions
    previous_response_id: msgspec.Raw = NO_RAW  # id of a response that one replica keeps

    @property
    def kept_id(self) -> str | None:
        """The id of the response that is continued; None if there is none."""
        return _text(self.previous_response_id)

    @property
    def session(self) -> str | None:
        """The name of the session; None if there is none."""
        return _text(self.session_id)

    def keys(self, tenant: bytes) -> list[bytes]:
        """Chained keys of the prompt's chunks; the last chunk counts only if it is full.

        Args:
            tenant: the hash of the client's credentials, so that tenants share nothing.
        """
        fixed = (self.model, self.cache_salt, self.tools, self.system, self.instructions)
        growing = bytes(self.messages) or bytes(self.input) or bytes(self.prompt)
        text = b"\0".join((*map(bytes, fixed), growing[:-1]))  # a list or a text that grows changes only its end
        key, keys = tenant, []
        for start in range(0, min(len(text) - CHUNK_BYTES + 1, MAX_KEYS * CHUNK_BYTES), CHUNK_BYTES):
            key = sha256(key + text[start : start + CHUNK_BYTES]).digest()
            keys.append(key)
        return keys


def _text(value: msgspec.Raw) -> str | None:
    """A text of a body; None if it is missing, null, or a value that the replica refuses."""
    try:
        return msgspec.json.decode(value, type=str) if bytes(value) else None
    except UNREADABLE:
        return None


def tenant_of(scope: Scope) -> bytes:
    """The hash of the credentials of a request's client."""
    credentials = (*header(scope, b"authorization"), *header(scope, b"x-api-key"))
    return sha256(b"\0".join(credentials)).digest()


def read_body(data: bytes) -> RoutedBody:
    """Reads a body; one that is no JSON object has no keys, and the replica refuses it."""
    try:
        return msgspec.json.decode(data, type=RoutedBody)
    except UNREADABLE:
        return RoutedBody()


class PrefixMemory:
    """The most recently used prefixes of a replica.

    Args:
        max_keys: the maximum number of keys.
    """

    def __init__(self, max_keys: int = MAX_REMEMBERED) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are remembered.

        With a key, those before it are remembered, too, so a search by halves finds the first that is not.
        """
        if not keys or keys[0] not in self._keys:  # as in most replicas of a large fleet
            return 0
        return bisect_left(range(len(keys)), True, key=lambda place: keys[place] not in self._keys)

    def remember(self, keys: Sequence[bytes]) -> None:
        """Remembers a prompt. The end of a prompt is forgotten before its start, without which it is of no use."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
