"""Persistent append-only sequences: old versions stay valid, the newest appends in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")

_COMPACT_ABOVE = 1024  # popped items before a queue is copied to let go of them


class Log(Generic[T]):
    """An immutable sequence whose `append` is amortised O(1).

    Versions share one list; each sees only its own first `len(self)` items. Appending to the newest version
    extends the shared list; appending to an older one (a fork) copies it first, so no version ever sees
    another's items.
    """

    __slots__ = ("_items", "_size")
    _items: list[T]
    _size: int

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._size = len(self._items)

    def append(self, item: T) -> Log[T]:
        """This log and one more item."""
        return self.extend((item,))

    def extend(self, more: Sequence[T]) -> Log[T]:
        """This log and *more* items."""
        items = self._items if len(self._items) == self._size else self._items[: self._size]
        items.extend(more)
        new: Log[T] = object.__new__(type(self))
        new._items, new._size = items, self._size + len(more)
        return new

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> T:
        if not 0 <= i < self._size:
            raise IndexError(i)
        return self._items[i]

    def between(self, first: int, last: int) -> list[T]:
        """Items first .. last - 1. Raises IndexError if there are not so many."""
        if not 0 <= first <= last <= self._size:
            raise IndexError(last)
        return self._items[first:last]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items[: self._size])

    def __repr__(self) -> str:
        return f"Log({list(self)!r})"


@frozen(repr=False, eq=False)
class Queue(Generic[T]):
    """A persistent first-in-first-out queue: a log, and how much of it is gone."""

    log: Log[T]
    head: int = 0

    @staticmethod
    def of(items: Iterable[T] = ()) -> Queue[T]:
        """A queue of *items*, the first one at its head."""
        return Queue(Log(items))

    def __len__(self) -> int:
        return len(self.log) - self.head

    def __iter__(self) -> Iterator[T]:
        return iter(self.log.between(self.head, len(self.log)))

    def __repr__(self) -> str:
        return f"Queue({list(self)!r})"

    def peek(self) -> T:
        """The item at the head. Raises IndexError if there is none."""
        return self.log[self.head]

    def pop(self) -> Queue[T]:
        """The queue without its head."""
        return self.pop_many(1)[1]

    def pop_many(self, n: int) -> tuple[list[T], Queue[T]]:
        """The *n* items at the head, and the queue without them. Raises IndexError if there are fewer."""
        end = self.head + n
        items = self.log.between(self.head, end)
        if end > _COMPACT_ABOVE and end * 2 > len(self.log):
            return items, Queue(Log(self.log.between(end, len(self.log))))
        return items, Queue(self.log, end)

    def push(self, item: T) -> Queue[T]:
        """The queue with *item* behind the others."""
        return Queue(self.log.append(item), self.head)

    def push_many(self, items: list[T]) -> Queue[T]:
        """The queue with *items* behind the others, in their order; if there are none: the very same."""
        return Queue(self.log.extend(items), self.head) if items else self
