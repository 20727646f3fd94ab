"""The calls of torch's varlen_attn, which has no CPU kernel: against a stand-in with its parameters."""

from __future__ import annotations

import inspect

import pytest
import torch

from agentinfer.errors import InvalidSetting
from agentinfer.ops import attention, provide, torch_ops
from agentinfer.ops.attention import HeadShape
from ops.ragged import case

SIGNATURE = """(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None)"""
"""Of torch 2.13."""


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch's function by the reference: a window of (W, 0) is causal and sees W keys before the query."""
    assert (return_aux, num_splits, cu_seq_k, enable_gqa) == (None, None, None, True)
    assert window_size[1] == 0
    assert max_k >= int(seqused_k.max())
    assert max_q >= int(cu_seq_q.diff().max())
    assert all(x.dtype == torch.int32 for x in (cu_seq_q, seqused_k, block_table))
    window = None if window_size[0] == -1 else window_size[0] + 1
    lengths = attention.RowLengths(cu_seq_q.diff().tolist(), seqused_k.tolist(), [False] * len(seqused_k))
    index = attention.attention_index(block_table, lengths, key.shape[1], window, query.dtype)
    return attention.attend_index(query, key, value, index, scale)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [([1, 20, 5, 1], [1, 20, 300, 270]), ([1, 1], [9, 400])])
def test_varlen_attn_is_called_as_torch_declares_it(lengths: tuple[list[int], list[int]], window: int | None) -> None:
    """The stand-in has the parameters of torch 2.13, and a step through it has the reference's result."""
    plain = [name for name in " ".join(SIGNATURE.split()).strip("()").split(", ") if "-1" not in name]
    assert [name.partition("=")[0] for name in plain if name != "*"] == [
        name for name in inspect.signature(varlen_attn).parameters if name != "window_size"
    ]
    x = case(*lengths, HeadShape(6, 2, 64), 256)
    got, _ = x.attend(torch_ops.torch_ops(varlen_attn).attend, window)
    want, _ = x.attend(provide.attend_reference, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_torch_that_is_there_declares_it_so_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function has at least the stand-in's parameters; a torch whose function takes no block table, or that
    has none, is refused.
    """
    try:
        function = torch_ops.paged_varlen_attn()
    except InvalidSetting:
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    else:
        assert set(inspect.signature(varlen_attn).parameters) <= set(inspect.signature(function).parameters)
    monkeypatch.setattr(torch_ops, "import_module", lambda _: inspect)
    with pytest.raises(InvalidSetting, match=r"torch 2\.13"):
        torch_ops.paged_varlen_attn()
