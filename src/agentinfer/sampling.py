"""From the logits of a step to its tokens: which samples are edited before temperature, how, who waits for the host.

The order is fixed: raw logits, then bias (with the ids that are never chosen), bans (end tokens before min_tokens, what
would complete a bad word), masks, penalties, processors, and then what ops.sample does: temperature, top-k, top-p,
min-p, the choice. docs/design/sampling.md has the reasons. Knows plans and logits, and no engine's state.

Shapes: S samples, P of them edited, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.judging import Basis, replace_edited, wanting
from agentinfer.ops.edit import EditTables, ban, count, mask
from agentinfer.ops.inputs import put
from agentinfer.ops.kv import Donated
from agentinfer.ops.provide import Ops
from agentinfer.ops.sample import choose_on_device, needs_filters, subset
from agentinfer.state.ids import I32, I64, SeqId, ints
from agentinfer.state.plan import Edit, Plan
from agentinfer.state.request import Request, bad_tokens, biased, needs_host, penalised

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""A user's own (token_ids, logits_V) -> logits_V: prompt and output so far, and the logits of the next token, float32
on their device, which it may write. Called once a token of each request that names it."""
Mask = Callable[[SeqId, Request, tuple[int, ...]], I32 | None]
"""(sequence, request, tokens so far) -> which tokens may come next: [V / 32, rounded up] int32, token i being bit
i % 32 of word i // 32; None: any. What it gives depends on the request and the tokens alone, so that a forked,
preempted or rewound sequence goes on as it would have; the sequence's id is a hint for what it remembers."""


@frozen(eq=False)
class Host:
    """What the host does to logits once the token before is known. Chosen once, with the machine."""

    processors: Mapping[str, Processor] = MappingProxyType({})
    """By the name that requests give."""
    mask: Mask | None = None


@frozen(eq=False)
class Late:
    """Samples of a step that wait for the host."""

    which: tuple[int, ...]
    """Ascending."""
    logits_PV: Tensor | None
    """Theirs, after what the device edits; a copy that nobody else has. None: another rank chooses."""
    chosen: Tensor
    """[2, S or more] int64 of the step: tokens, ok. Theirs are still to come."""
    basis: Basis | None = None
    """What the samples of the step are judged by, where that was asked for."""


@frozen(eq=False)
class Ready:
    """What the host found out about one of the samples that waited for it."""

    tokens: tuple[int, ...]
    """Prompt and output, all of it."""
    banned: tuple[int, ...]
    words: I32 | None
    """Of its mask."""


Broken = tuple[SeqId, str]
"""A sequence for which something that its request asked for raised, and what."""


def edited(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The samples whose logits are edited, ascending: those that the device alone can edit, those that wait for the
    host. Among the former are those that are filtered and judged: what filters logits may write them.
    """
    if not plan.edits and not plan.sampling.banned and plan.logprobs is None:
        return (), ()
    s, which = plan.sampling, wanting(plan)
    late = tuple(edit.sample for edit in plan.edits if needs_host(edit.request.params))
    asked = {edit.sample for edit in plan.edits} | {sample for sample, _ in plan.sampling.banned}
    asked.update(ints(which[((s.top_p < 1) | (s.min_p > 0) | (s.top_k > 0))[which]]))
    return tuple(sorted(asked.difference(late))), late


def needs_whole(plan: Plan, vocab_size: int) -> bool:
    """Whether *plan* asks for more than greedy and plainly noisy samples, whose logits may stay cut over ranks."""
    asked = plan.edits or plan.sampling.banned or plan.logprobs is not None or plan.scored is not None
    return bool(asked) or len(needs_filters(plan.sampling, vocab_size)) > 0


def completing(words: Sequence[Sequence[int]], output: Sequence[int]) -> Iterator[int]:
    """The tokens that would complete one of *words*, each of more than one token, at the end of *output*."""
    for tokens in words:
        before = len(tokens) - 1
        if before and tuple(output[-before:]) == tuple(tokens[:-1]):
            yield tokens[-1]


def ask_host(
    host: Host, edits: Sequence[Edit], known: Callable[[SeqId], tuple[int, ...] | None], vocab_size: int
) -> tuple[dict[int, Ready], list[Broken]]:
    """What the host has to say about the samples of *edits*. *known*: the tokens of a sequence; None: it has ended."""
    ready: dict[int, Ready] = {}
    broken: list[Broken] = []
    for edit in edits:
        tokens, params = known(edit.seq), edit.request.params
        if tokens is None:
            continue
        banned = tuple(completing(bad_tokens(params), tokens[len(edit.request.prompt) :]))
        try:
            bits = None if host.mask is None else _masked(host.mask, edit, tokens, -(-vocab_size // 32))
        except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
            broken.append((edit.seq, f"{type(error).__name__}: {error}"))
        else:
            ready[edit.sample] = Ready(tokens, banned, bits)
    return ready, broken


def _masked(mask: Mask, edit: Edit, tokens: tuple[int, ...], words: int) -> I32 | None:
    bits = mask(edit.seq, edit.request, tokens)
    if bits is not None and (bits.shape != (words,) or bits.dtype != np.int32):
        raise ValueError(f"a mask of {bits.dtype} {bits.shape}, not int32 ({words},)")
    return bits


def edit_on_device(
    ops: Ops, tables: EditTables, plan: Plan, which: Sequence[int], logits_SV: Tensor, rows: I64
) -> Tensor:
    """A copy of the logits of the samples *which*, which are *rows* of *logits*: with bias and penalties. [P, V]."""
    place = {sample: i for i, sample in enumerate(which)}
    places = np.full((3, len(which)), -1, np.int32)
    places[0] = rows
    for edit in plan.edits:
        if (i := place.get(edit.sample)) is not None:
            places[1, i] = edit.row if biased(edit.request.params) else -1
            places[2, i] = edit.row if penalised(edit.request.params) else -1
    return ops.edit_rows(logits_SV, put(places, logits_SV.device), tables)


def choose_edited(
    ops: Ops,
    plan: Plan,
    which: Sequence[int],
    logits_PV: Donated[Tensor],
    host: Host,
    ready: Mapping[int, Ready] = MappingProxyType({}),
    basis: Basis | None = None,
) -> tuple[Tensor, list[Broken]]:
    """[2, P] int64: tokens and ok of the samples *which* (ascending) of *plan*, and what raised. *logits* are those of
    `edit_on_device`: what is banned here is -inf before the penalties or after them. *Donates* logits. *ready*: of the
    samples that waited for the host. Writes what *basis* has of the samples.
    """
    place = {sample: i for i, sample in enumerate(which)}
    banned = [(place[i], token) for i, tokens in plan.sampling.banned if i in place for token in tokens]
    banned += [(place[i], token) for i, one in ready.items() for token in one.banned]
    if banned:
        logits_PV = ban(logits_PV, *zip(*banned, strict=True))
    masks = [(place[i], one.words) for i, one in ready.items() if one.words is not None]
    if masks:
        logits_PV = mask(logits_PV, [at for at, _ in masks], np.stack([words for _, words in masks]))
    asking = [edit for edit in plan.edits if edit.sample in ready]
    broken = [why for edit in asking if (why := _process(host, edit, ready, place, logits_PV))]
    if basis is not None:
        replace_edited(basis, plan, which, logits_PV)
    asked = subset(plan.sampling, np.array(which, np.int64))
    if ops.sample_rows is not None:
        return choose_on_device(ops.sample_rows, logits_PV, asked), broken
    tokens, ok = ops.sample(logits_PV, evolve(asked, banned=()))
    return torch.stack((tokens, ok.to(tokens.dtype))), broken


def _process(
    host: Host, edit: Edit, ready: Mapping[int, Ready], place: Mapping[int, int], logits_PV: Tensor
) -> Broken | None:
    """Let the processors that the request of *edit* names write its logits; what went wrong, if anything did."""
    line = logits_PV[place[edit.sample]]
    for name in edit.request.params.logits_processors:
        try:
            given = host.processors[name](ready[edit.sample].tokens, line)
            line.copy_(given.view_as(line))
        except Exception as error:  # noqa: BLE001 - it is the user's own, and other requests go on
            return edit.seq, f"logits processor {name!r}: {type(error).__name__}: {error}"
    return None


def enter(chosen: Donated[Tensor], which: Sequence[int], found_2P: Tensor) -> Tensor:
    """Write what was *found* of the samples *which* into *chosen*: [2, S or more] int64, tokens and ok. *Donates*
    chosen.
    """
    return chosen.index_copy_(1, put(np.array(which, np.int64), chosen.device), found_2P)


def pass_on(last: Donated[Tensor], plan: Plan, which: Sequence[int], chosen: Tensor) -> Tensor:
    """Write what the samples *which*, of one row each, chose ([2, S or more] int64 *chosen*) into *last*, for the next
    step's inputs. *Donates* last.
    """
    rows = plan.rows[plan.sample_rows[list(which)]]
    at = put(np.stack((np.array(which, np.int64), rows.astype(np.int64))), last.device)
    return last.index_copy_(0, at[1], chosen[0].index_select(0, at[0]).to(last.dtype))


def count_chosen(tables: Donated[EditTables], plan: Plan, which: Sequence[int], chosen: Tensor) -> EditTables:
    """Count what those of the samples *which* chose whose penalties depend on it. *Donates* tables."""
    counting = [edit for edit in plan.edits if edit.sample in which and penalised(edit.request.params)]
    if not counting:
        return tables
    samples = put(np.array([edit.sample for edit in counting], np.int64), chosen.device)
    return count(tables, [edit.row for edit in counting], chosen[0].index_select(0, samples))
