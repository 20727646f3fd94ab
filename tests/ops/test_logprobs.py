"""What logits say of tokens: log-probabilities, ranks and the likeliest, whatever ties and pieces there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.ops import logprobs
from agentinfer.ops.logprobs import judge, judged, ordered, records


def test_known_logits() -> None:
    """O6, SMP-07: raw log-probabilities, the likeliest with ties by id, the rank of a token that is not among them."""
    found = judged(judge(torch.tensor([[1.0, 3, 2, 2, -1, 0]]).repeat(6, 1), torch.arange(6), 3).numpy())
    want = [-2.662274, -0.662274, -1.662274, -1.662274, -4.662274, -3.662274]
    np.testing.assert_allclose(found.logprobs, want, atol=1e-6)
    assert found.ranks.tolist() == [4, 1, 2, 3, 6, 5]
    assert found.top_ids.tolist() == [[1, 2, 3]] * 6
    np.testing.assert_allclose(found.top_logprobs[0], [want[i] for i in (1, 2, 3)], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 4, 12])
def test_the_likeliest_are_those_of_a_stable_sort(k: int, dtype: torch.dtype) -> None:
    """Ids, values and ranks for rows full of ties, negative numbers and both zeros."""
    draw = torch.Generator().manual_seed(k)
    logits = torch.randint(-2, 3, (40, 12), generator=draw).to(dtype)
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum()), generator=draw) < 0.5, 1, -1).to(dtype)
    tokens = torch.randint(0, 12, (40,), generator=draw)
    found = judged(judge(logits, tokens, k).numpy())
    want = logits.sort(dim=-1, descending=True, stable=True)
    assert found.top_ids.tolist() == want.indices[:, :k].tolist()
    norm = logits.float().logsumexp(-1, keepdim=True)
    np.testing.assert_array_equal(found.top_logprobs, (want.values.float() - norm)[:, :k])
    assert found.ranks.tolist() == ((want.indices == tokens[:, None]).float().argmax(-1) + 1).tolist()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=30))
def test_keys_order_as_floats_do(row: list[float]) -> None:
    """Any two logits, infinite ones and both zeros included: the larger one, or of equal ones the first."""
    keys = ordered(torch.tensor([row]))[0].tolist()
    assert len(set(keys)) == len(row)
    assert sorted(range(len(row)), key=lambda i: -keys[i]) == sorted(range(len(row)), key=lambda i: (-row[i], i))


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits are ordered at once, and for no rows at all."""
    logits, tokens = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)), torch.arange(9)
    want = judge(logits, tokens, 3)
    for most in (1, 80, 120):
        monkeypatch.setattr(logprobs, "MOST_AT_ONCE", most)
        assert torch.equal(judge(logits, tokens, 3), want)
    assert judge(logits[:0], tokens[:0], 3).shape == (0, 8)


def test_a_nan_is_a_nan_of_its_row_alone() -> None:
    """The log-probabilities of the others stand."""
    logits = torch.tensor([[0.0, 0.0], [0.0, float("nan")], [float("-inf"), 1.0]])
    found = judged(judge(logits, torch.tensor([0, 0, 0]), 1).numpy())
    np.testing.assert_allclose(found.logprobs, [-np.log(2), np.nan, -np.inf], rtol=1e-6)


def test_records_have_as_many_as_each_wanted() -> None:
    """A row's own number of likeliest tokens, of the most that any wanted."""
    block = judge(torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1), torch.tensor([0, 1, 2]), 2).numpy()
    found = list(records(block, [0, 1, 2], [0, 2, 1]))
    assert [one.token_id for one in found] == [0, 1, 2]
    assert [one.rank for one in found] == [3, 1, 2]
    assert [one.top_ids for one in found] == [(), (1, 2), (1,)]
    assert found[1].top_logprobs[0] == found[1].logprob == max(found[1].top_logprobs)
