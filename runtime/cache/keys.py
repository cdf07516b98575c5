"""Keys of a sequence's prefixes, by which other sequences find its blocks and snapshots in the caches."""

from array import array
from collections.abc import Sequence
from copy import copy
from hashlib import sha256
from hmac import digest


class PrefixKeys:
    """A key for each full block of one sequence: the SHA-256 of the previous block's key and the block's tokens.

    Args:
        block_size: number of tokens of a block.
        salt: sequences of different salts share nothing, so that response times do not reveal the prompts of others.
        adapter: content hash of the sequence's adapter, on which its keys and values depend; empty: it has none.
    """

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self._block_size = block_size
        # No salt, however it is chosen, gives the root of a sequence with an adapter.
        self._root = (
            digest(bytes.fromhex(adapter), salt.encode(), sha256) if adapter else sha256(salt.encode()).digest()
        )
        self._keys: list[bytes] = []

    def copy(self) -> "PrefixKeys":
        """Copies the keys for a sequence that begins with the same tokens."""
        other = copy(self)
        other._keys = list(self._keys)
        return other

    def of(self, token_ids: Sequence[int], num_blocks: int) -> Sequence[bytes]:
        """Keys of the first `num_blocks` blocks. The next call may change the returned sequence.

        A sequence's tokens are only appended to, so each block is hashed once.

        Args:
            token_ids: the sequence's tokens, at least those of these blocks.
            num_blocks: number of full blocks.
        """
        while len(self._keys) < num_blocks:
            start = len(self._keys) * self._block_size
            tokens = array("I", token_ids[start : start + self._block_size])
            self._keys.append(sha256((self._keys[-1] if self._keys else self._root) + tokens.tobytes()).digest())
        return self._keys if len(self._keys) == num_blocks else self._keys[:num_blocks]
