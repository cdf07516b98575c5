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
        adapter_from: first position with the adapter. Blocks before it are those of sequences without one.
    """

    def __init__(self, block_size: int, salt: str = "", adapter: str = "", adapter_from: int = 0) -> None:
        self._block_size = block_size
        self._root = sha256(salt.encode()).digest()
        self._adapter = bytes.fromhex(adapter)
        self._first_adapted, self._offset = divmod(adapter_from, block_size)  # block and position in it
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
            block, parent = len(self._keys), self._keys[-1] if self._keys else self._root
            if self._adapter and block == self._first_adapted:
                # No salt and no tokens, however they are chosen, lead to the keys of an adapter. The same tokens may
                # have it from another position on, if what invokes it there goes on in the next block.
                parent = digest(self._adapter, parent + self._offset.to_bytes(4, "little"), sha256)
            start = block * self._block_size
            tokens = array("I", token_ids[start : start + self._block_size])
            self._keys.append(sha256(parent + tokens.tobytes()).digest())
        return self._keys if len(self._keys) == num_blocks else self._keys[:num_blocks]
