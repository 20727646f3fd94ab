"""Log and Queue against plain lists: every version keeps what it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.state.log import Log, Queue


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers())))
def test_every_version_of_a_log_is_its_list(appends: list[tuple[int, int]]) -> None:
    """Appending to any version, new or old, changes no version that exists."""
    versions: list[tuple[Log[int], list[int]]] = [(Log(), [])]
    for which, item in appends:
        log, items = versions[which % len(versions)]
        versions.append((log.append(item), [*items, item]))
    for log, items in versions:
        assert list(log) == items
        assert len(log) == len(items)
        assert [log[i] for i in range(len(log))] == items


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-3, 30))))
def test_every_version_of_a_queue_is_its_list(operations: list[tuple[int, int]]) -> None:
    """Push, pop and pop_many on any version agree with a list and leave the others alone."""
    versions: list[tuple[Queue[int], list[int]]] = [(Queue.of([7, 8]), [7, 8])]
    for which, what in operations:
        queue, items = versions[which % len(versions)]
        if what >= 0:
            versions.append((queue.push(what), [*items, what]))
        elif what == -1 and items:
            versions.append((queue.pop(), items[1:]))
        else:
            n = min(which % 4, len(items))
            taken, rest = queue.pop_many(n)
            assert taken == items[:n]
            versions.append((rest, items[n:]))
    for queue, items in versions:
        assert list(queue) == items
        assert len(queue) == len(items)
        assert not items or queue.peek() == items[0]


def test_an_index_outside_a_log_is_an_error() -> None:
    """A version of three items has no item 3 and no item -1, even when a newer version has."""
    old = Log([1, 2, 3])
    assert len(old.append(4)) == 4
    for i in (3, -1):
        with pytest.raises(IndexError):
            old[i]


def test_an_empty_queue_has_no_head() -> None:
    """Peeking at and popping from an empty queue raise IndexError."""
    for empty in (Queue[int].of(), Queue.of([1]).pop()):
        with pytest.raises(IndexError):
            empty.peek()
        with pytest.raises(IndexError):
            empty.pop()


def test_a_long_lived_queue_lets_go_of_what_was_popped() -> None:
    """After many more pops than it holds items, a queue has lost none and does not drag all it ever held along."""
    queue, popped = Queue[int].of(), []
    for i in range(10_000):
        queue = queue.push(i)
        if len(queue) > 10:
            popped.append(queue.peek())
            queue = queue.pop()
    assert [*popped, *queue] == list(range(10_000))
    assert len(queue.log) < 5_000
