"""One step on the device: launch a plan, land its tokens. Sees plans, never the engine's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from agentinfer.judging import RAW, Basis, basis_of, judge_samples, judge_scored, of_samples, of_scored
from agentinfer.models.model import Model
from agentinfer.ops.comm import Happens, RankLost, Ranks
from agentinfer.ops.edit import EditInputs, EditTables, tell
from agentinfer.ops.inputs import Inputs, remember, stage
from agentinfer.ops.kv import Donated, KvCache, renew
from agentinfer.ops.parts import choose_parts
from agentinfer.ops.provide import Ops
from agentinfer.ops.sample import idle
from agentinfer.sampling import (
    Broken,
    Host,
    Late,
    ask_host,
    choose_edited,
    edited,
    needs_whole,
    stage_edits,
)
from agentinfer.state.event import Failed
from agentinfer.state.ids import I64, SeqId, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Plan, Sampled, sampled
from agentinfer.state.policy import Policy


@frozen(eq=False)
class Device:
    """What the device remembers between steps."""

    kv: KvCache
    last: Tensor
    """[rows + 1] int64: the last token that each row sampled."""
    edits: EditTables
    """What it was told of rows whose logits are edited."""


@frozen(eq=False)
class Flight:
    """A step that has been launched and has not landed: its tokens are on the device."""

    plan: Plan
    tokens_S: Tensor
    """[S] int64, on the host; meaningless until `done`."""
    ok_S: Tensor
    """[S] int64, as tokens_S: 0 where the logits were not finite."""
    done: Happens | None
    """Happens when the tokens are there; None: they are."""
    late: Late | None = None
    """Samples that wait for the host: their tokens, and with them all others, come once `finish` has chosen them."""
    said: Tensor | None = None
    """`judge_samples` of the plan, as tokens_S."""
    scored: Tensor | None = None
    """`judge_scored` of the plan, as tokens_S; on the device while samples are late."""


Replay = Callable[[Donated[Device], Plan], tuple[Flight, Device] | None]
"""(device, plan) -> what launch gives, or None if there is no graph for this plan. *Donates* device unless None."""


@frozen(eq=False)
class Machine:
    """What does the work, chosen once. Nothing in it changes from step to step."""

    model: Model
    weights: Any
    """The model's packed weights: this rank's part."""
    ops: Ops
    ranks: Ranks
    limits: Limits
    policy: Policy
    overlap: bool
    """Plan the next step before this one's tokens are known."""
    replay: Replay | None = None
    """Runs the plans that it has a captured graph for (graphs.capture made it); None: every step is eager."""
    host: Host = field(factory=Host)
    """What can be done to logits on the host."""
    logprobs_mode: str = RAW
    """What log-probabilities are of: one of judging.MODES."""


def prefill_step(m: Machine, kv: Donated[KvCache], x: Inputs) -> tuple[Tensor, KvCache]:
    """Logits [S, V] float32 of any mix of rows: chunks, cached prefixes, decodes. *Donates* kv."""
    return m.model.forward(m.model.config, m.weights, m.ops, m.ranks, kv, x)


def decode_step(m: Machine, kv: Donated[KvCache], x: Inputs) -> tuple[Tensor, KvCache]:
    """Logits [S, V] float32 of rows with one query each. *Donates* kv."""
    return m.model.forward(m.model.config, m.weights, m.ops, m.ranks, kv, x)


def launch(m: Machine, device: Donated[Device], plan: Plan) -> tuple[Flight | Failed, Device]:
    """Put *plan* on the device's stream; wait for nothing. *Donates* device; the one returned is always live.

    Where samples wait for the host (Flight.late), call `finish` next. What a step raises comes back as the Failed event
    of its sequences. Among several ranks it is raised: what one rank can not do, the others have begun.
    """
    try:
        device = evolve(device, edits=tell(device.edits, plan.told)) if plan.told else device
        replayed = m.replay(device, plan) if m.replay is not None else None
        flight, device = _eager(m, device, plan) if replayed is None else replayed
        return _watched(m, flight), device
    except Exception as error:
        if m.ranks.tp.size > 1:
            raise
        return failed(plan, error), evolve(device, kv=renew(device.kv, f"the step {plan.step} that failed"))


def _eager(m: Machine, device: Donated[Device], plan: Plan) -> tuple[Flight, Device]:
    x, kv = stage(plan, device.kv, device.last)
    step = decode_step if x.max_query == 1 else prefill_step
    if m.ranks.tp.size > 1 and not needs_whole(plan, m.limits.vocab_size):
        logits_SV, kv = step(in_parts(m), kv, x)
        chosen = choose_parts(m.ops.part_rows, logits_SV, plan.sampling, m.ranks.tp, m.limits.vocab_size)
        return take_off(plan, chosen), Device(kv, remember(device.last, x, chosen[0]), device.edits)
    logits_SV, kv = step(m, kv, x)
    now, late = edited(plan)
    basis, scored = _asked(m, plan, logits_SV)
    count = len(plan.samples)
    chosen = _choose(m, logits_SV[:count], plan, (*now, *late))
    waiting = choose_rest(m, device, plan, logits_SV, np.arange(count), chosen, now, late, basis)
    device = Device(kv, remember(device.last, x, chosen[0]), device.edits)
    return take_off(plan, chosen, basis, waiting, scored), device


def in_parts(m: Machine) -> Machine:
    """*m*, whose steps leave the logits cut over the ranks."""
    return evolve(m, ranks=evolve(m.ranks, parts=True))


def _asked(m: Machine, plan: Plan, logits_SV: Tensor) -> tuple[Basis | None, Tensor | None]:
    """What the samples are judged by, and what is said of tokens of prompts, whose logits come after the samples'.
    Rank 0 alone is asked.
    """
    if m.ranks.tp.rank:
        return None, None
    return basis_of(plan, m.logprobs_mode, logits_SV), judge_scored(plan, logits_SV[len(plan.samples) :])


def _choose(m: Machine, logits_SV: Tensor, plan: Plan, left: Sequence[int]) -> Tensor:
    """[2, S] int64: tokens, ok; of the samples *left* nothing yet. Rank 0 decides for all."""
    if m.ranks.tp.rank:
        return m.ranks.tp.broadcast(torch.zeros(2, len(plan.samples), dtype=torch.int64, device=logits_SV.device))
    tokens_S, ok_S = m.ops.sample(logits_SV, idle(plan.sampling, left))
    return m.ranks.tp.broadcast(torch.stack((tokens_S, ok_S.to(tokens_S.dtype))))


def choose_rest(
    m: Machine,
    device: Device,
    plan: Plan,
    logits_RV: Tensor,
    row_of: I64,
    chosen: Tensor,
    now: Sequence[int],
    late: Sequence[int],
    basis: Basis | None,
) -> Late | None:
    """Choose the samples *now* of *plan* from edited copies of their logits, once all others are *chosen* ([2, S or
    more] int64: tokens, ok); those that are *late* come back, edited as far as the device can. *row_of*: [S] the row of
    the logits of each sample. Rank 0 decides for all. Writes *device*, *chosen* and what *basis* has of these samples.
    """
    if now:
        x, found = stage_edits(plan, now, row_of, chosen.device), None
        if m.ranks.tp.rank == 0:
            found, _ = choose_edited(m.ops, plan, x, m.ops.edit_rows(logits_RV, x, device.edits), m.host, basis=basis)
        _enter(m, device, x, found, chosen)
    if not late:
        return None
    x = stage_edits(plan, late, row_of, chosen.device)
    return Late(x, None if m.ranks.tp.rank else m.ops.edit_rows(logits_RV, x, device.edits), chosen, basis)


def _enter(m: Machine, device: Device, x: EditInputs, found_2P: Tensor | None, chosen: Tensor) -> None:
    """Write what rank 0 has *found* of the samples of *x* into *chosen* and *device*."""
    found_2P = chosen.new_zeros((2, len(x.which))) if found_2P is None else found_2P
    m.ops.enter_rows(m.ranks.tp.broadcast(found_2P), x, chosen, device.last, device.edits)


def finish(
    m: Machine, device: Donated[Device], flight: Flight, known: Callable[[SeqId], tuple[int, ...] | None]
) -> tuple[Flight | Failed, Device, list[Broken]]:
    """Choose the samples of *flight* that wait for the host; what of it raised. *Donates* device.

    *known*: all tokens of a live sequence, that of the step before this one included; None: it has ended, and its token
    does not matter. Rank 0 alone asks it. What the device raises comes back as in `launch`.
    """
    late, tp, plan = flight.late, m.ranks.tp, flight.plan
    if late is None:
        return flight, device, []
    try:
        found, broken = None, list[Broken]()
        if late.logits_PV is not None:
            waiting = [edit for edit in plan.edits if edit.late]
            ready, broken = ask_host(m.host, waiting, known, m.limits.vocab_size)
            found, raised = choose_edited(m.ops, plan, late.inputs, late.logits_PV, m.host, ready, late.basis)
            broken += raised
        _enter(m, device, late.inputs, found, late.chosen)
        return _watched(m, take_off(plan, late.chosen, late.basis, scored=flight.scored)), device, broken
    except Exception as error:
        if tp.size > 1:
            raise
        return failed(plan, error), evolve(device, kv=renew(device.kv, f"the step {plan.step} that failed")), []


def take_off(
    plan: Plan, chosen: Tensor, basis: Basis | None = None, late: Late | None = None, scored: Tensor | None = None
) -> Flight:
    """The flight of *plan*, which chose [2, S or more] int64: tokens, ok. Starts their way to the host, and that of
    what is said of them by *basis*, and of prompts (*scored*), unless some are *late*.
    """
    if late is not None:
        return Flight(plan, chosen[0], chosen[1], None, late, None, scored)
    count, done, said = len(plan.samples), None, judge_samples(plan, basis, chosen[0])
    if chosen.is_cuda:
        chosen, said, scored = _sent(chosen), *(None if x is None else _sent(x) for x in (said, scored))
        done = torch.cuda.Event()
        done.record()
    return Flight(plan, chosen[0, :count], chosen[1, :count], done, None, said, scored)


def _watched(m: Machine, flight: Flight) -> Flight:
    """*flight*, to be waited for as long as all ranks are there."""
    tp = m.ranks.tp
    return flight if flight.done is None or tp.size == 1 else evolve(flight, done=tp.comm.watched(flight.done))


def _sent(x: Tensor) -> Tensor:
    """*x* on the host, once the stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def land(flight: Flight) -> Sampled | Failed:
    """Wait for the tokens of *flight*: the only wait of a step. Raises ValueError if it is still to be finished,
    RankLost if another rank that has a part in it is gone.
    """
    if flight.late is not None:
        raise ValueError(f"step {flight.plan.step} has samples that wait for the host: call finish first")
    try:
        if flight.done is not None:
            flight.done.synchronize()
        tokens = flight.tokens_S.numpy().astype(np.int32)
        ok = flight.ok_S.numpy() != 0
        said, scored = (None if x is None else x.numpy() for x in (flight.said, flight.scored))
    except RankLost:
        raise
    except Exception as error:  # noqa: BLE001 - a device reports here what went wrong in the step
        return failed(flight.plan, error)
    plan = flight.plan
    return sampled(plan, tokens, ok, of_samples(plan, tokens, said), of_scored(plan, scored))


def failed(plan: Plan, error: Exception) -> Failed:
    """The event that *plan* raised *error*."""
    reason = f"{type(error).__name__}: {error}"
    return Failed(plan.step, tuple(SeqId(seq) for seq in ints(plan.seqs)), reason)


def new_last(limits: Limits, device: torch.device) -> Tensor:
    """The table of last tokens of a device that has not stepped yet."""
    return torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=device)
