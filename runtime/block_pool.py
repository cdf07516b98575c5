"""The blocks of one KV group: how many sequences hold each, and what those that nobody holds still keep."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Tag:
    """What a full block holds: the key of its tokens, and of all tokens before them."""

    key: bytes


class BlockPool:
    """Reference counts, a free list, and an index of full blocks by key.

    A block whose tag is published can be found, also when nobody holds it any more, until it is taken for something
    else: first those that keep nothing, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        # Taken from the end, so that low blocks are used first and memory is committed as it is needed.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, None] = {}  # held by nobody, with a tag; the least recently used first
        self._tags: dict[int, Tag] = {}
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._kept)

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def take(self) -> int:
        """A block for new content, held once. What it kept is forgotten."""
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._kept))
            del self._kept[block]
            self._untag(block)
        self._holders[block] = 1
        return block

    def __contains__(self, key: bytes) -> bool:
        """Whether a block with these tokens can be found, held or not."""
        return key in self._published

    def block_of(self, key: bytes) -> int:
        return self._published[key]

    def hold(self, block: int) -> None:
        """One more sequence holds a block that was found or is held by another."""
        self._kept.pop(block, None)
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One sequence less."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._tags:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def tag(self, block: int, key: bytes) -> Tag:
        """Note what a block holds now. Nobody finds it before it is published."""
        self._tags[block] = Tag(key)
        return self._tags[block]

    def publish(self, block: int, tag: Tag) -> None:
        """Let others find a block, if it has not been taken for something else since it was tagged."""
        if self._tags.get(block) is not tag:
            return
        if tag.key in self._published:  # the same tokens were computed twice; one is enough
            self.forget(block, tag)
        else:
            self._published[tag.key] = block

    def forget(self, block: int, tag: Tag) -> None:
        """A block keeps nothing that anybody may use."""
        if self._tags.get(block) is not tag:
            return
        self._untag(block)
        if block in self._kept:
            del self._kept[block]
            self._blank.append(block)

    def overwrite(self, block: int) -> None:
        """A block that is held will get other content, so it is not found any more."""
        if block in self._tags:
            self._untag(block)

    def _untag(self, block: int) -> None:
        tag = self._tags.pop(block)
        if self._published.get(tag.key) == block:
            del self._published[tag.key]
