"""A map, thawed, is a dict; what it was made of stays as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpds import HashTrieMap

from agentinfer.state.thaw import MapDraft


@given(st.dictionaries(st.integers(0, 9), st.integers()), st.lists(st.integers(0, 9), max_size=30))
def test_a_draft_is_a_dict(before: dict[int, int], keys: list[int]) -> None:
    """Keys put in where they are not, taken out where they are, and put in again."""
    base = HashTrieMap(before)
    draft, plain = MapDraft(base), dict(before)
    for i, key in enumerate(keys):
        if key in plain:
            del draft[key], plain[key]
        else:
            draft.add(key, i)
            plain[key] = i
        assert len(draft) == len(plain)
        assert [draft.get(k) for k in range(11)] == [plain.get(k) for k in range(11)]
        assert [k in draft for k in range(11)] == [k in plain for k in range(11)]
        assert all(draft[k] == v for k, v in plain.items())
        assert sorted(draft) == sorted(plain)
    assert draft.changed == bool(keys)
    assert dict(draft.freeze().items()) == plain
    assert dict(base.items()) == before
    if not keys:
        assert draft.freeze() is base


def test_what_is_not_there_is_named() -> None:
    """Asked for, or taken out."""
    draft = MapDraft(HashTrieMap({1: 2}))
    del draft[1]
    with pytest.raises(KeyError, match="1"):
        _ = draft[1]
    with pytest.raises(KeyError, match="1"):
        del draft[1]
