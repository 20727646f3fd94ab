"""MapDraft: a persistent map, thawed. Many changes cost as little as those of a dict, and are one change in the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from rpds import HashTrieMap

K = TypeVar("K")
V = TypeVar("V")


class MapDraft(Generic[K, V]):
    """What *base* becomes. No value is None. Mutable on purpose; local to one call."""

    __slots__ = ("_base", "_gone", "_new", "_size")

    def __init__(self, base: HashTrieMap[K, V]) -> None:
        self._base = base
        self._new: dict[K, V] = {}
        self._gone: set[K] = set()
        self._size = len(base)

    def __len__(self) -> int:
        return self._size

    def get(self, key: K) -> V | None:
        """The value of *key*, or None."""
        value = self._new.get(key)
        return self._base.get(key) if value is None and key not in self._gone else value

    def __contains__(self, key: K) -> bool:
        return key in self._new or (key not in self._gone and key in self._base)

    def __iter__(self) -> Iterator[K]:
        """The keys, in no order that means anything. Nothing may be put in or taken out meanwhile."""
        yield from self._new
        yield from (key for key in self._base if key not in self._gone)

    def __getitem__(self, key: K) -> V:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def add(self, key: K, value: V) -> None:
        """Put in a key that is not there."""
        self._new[key] = value
        self._size += 1

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self._new.pop(key, None)
        self._gone.add(key)
        self._size -= 1

    @property
    def changed(self) -> bool:
        """Whether anything was put in or taken out."""
        return bool(self._new or self._gone)

    def freeze(self) -> HashTrieMap[K, V]:
        """The map as it is now; if nothing changed: the very same."""
        now = self._base
        for key in self._gone:
            now = now.discard(key)
        return now.update(self._new) if self._new else now
