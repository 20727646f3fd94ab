"""The calls of FlashAttention 2.8: against a stand-in that has its parameters in another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.ops import attention, provide
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.flash_attn_ops import flash_attn_ops
from ops.ragged import case


def attend(q, k, v, table, ends, context, scale, sides) -> Tensor:
    """By the reference. FlashAttention's window counts the keys to the left, the query itself not included."""
    assert k.shape[1] % 256 == 0
    assert all(x.dtype == torch.int32 for x in (table, ends, context))
    window = None if sides == (-1, -1) else sides[0] + 1
    lengths = attention.RowLengths(ends.diff().tolist(), context.tolist(), [False] * len(context))
    index = attention.attention_index(table, lengths, k.shape[1], window, q.dtype)
    return attention.attend_index(q, k, v, index, scale)


class Reordered:
    """flash_attn 2.8's two functions: all of their parameters, in the reverse order."""

    __slots__ = ()

    @staticmethod
    def flash_attn_varlen_func(
        block_table=None, return_attn_probs=False, deterministic=False, alibi_slopes=None, softcap=0.0,
        window_size=(-1, -1), causal=False, softmax_scale=None, dropout_p=0.0, max_seqlen_k=None, max_seqlen_q=None,
        cu_seqlens_k=None, cu_seqlens_q=None, v=None, k=None, q=None,
    ) -> Tensor:  # fmt: skip
        assert (causal, return_attn_probs, deterministic, alibi_slopes) == (True, False, False, None)
        assert (softcap, dropout_p) == (0.0, 0.0)
        context = cu_seqlens_k.diff().to(torch.int32)
        assert cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_k[0] == 0
        assert max_seqlen_k >= int(context.max())
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        return attend(q, k, v, block_table, cu_seqlens_q, context, softmax_scale, window_size)

    @staticmethod
    def flash_attn_with_kvcache(
        return_softmax_lse=False, num_splits=0, alibi_slopes=None, rotary_interleaved=True, softcap=0.0,
        window_size=(-1, -1), causal=False, softmax_scale=None, block_table=None, cache_leftpad=None,
        cache_batch_idx=None, cache_seqlens=None, rotary_sin=None, rotary_cos=None, v=None, k=None, v_cache=None,
        k_cache=None, q=None,
    ) -> Tensor:  # fmt: skip
        unused = (alibi_slopes, cache_leftpad, cache_batch_idx, rotary_sin, rotary_cos, v, k)
        assert all(x is None for x in unused)
        assert (causal, return_softmax_lse, rotary_interleaved, softcap, num_splits) == (True, False, True, 0.0, 0)
        ends = torch.arange(len(q) + 1, dtype=torch.int32)
        out = attend(q[:, 0], k_cache, v_cache, block_table, ends, cache_seqlens, softmax_scale, window_size)
        return out.unsqueeze(1)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [([1, 20, 5, 1], [1, 20, 300, 270]), ([1, 1], [9, 400])])
def test_every_argument_goes_by_its_name(lengths: tuple[list[int], list[int]], window: int | None) -> None:
    """With its parameters in another order FlashAttention is called right, for mixed steps and for decode, over blocks
    of 256.
    """
    x = case(*lengths, HeadShape(6, 2, 64), 256)
    got, _ = x.attend(flash_attn_ops(Reordered()).attend, window)
    want, _ = x.attend(provide.attend_reference, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
