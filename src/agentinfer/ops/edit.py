"""Logits before temperature: bias, bans, masks, penalties; and what a device remembers of the rows that ask for them.

The order in which these functions are called is that of agentinfer.sampling. S samples, P of them edited, V vocabulary,
N rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.ops.inputs import put
from agentinfer.ops.kv import Donated
from agentinfer.state.ids import F32, I32, I64
from agentinfer.state.plan import Told
from agentinfer.state.request import SamplingParams, bad_tokens, biased, penalised

EditRows = Callable[[Tensor, Tensor, "EditTables"], Tensor]
"""(logits_SV, places_3P int32, tables) -> [P, V] float32: see `edit_rows`."""


@frozen(eq=False)
class EditTables:
    """What is known of rows whose logits are edited. Each table has as many rows as were needed so far."""

    bias: Tensor
    """[N, V] float32, added to the logits; -inf where a token is never chosen."""
    counts: Tensor
    """[N, V] int32: twice the number of times that a token is in the output, and 1 more if it is in the prompt."""
    penalties: Tensor
    """[N, 3] float32: presence, frequency, repetition."""


def no_tables(vocab_size: int, device: torch.device) -> EditTables:
    """The tables of a device on which no row has asked for anything."""
    return EditTables(
        torch.empty((0, vocab_size), dtype=torch.float32, device=device),
        torch.empty((0, vocab_size), dtype=torch.int32, device=device),
        torch.empty((0, 3), dtype=torch.float32, device=device),
    )


def tell(tables: Donated[EditTables], told: Sequence[Told]) -> EditTables:
    """Write down what is *told* of rows. *Donates* tables."""
    for row, params, one in ((one.row, one.request.params, one) for one in told):
        if biased(params):
            tables = evolve(tables, bias=_grown(tables.bias, row))
            _write(tables.bias[row], 0.0 if params.allowed_token_ids is None else -np.inf, *bias_of(params))
        if penalised(params):
            tables = evolve(tables, counts=_grown(tables.counts, row), penalties=_grown(tables.penalties, row))
            _write(tables.counts[row], 0, *counts_of(one.tokens, len(one.request.prompt)))
            asked = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
            tables.penalties[row].copy_(put(np.array(asked, np.float32), tables.penalties.device))
    return tables


def _write(row_V: Donated[Tensor], others: float, ids: I64, values: npt.NDArray[Any]) -> Tensor:
    """Set the row's *ids*, which are distinct, to *values*, and all *others* to one number. *Donates* row."""
    return row_V.fill_(others).index_copy_(0, put(ids, row_V.device), put(values, row_V.device))


def _grown(table: Tensor, row: int) -> Tensor:
    """*table* with *row* in it; it doubles, so that growing is rare."""
    if row < len(table):
        return table
    larger = table.new_zeros((max(row + 1, 2 * len(table)), table.shape[1]))
    larger[: len(table)].copy_(table)
    return larger


def bias_of(params: SamplingParams) -> tuple[I64, F32]:
    """Token ids and what *params* add to their logits, -inf where one is never chosen. To others they add 0, or -inf if
    only some are allowed.
    """
    allowed, found = params.allowed_token_ids, dict.fromkeys(params.allowed_token_ids or (), 0.0)
    found |= {token: float(bias) for token, bias in params.logit_bias if allowed is None or token in found}
    found |= {words[0]: -np.inf for words in bad_tokens(params) if len(words) == 1}
    return np.array(list(found), np.int64), np.array(list(found.values()), np.float32)


def counts_of(tokens: Sequence[int], prompt: int) -> tuple[I64, I32]:
    """Token ids and their numbers as in EditTables.counts, of *tokens* of which the first *prompt* are the prompt."""
    ids, place = np.unique(np.array(tokens, np.int64), return_inverse=True)
    counts = 2 * np.bincount(place[prompt:], minlength=len(ids))
    counts[place[:prompt]] |= 1
    return ids, counts.astype(np.int32)


def edit_rows(logits_SV: Tensor, places_3P: Tensor, tables: EditTables) -> Tensor:
    """A copy of the rows places[0] of *logits*, edited by what *tables* say: [P, V] float32.

    First the bias of row places[1] is added, then the penalties of row places[2] are applied; -1: of none. Repetition:
    the logit of a token in prompt or output is divided by it, or multiplied if negative. Then, of tokens in the output,
    frequency times their number and presence are taken off.
    """
    source, biased, penalised = places_3P.to(torch.int64)
    logits = logits_SV.index_select(0, source).to(torch.float32)
    at = (biased >= 0).nonzero().squeeze(-1)
    if len(at):
        logits.index_copy_(0, at, logits.index_select(0, at) + tables.bias.index_select(0, biased[at]))
    at = (penalised >= 0).nonzero().squeeze(-1)
    if len(at):
        x, counts = logits.index_select(0, at), tables.counts.index_select(0, penalised[at])
        presence, frequency, repetition = tables.penalties.index_select(0, penalised[at]).unsqueeze(-1).unbind(1)
        x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        number = counts >> 1
        logits.index_copy_(0, at, x - (frequency * number + presence * (number > 0)))
    return logits


def ban(logits_PV: Donated[Tensor], places: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Set token tokens[i] of row places[i] to -inf. *Donates* logits."""
    at = put(np.array((places, tokens), np.int64), logits_PV.device)
    return logits_PV.index_put_((at[0], at[1]), logits_PV.new_full((), float("-inf")))  # new_tensor would wait


def mask(logits_PV: Donated[Tensor], places: Sequence[int], words_MW: I32) -> Tensor:
    """Set to -inf, in rows *places*, what has no bit in their *words*: token i is bit i % 32 of word i // 32. *Donates*
    logits.

    Raises ValueError for another number of words than the vocabulary needs.
    """
    device, vocabulary = logits_PV.device, logits_PV.shape[1]
    if words_MW.shape != (len(places), -(-vocabulary // 32)):
        raise ValueError(f"masks of shape {words_MW.shape} for {len(places)} samples of {vocabulary} tokens")
    ids = torch.arange(vocabulary, dtype=torch.int32, device=device)
    words = put(words_MW, device).repeat_interleave(32, 1)[:, :vocabulary]
    forbidden = ((words >> (ids & 31)) & 1) == 0
    at = put(np.array(places, np.int64), device)
    return logits_PV.index_copy_(0, at, logits_PV.index_select(0, at).masked_fill_(forbidden, float("-inf")))


def count(tables: Donated[EditTables], rows: Sequence[int], tokens_P: Tensor) -> EditTables:
    """Count the token that each of *rows*, which are distinct, has sampled. *Donates* tables."""
    at = put(np.array(rows, np.int64), tokens_P.device) * tables.counts.shape[1] + tokens_P
    tables.counts.view(-1).index_add_(0, at, tables.counts.new_full((len(at),), 2))
    return tables
