"""Marks in a text that comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentinfer.scan import Scanned, scan, undecided


def whole(marks: list[str], text: str) -> tuple[str, str | None]:
    """What stands before the first mark, and the mark: by trying every end, and the longest mark there first."""
    for end in range(len(text) + 1):
        for mark in sorted(marks, key=len, reverse=True):
            if text[:end].endswith(mark):
                return text[: end - len(mark)], mark
    return text, None


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab.", max_size=3), max_size=10),
)
def test_any_cuts_find_what_the_whole_text_has(marks: list[str], pieces: list[str]) -> None:
    """The text before the first mark, and the mark, are the whole text's; no more is held back than may become one."""
    shown, held, mark = "", "", None
    for piece in pieces:
        found = scan(marks, held, piece)
        shown, held, mark = shown + found.before, found.rest, found.mark
        if mark is not None:
            break
        assert not held or any(m.startswith(held) and m != held for m in marks)
    before, first = whole(marks, "".join(pieces))
    assert mark == first
    assert shown + ("" if mark is not None else held) == before


def test_the_mark_that_ends_first_counts() -> None:
    """Not the one that begins first, nor the one named first; of two that end together the longest."""
    assert scan(["abcd", "c"], "", "xabcd") == Scanned("xab", "c", "d")
    assert scan(["b", "ab"], "", "xaby") == Scanned("x", "ab", "y")
    assert scan(["abc", "bc"], "ab", "c") == Scanned("", "abc", "")


def test_a_mark_that_ended_before_the_piece_is_not_looked_at() -> None:
    """What was decided before is not decided again."""
    assert scan(["ab", "bc"], "ab", "c") == Scanned("a", "bc", "")
    assert undecided(["ab"], "ab") == 2
    assert undecided(["aab"], "xaa") == 1
    assert undecided(["aab", "ab"], "xaa") == undecided(["ab", "aab"], "xaa") == 1
