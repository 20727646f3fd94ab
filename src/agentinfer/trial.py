"""Steps that are run at start: what they need beside the weights is measured, what they compile is compiled."""

from __future__ import annotations

import numpy as np
import torch

from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import Donated, renew
from agentinfer.state.columns import PARAMS
from agentinfer.state.ids import cdiv
from agentinfer.state.limits import Limits
from agentinfer.state.plan import SamplingColumns
from agentinfer.steps import Device, Machine, prefill_step

LARGEST = 3
"""So many of `trial_steps` are large."""


def warmed(m: Machine, placed: Donated[Device]) -> Device:
    """*placed*, after the largest steps that its blocks hold: torch has got the memory for them from the driver, which
    takes milliseconds a piece and would make the first steps slow. *Donates* placed.
    """
    for start, counts in trial_steps(m.limits)[:LARGEST]:
        if sum(cdiv(start + count, m.limits.block_size) for count in counts) <= m.limits.num_blocks:
            placed = try_step(m, placed, start, counts)
    torch.cuda.synchronize(m.ranks.device)
    return placed


def trial_steps(limits: Limits) -> list[tuple[int, list[int]]]:
    """(position that each row begins at, positions it computes) of steps that show what any may need: the largest (few
    long rows, as many rows as there can be, a chunk among decodes), and small ones of odd size.
    """
    budget, most, size = limits.max_num_batched_tokens, limits.max_num_seqs, limits.block_size
    longest = min(budget, limits.max_model_len)
    few = [longest] * min(most, budget // longest)
    many = [max(1, min(longest, budget // min(most, budget)))] * min(most, budget)
    later = size if limits.max_model_len > size else 0
    chunk = min(limits.max_model_len - later, max(1, budget - most + 1))
    mixed = [chunk, *[1] * min(most - 1, budget - chunk)]
    room = min(longest, limits.max_model_len - later)
    largest = [(0, few), (0, many), (later, mixed)]
    return [*largest, *((start, _rows(count, 3, most, room)) for count in (1, 5, 18, 40, 77) for start in (0, later))]


def _rows(count: int, rows: int, most: int, room: int) -> list[int]:
    """*count* positions, at most *room*, in *rows* rows or fewer: all but one have a single one."""
    count = min(count, room)
    rows = min(rows, most, count)
    return [count - rows + 1, *[1] * (rows - 1)]


def try_step(m: Machine, placed: Donated[Device], start: int, counts: list[int]) -> Device:
    """*placed*, after a step of rows that begin at position *start* and compute *counts* positions each, sampled with
    and without filters. Its blocks hold anything afterwards. *Donates* placed.
    """
    blocks: list[list[int]] = []
    first = 1
    for count in counts:
        blocks.append(list(range(first, first + cdiv(start + count, m.limits.block_size))))
        first += len(blocks[-1])
    x, kv = by_hand(placed.kv, [[0] * count for count in counts], [start] * len(counts), blocks)
    logits_SV, kv = prefill_step(m, kv, x)
    params = np.zeros(len(counts), PARAMS)
    for params["temperature"], params["top_p"] in ((1.0, 0.9), (1.0, 1.0)):
        m.ops.sample(logits_SV, SamplingColumns(params, np.zeros(len(counts), np.int32), ()))
    return Device(renew(kv, "a trial of the largest steps"), placed.last, placed.edits)
