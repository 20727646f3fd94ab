"""Bias and penalties on rows of logits: ops/edit.py `edit_rows` in one pass, a program a tile of a row.

Shapes: S samples, P of them edited, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops.edit import EditTables
from agentinfer.ops.kernels.launch import Direct

TILE = 4096
"""Token ids a program."""


@triton.jit(do_not_specialize=["num_samples"])
def _edit(
    logits, places, bias, counts, penalties, out, num_samples,
    STRIDE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (c, p): tile c of sample p."""
    sample = tl.program_id(1)
    ids = tl.program_id(0) * BV + tl.arange(0, BV)
    there = ids < V
    source = tl.load(places + sample).to(tl.int64)
    biased = tl.load(places + num_samples + sample).to(tl.int64)
    penalised = tl.load(places + 2 * num_samples + sample).to(tl.int64)
    x = tl.load(logits + source * STRIDE + ids, mask=there, other=0.0)
    if biased >= 0:
        x += tl.load(bias + biased * V + ids, mask=there, other=0.0)
    if penalised >= 0:
        count = tl.load(counts + penalised * V + ids, mask=there, other=0)
        presence = tl.load(penalties + penalised * 3)
        frequency = tl.load(penalties + penalised * 3 + 1)
        repetition = tl.load(penalties + penalised * 3 + 2)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(count > 0, repeated, x)
        number = (count >> 1).to(tl.float32)
        x -= frequency * number + tl.where(number > 0.0, presence, 0.0)
    tl.store(out + sample.to(tl.int64) * V + ids, x, mask=there)


_run = Direct(_edit)


def edit_rows(logits_SV: Tensor, places_3P: Tensor, tables: EditTables) -> Tensor:
    """ops.edit.edit_rows. *logits* are float32 with rows of any stride, *places* int32."""
    count, vocabulary = places_3P.shape[1], logits_SV.shape[1]
    out = torch.empty((count, vocabulary), dtype=torch.float32, device=logits_SV.device)
    if count:
        _run(
            (-(-vocabulary // TILE), count, 1),
            (logits_SV, places_3P, tables.bias, tables.counts, tables.penalties, out), (count,),
            (logits_SV.stride(0), vocabulary, TILE), warps=8,
        )  # fmt: skip
    return out
