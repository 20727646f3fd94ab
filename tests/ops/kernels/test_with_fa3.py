"""Triton's ops whose attention of several queries a row is FlashAttention-3's, interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

from agentinfer.ops import attention, provide, vllm_ops
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.provide import reference
from ops.ragged import case


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bounds on queries that FlashAttention-3, played by the reference, was called with; negative: packed keys."""
    seen: list[int] = []

    def attend_fa3(q, k, v, table, ends, context, max_query, max_context, scale, window):
        seen.append(max_query)
        lengths = attention.RowLengths(ends.diff().tolist(), context.tolist(), [False] * len(context))
        return attention.attend_index(
            q, k, v, attention.attention_index(table, lengths, k.shape[1], window, q.dtype), scale
        )

    def attend_fa3_packed(q, k, v, ends, max_query, scale, window):
        seen.append(-max_query)
        context = ends.diff()
        table = (ends[:-1].unsqueeze(1) + torch.arange(int(context.max()))).to(torch.int32)
        lengths = attention.RowLengths(context.tolist(), context.tolist(), [False] * len(context))
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        return attention.attend_index(q, k, v, attention.attention_index(table, lengths, 1, window, q.dtype), scale)

    monkeypatch.setattr(vllm_ops, "attend_fa3", attend_fa3)
    monkeypatch.setattr(vllm_ops, "attend_fa3_packed", attend_fa3_packed)
    monkeypatch.setattr(vllm_ops, "load_attention", lambda: None)
    return seen


@pytest.mark.parametrize("window", [None, 9])
def test_several_queries_a_row_go_to_flash_attention(calls: list[int], window: int | None) -> None:
    """A mixed step is the reference's, by our norm, rope and KV write and one call of FlashAttention-3."""
    x = case([1, 20, 5, 1], [1, 20, 60, 70], HeadShape(6, 2, 64), 16)
    got, cache = x.attend(vllm_ops.with_fa3(reference()).attend, window)
    want, wanted = x.attend(provide.attend_reference, window)
    assert calls == [20]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.k[1:], wanted.k[1:], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("decode_from", "expected"), [(None, []), (71, []), (70, [1])])
def test_one_query_a_row_goes_there_from_a_length_on(
    calls: list[int], decode_from: int | None, expected: list[int]
) -> None:
    """Decode stays with the other ops, but where the longest context reaches the bound that was set."""
    x = case([1, 1], [9, 70], HeadShape(6, 2, 64), 16)
    got, _ = x.attend(vllm_ops.with_fa3(reference(), decode_from).attend)
    want, _ = x.attend(provide.attend_reference)
    assert calls == expected
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_whole_prompts_are_read_where_they_were_computed(calls: list[int], window: int | None) -> None:
    """Rows that all begin at their first position go there with packed keys; the cache gets them as ever."""
    x = case([20, 1, 33], [20, 1, 33], HeadShape(6, 2, 64), 16)
    got, cache = x.attend(vllm_ops.with_fa3(reference()).attend, window)
    want, wanted = x.attend(provide.attend_reference, window)
    assert calls == [-33]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, theirs in ((cache.k, wanted.k), (attention.values_of(cache), attention.values_of(wanted))):
        torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_padding_among_whole_prompts_is_not_packed(calls: list[int]) -> None:
    """A row of padding, whose key is in the sink, keeps the step to blocks."""
    x = case([20, 3], [20, 3], HeadShape(6, 2, 64), 16, padding=1)
    x.attend(vllm_ops.with_fa3(reference()).attend)
    assert calls == [20]
