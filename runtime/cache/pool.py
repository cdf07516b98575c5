"""The places of one cache group: how many sequences hold each, and which content can still be found by its key."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from enginewright.runtime.cache.eviction import NOT_RETAINED, EvictionOrder, Retention


@dataclass(eq=False, slots=True)
class Tag:
    """The key of a place's content. A new object is made each time, so that an outdated tag is recognized."""

    key: bytes  # hash of all tokens up to the end of the content (PrefixKeys)
    retention: Retention = NOT_RETAINED  # hint for the content, the longest of those given


class Pool:
    """Blocks or slots with reference counts, a free list, and an index of their content by key.

    A place whose tag is published can be found until it is reused, even when no sequence holds it any more. Free places
    without a tag are used first, then those with one, in the order that eviction.py gives them.

    Args:
        num_places: number of places.
        clock: gives the time in seconds.
    """

    def __init__(self, num_places: int, clock: Callable[[], float] = perf_counter) -> None:
        self.num_places = num_places
        self._holders = [0] * num_places
        # Free places without a tag. They are taken from the end, so that low places are used first and the system
        # commits memory only as it is needed.
        self._blank = list(range(num_places - 1, -1, -1))
        self._kept = EvictionOrder(num_places, clock)  # free places with a tag
        self._tags: dict[int, Tag] = {}
        self._published: dict[bytes, int] = {}
        self.num_evictions = 0  # places whose content could be found until they were reused
        # Called with a key that can be found from now on (True), or no longer can (False).
        self.watch: Callable[[bytes, bool], None] | None = None
        # Called with a key and its place when the place can be found from now on, and again before it is reused. The
        # content can be read during the call.
        self.save: Callable[[bytes, int], None] | None = None

    @property
    def num_free(self) -> int:
        """Number of places that no sequence holds."""
        return len(self._blank) + len(self._kept)

    @property
    def num_retained(self) -> int:
        """Number of free places whose content a hint keeps."""
        return self._kept.num_retained

    @property
    def num_early_evictions(self) -> int:
        """Number of places whose content was evicted before the time of its hint was over."""
        return self._kept.num_early

    def is_held(self, place: int) -> bool:
        """True if at least one sequence holds a place."""
        return self._holders[place] > 0

    def is_shared(self, place: int) -> bool:
        """True if more than one sequence holds a place."""
        return self._holders[place] > 1

    def take(self) -> int:
        """Takes a free place for new content, with one holder. Its old content can no longer be found."""
        if self._blank:
            place = self._blank.pop()
        else:
            place = self._kept.pop()
            if self._published.get(key := self._tags[place].key) == place:
                self.num_evictions += 1
                if self.save is not None:
                    self.save(key, place)
            self._untag(place)
        self._holders[place] = 1
        return place

    def __contains__(self, key: bytes) -> bool:
        """True if content with this key can be found, held or not."""
        return key in self._published

    def place_of(self, key: bytes) -> int:
        """The place of content that can be found."""
        return self._published[key]

    def hold(self, place: int) -> None:
        """Adds a holder to a place that was found, or that another sequence holds."""
        if place in self._kept:
            self._tags[place].retention = self._kept.remove(place)
        self._holders[place] += 1

    def drop(self, place: int, retention: Retention = NOT_RETAINED) -> None:
        """Removes a holder. Without any, the place is free, and its content can be found until it is reused.

        Args:
            place: the place.
            retention: the holder's hint.
        """
        tag = self._tags.get(place)
        if tag is not None and retention.ttl_s >= tag.retention.ttl_s:
            tag.retention = retention
        self._holders[place] -= 1
        if self._holders[place] == 0:
            if tag is not None:
                self._kept.add(place, tag.retention)
            else:
                self._blank.append(place)

    def tag(self, place: int, key: bytes) -> Tag:
        """Sets the key of a place's content. It can be found only once the tag is published."""
        self._tags[place] = Tag(key)
        return self._tags[place]

    def publish(self, place: int, tag: Tag) -> None:
        """Lets others find a place, unless it was reused or got another tag in the meantime."""
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
        """Removes a tag from its place, whose content can then no longer be found."""
        if self._tags.get(place) is not tag:
            return
        self._untag(place)
        if place in self._kept:
            self._kept.remove(place)
            self._blank.append(place)

    def overwrite(self, place: int) -> None:
        """Removes the tag of a held place, which is about to get other content."""
        if place in self._tags:
            self._untag(place)

    def _untag(self, place: int) -> None:
        tag = self._tags.pop(place)
        if self._published.get(tag.key) == place:
            del self._published[tag.key]
            if self.watch is not None:
                self.watch(tag.key, False)
