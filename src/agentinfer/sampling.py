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

from agentinfer.judging import Basis, replace_edited
from agentinfer.ops.edit import EditInputs, ban, mask
from agentinfer.ops.inputs import upload
from agentinfer.ops.kv import Donated
from agentinfer.ops.provide import Ops
from agentinfer.ops.sample import needs_filters, subset, words
from agentinfer.state.ids import I32, I64, SeqId
from agentinfer.state.plan import Edit, Plan
from agentinfer.state.request import Request, bad_tokens

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

    inputs: EditInputs
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
    host.
    """
    late = tuple([edit.sample for edit in plan.edits if edit.late])
    now = tuple([edit.sample for edit in plan.edits if not edit.late])
    if plan.sampling.banned:
        now = tuple(sorted({*now, *(sample for sample, _ in plan.sampling.banned)}.difference(late)))
    return now, late


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


def stage_edits(plan: Plan, which: Sequence[int], row_of: I64, device: torch.device) -> EditInputs:
    """Put the numbers of the samples *which* (ascending) of *plan* on *device*, with one copy. *row_of*: [S] the row of
    the logits of each sample of the plan.
    """
    at, s = np.array(which, np.int64), plan.sampling
    facts = np.zeros((4, len(s.index)), np.int32)
    facts[:2] = -1
    facts[:2, [edit.sample for edit in plan.edits]] = (
        [edit.bias for edit in plan.edits],
        [edit.counts for edit in plan.edits],
    )
    banned = [(sample, tokens) for sample, tokens in s.banned if sample in which]  # others' would shift them
    if banned:
        ends = np.cumsum([len(tokens) for _, tokens in banned])
        facts[2:, [sample for sample, _ in banned]] = np.append(0, ends[:-1]), ends
    places = np.stack((row_of[at], *facts[:, at], at, plan.rows[plan.sample_rows[at]]))
    tokens = np.array([token for _, tokens in banned for token in tokens], np.int32)
    columns = (words(s)[at].reshape(-1), places.reshape(-1), s.index[at], tokens)
    params, places, index, bans = upload((), columns, device)[1]
    return EditInputs(tuple(which), places.view(-1, len(at)), bans, params.view(len(at), -1), index)


def choose_edited(
    ops: Ops,
    plan: Plan,
    x: EditInputs,
    logits_PV: Donated[Tensor],
    host: Host,
    ready: Mapping[int, Ready] = MappingProxyType({}),
    basis: Basis | None = None,
) -> tuple[Tensor, list[Broken]]:
    """[2, P] int64: tokens and ok of the samples *x* of *plan*, and what raised. *logits* are those of `Ops.edit_rows`:
    what is banned here is -inf before the penalties or after them. *Donates* logits. *ready*: of the samples that
    waited for the host. Writes what *basis* has of the samples.
    """
    broken = _edit_late(plan, x, logits_PV, host, ready) if ready else []
    if basis is not None:
        replace_edited(basis, plan, x.which, logits_PV)
    if ops.sample_rows is None:
        tokens, ok = ops.sample(logits_PV, evolve(subset(plan.sampling, np.array(x.which, np.int64)), banned=()))
        return torch.stack((tokens, ok.to(tokens.dtype))), broken
    found = torch.empty((2, len(x.which)), dtype=torch.int64, device=logits_PV.device)
    ops.sample_rows(logits_PV, x.params, x.index, found[0], found[1])
    return found, broken


def _edit_late(plan: Plan, x: EditInputs, logits_PV: Tensor, host: Host, ready: Mapping[int, Ready]) -> list[Broken]:
    """Do to the logits of the samples *x*, in place, what the host found out about them; what raised."""
    place = {sample: i for i, sample in enumerate(x.which)}
    banned = [(place[i], token) for i, one in ready.items() for token in one.banned]
    if banned:
        ban(logits_PV, *zip(*banned, strict=True))
    masks = [(place[i], one.words) for i, one in ready.items() if one.words is not None]
    if masks:
        mask(logits_PV, [at for at, _ in masks], np.stack([words for _, words in masks]))
    asking = [edit for edit in plan.edits if edit.sample in ready]
    return [why for edit in asking if (why := _process(host, edit, ready, place, logits_PV))]


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
