"""Rows of logits that are edited: ops/edit.py `edit_rows` in one pass, a program a tile of a row; and `enter_rows`.

Shapes: S samples, P of them edited, V vocabulary, B bans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentinfer.ops.edit import EditInputs, EditTables
from agentinfer.ops.kernels.launch import Direct

TILE = 4096
"""Token ids a program."""
ENTERED = 256
"""Samples a program that enters them."""


@triton.jit(do_not_specialize=["num_samples"])
def _edit(
    logits, places, bans, bias, counts, penalties, out, num_samples,
    STRIDE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (c, p): tile c of sample p."""
    sample = tl.program_id(1)
    ids = tl.program_id(0) * BV + tl.arange(0, BV)
    there = ids < V
    source = tl.load(places + sample).to(tl.int64)
    biased = tl.load(places + num_samples + sample).to(tl.int64)
    penalised = tl.load(places + 2 * num_samples + sample).to(tl.int64)
    begin = tl.load(places + 3 * num_samples + sample)
    end = tl.load(places + 4 * num_samples + sample)
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
    for i in tl.range(begin, end):
        x = tl.where(ids == tl.load(bans + i), float("-inf"), x)
    tl.store(out + sample.to(tl.int64) * V + ids, x, mask=there)


@triton.jit(do_not_specialize=["num_samples", "width"])
def _enter(found, places, chosen, last, counts, num_samples, width, V: tl.constexpr, TILE: tl.constexpr):
    """Program i: TILE samples. *width*: of a row of *chosen*."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = i < num_samples
    token = tl.load(found + i, mask=live, other=0)
    penalised = tl.load(places + 2 * num_samples + i, mask=live, other=-1).to(tl.int64)
    sample = tl.load(places + 5 * num_samples + i, mask=live, other=0)
    row = tl.load(places + 6 * num_samples + i, mask=live, other=0)
    tl.store(chosen + sample, token, mask=live)
    tl.store(chosen + width + sample, tl.load(found + num_samples + i, mask=live, other=0), mask=live)
    tl.store(last + row, token, mask=live)
    counting = penalised >= 0
    at = counts + penalised * V + token
    tl.store(at, tl.load(at, mask=counting, other=0) + 2, mask=counting)


_run_edit, _run_enter = Direct(_edit), Direct(_enter)


def edit_rows(logits_SV: Tensor, x: EditInputs, tables: EditTables) -> Tensor:
    """ops.edit.edit_rows. *logits* are float32 with rows of any stride."""
    count, vocabulary = len(x.which), logits_SV.shape[1]
    out = torch.empty((count, vocabulary), dtype=torch.float32, device=logits_SV.device)
    if count:
        _run_edit(
            (-(-vocabulary // TILE), count, 1),
            (logits_SV, x.places, x.bans, tables.bias, tables.counts, tables.penalties, out), (count,),
            (logits_SV.stride(0), vocabulary, TILE), warps=8,
        )  # fmt: skip
    return out


def enter_rows(found_2P: Tensor, x: EditInputs, chosen: Tensor, last: Tensor, tables: EditTables) -> None:
    """ops.edit.enter_rows. All tensors are contiguous."""
    count = len(x.which)
    if count:
        _run_enter(
            (-(-count // ENTERED), 1, 1), (found_2P, x.places, chosen, last, tables.counts), (count, chosen.shape[1]),
            (tables.counts.shape[1], ENTERED), warps=4,
        )  # fmt: skip
