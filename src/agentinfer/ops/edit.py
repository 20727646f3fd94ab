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

EditRows = Callable[[Tensor, "EditInputs", "EditTables"], Tensor]
"""(logits_SV, inputs, tables) -> [P, V] float32: see `edit_rows`."""
EnterRows = Callable[[Tensor, "EditInputs", Tensor, Tensor, "EditTables"], None]
"""(found_2P, inputs, chosen_2S, last, tables): see `enter_rows`."""


@frozen(eq=False)
class EditInputs:
    """Samples whose logits are edited, as the device sees them: all of it came with one copy. B bans."""

    which: tuple[int, ...]
    """On the host: their numbers among the samples of the plan, ascending."""
    places: Tensor
    """[7, P] int32: the row of each in the logits, in the table of biases and in that of counts (-1: in none), where
    its bans begin and where they end, its number in the plan, its row in the table of last tokens."""
    bans: Tensor
    """[B] int32 token ids that are never chosen in this step: those of the first sample here, then of the next."""
    params: Tensor
    """[P, 8] int32: the bits of state.columns.PARAMS."""
    index: Tensor
    """[P] int32 output index."""


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


def edit_rows(logits_SV: Tensor, x: EditInputs, tables: EditTables) -> Tensor:
    """A copy of the rows of *logits* that *x* names, edited by what *tables* say: [P, V] float32.

    First the bias is added, then the penalties are applied, then bans are set to -inf, which comes to the same before
    the penalties. Repetition: the logit of a token in prompt or output is divided by it, or multiplied if negative.
    Then, of tokens in the output, frequency times their number and presence are taken off.
    """
    source, biased, penalised, begin, end, _, _ = x.places.to(torch.int64)
    logits = logits_SV.index_select(0, source).to(torch.float32)
    at = (biased >= 0).nonzero().squeeze(-1)
    if len(at):
        logits.index_copy_(0, at, logits.index_select(0, at) + tables.bias.index_select(0, biased[at]))
    at = (penalised >= 0).nonzero().squeeze(-1)
    if len(at):
        y, counts = logits.index_select(0, at), tables.counts.index_select(0, penalised[at])
        presence, frequency, repetition = tables.penalties.index_select(0, penalised[at]).unsqueeze(-1).unbind(1)
        y = torch.where(counts > 0, torch.where(y > 0, y / repetition, y * repetition), y)
        number = counts >> 1
        logits.index_copy_(0, at, y - (frequency * number + presence * (number > 0)))
    if len(x.bans):
        at = torch.arange(len(logits), device=logits.device).repeat_interleave(end - begin)
        logits[at, x.bans.to(torch.int64)] = float("-inf")
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


def enter_rows(found_2P: Tensor, x: EditInputs, chosen: Tensor, last: Tensor, tables: EditTables) -> None:
    """Write what was *found* of the samples of *x* (int64: tokens, ok) where it is looked for: into *chosen* ([2, S or
    more] int64, by the numbers of the plan), into *last* ([rows + 1] int64, by rows), and into the counts of those with
    penalties. Of several samples of one row, which have none, any of the tokens may be the row's last one.
    """
    _, _, penalised, _, _, samples, rows = x.places.to(torch.int64)
    chosen.index_copy_(1, samples, found_2P)
    last.index_copy_(0, rows, found_2P[0])
    at = (penalised >= 0).nonzero().squeeze(-1)
    if len(at):
        places = penalised[at] * tables.counts.shape[1] + found_2P[0, at]
        tables.counts.view(-1).index_add_(0, places, tables.counts.new_full((len(at),), 2))
