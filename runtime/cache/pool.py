"""The places of one cache group: how many sequences hold each, and what those that nobody holds still keep."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Tag:
    """What a place holds that others may find."""

    key: bytes  # of all tokens up to its end (PrefixKeys)


class Pool:
    """Blocks or slots: reference counts, a free list, and an index of what they hold by key.

    A place whose tag is published can be found, also when nobody holds it any more, until it is taken for something
    else: first those that keep nothing, then the least recently used.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._holders = [0] * num_places
        # Taken from the end, so that low places are used first and memory is committed as it is needed.
        self._blank = list(range(num_places - 1, -1, -1))
        self._kept: dict[int, None] = {}  # held by nobody, with a tag; the least recently used first
        self._tags: dict[int, Tag] = {}
        self._published: dict[bytes, int] = {}
        # Called with a key that can be found from now on (True), or cannot any more.
        self.watch: Callable[[bytes, bool], None] | None = None
        # Called with a key and its place where the place can be found from now on, and before it is taken for something
        # else: what it holds is there to be read.
        self.save: Callable[[bytes, int], None] | None = None

    @property
    def num_free(self) -> int:
        """Places that nobody holds."""
        return len(self._blank) + len(self._kept)

    def is_held(self, place: int) -> bool:
        return self._holders[place] > 0

    def is_shared(self, place: int) -> bool:
        return self._holders[place] > 1

    def take(self) -> int:
        """A place for new content, held once. What it kept is forgotten."""
        if self._blank:
            place = self._blank.pop()
        else:
            place = next(iter(self._kept))
            del self._kept[place]
            if self.save is not None and self._published.get(key := self._tags[place].key) == place:
                self.save(key, place)
            self._untag(place)
        self._holders[place] = 1
        return place

    def __contains__(self, key: bytes) -> bool:
        """Whether a place with this content can be found, held or not."""
        return key in self._published

    def place_of(self, key: bytes) -> int:
        return self._published[key]

    def hold(self, place: int) -> None:
        """One more sequence holds a place that was found or is held by another."""
        self._kept.pop(place, None)
        self._holders[place] += 1

    def drop(self, place: int) -> None:
        """One sequence less."""
        self._holders[place] -= 1
        if self._holders[place] == 0:
            if place in self._tags:
                self._kept[place] = None
            else:
                self._blank.append(place)

    def tag(self, place: int, key: bytes) -> Tag:
        """Note what a place holds now. Nobody finds it before it is published."""
        self._tags[place] = Tag(key)
        return self._tags[place]

    def publish(self, place: int, tag: Tag) -> None:
        """Let others find a place, if it has not been taken for something else since it was tagged."""
        if self._tags.get(place) is not tag:
            return
        if tag.key in self._published:  # the same tokens were computed twice; one is enough
            self.forget(place, tag)
        else:
            self._published[tag.key] = place
            if self.watch is not None:
                self.watch(tag.key, True)
            if self.save is not None:
                self.save(tag.key, place)

    def forget(self, place: int, tag: Tag) -> None:
        """A place keeps nothing that anybody may use."""
        if self._tags.get(place) is not tag:
            return
        self._untag(place)
        if place in self._kept:
            del self._kept[place]
            self._blank.append(place)

    def overwrite(self, place: int) -> None:
        """A place that is held will get other content, so it is not found any more."""
        if place in self._tags:
            self._untag(place)

    def _untag(self, place: int) -> None:
        tag = self._tags.pop(place)
        if self._published.get(tag.key) == place:
            del self._published[tag.key]
            if self.watch is not None:
                self.watch(tag.key, False)
