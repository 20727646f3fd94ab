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
    """*placed*, after the steps of every size that its blocks hold. Of the largest, torch has got the memory from the
    driver, which takes milliseconds a piece; the others compiled what is compiled by size, which takes seconds. The
    first requests wait for neither. *Donates* placed.
    """
    for start, counts in [*trial_steps(m.limits)[:LARGEST], *sized_steps(m.limits)]:
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


def sized_steps(limits: Limits) -> list[tuple[int, list[int]]]:
    """As `trial_steps`: steps of 2, 4, 8, .. positions, half of them rows in decode (as many as there can be) and the
    others one chunk. A kernel that goes by size has seen all of its sizes then, if each holds for twice the last.
    """
    later = limits.block_size if limits.max_model_len > limits.block_size else 0
    found: list[tuple[int, list[int]]] = []
    for power in range(1, limits.max_num_batched_tokens.bit_length()):
        singles = min(2 ** (power - 1), limits.max_num_seqs - 1)
        chunk = min(2**power - singles, limits.max_model_len - later)
        found.append((later, [chunk, *[1] * singles]))
    return found


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
