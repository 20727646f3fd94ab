"""One step on the device: launch a plan, land its tokens. Sees plans, never the engine's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.models.model import Model
from agentinfer.ops.comm import Ranks
from agentinfer.ops.inputs import Inputs, remember, stage
from agentinfer.ops.kv import Donated, KvCache, renew
from agentinfer.ops.provide import Ops
from agentinfer.state.event import Failed
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Plan, Sampled, sampled
from agentinfer.state.policy import Policy


@frozen(eq=False)
class Device:
    """What the device remembers between steps."""

    kv: KvCache
    last: Tensor
    """[rows + 1] int64: the last token that each row sampled."""


@frozen(eq=False)
class Flight:
    """A step that has been launched and has not landed: its tokens are on the device."""

    plan: Plan
    tokens_S: Tensor
    """[S] int64, on the host; meaningless until `done`."""
    ok_S: Tensor
    """[S] int64, as tokens_S: 0 where the logits were not finite."""
    done: torch.cuda.Event | None
    """Happens when the tokens are there; None: they are."""


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


def prefill_step(m: Machine, kv: Donated[KvCache], x: Inputs) -> tuple[Tensor, KvCache]:
    """Logits [S, V] float32 of any mix of rows: chunks, cached prefixes, decodes. *Donates* kv."""
    return m.model.forward(m.model.config, m.weights, m.ops, m.ranks, kv, x)


def decode_step(m: Machine, kv: Donated[KvCache], x: Inputs) -> tuple[Tensor, KvCache]:
    """Logits [S, V] float32 of rows with one query each. *Donates* kv."""
    return m.model.forward(m.model.config, m.weights, m.ops, m.ranks, kv, x)


def launch(m: Machine, device: Donated[Device], plan: Plan) -> tuple[Flight | Failed, Device]:
    """Put *plan* on the device's stream; wait for nothing. *Donates* device; the one returned is always live.

    What a step raises comes back as the Failed event of its sequences. Among several ranks it is raised: what one rank
    can not do, the others have begun.
    """
    try:
        replayed = m.replay(device, plan) if m.replay is not None else None
        return _eager(m, device, plan) if replayed is None else replayed
    except Exception as error:
        if m.ranks.tp.size > 1:
            raise
        return failed(plan, error), evolve(device, kv=renew(device.kv, f"the step {plan.step} that failed"))


def _eager(m: Machine, device: Donated[Device], plan: Plan) -> tuple[Flight, Device]:
    x, kv = stage(plan, device.kv, device.last)
    step = decode_step if x.max_query == 1 else prefill_step
    logits_SV, kv = step(m, kv, x)
    chosen = _choose(m, logits_SV, plan)
    return take_off(plan, chosen), Device(kv, remember(device.last, x, chosen[0]))


def _choose(m: Machine, logits_SV: Tensor, plan: Plan) -> Tensor:
    """[2, S] int64: tokens, ok. Rank 0 decides for all."""
    tp = m.ranks.tp
    if tp.rank:
        return tp.broadcast(torch.zeros(2, len(plan.samples), dtype=torch.int64, device=logits_SV.device))
    tokens_S, ok_S = m.ops.sample(logits_SV, plan.sampling)
    return tp.broadcast(torch.stack((tokens_S, ok_S.to(tokens_S.dtype))))


def take_off(plan: Plan, chosen: Tensor) -> Flight:
    """The flight of *plan*, which chose [2, S or more] int64: tokens, ok. Starts their way to the host."""
    count, done = len(plan.samples), None
    if chosen.is_cuda:
        here = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        chosen = here.copy_(chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    return Flight(plan, chosen[0, :count], chosen[1, :count], done)


def land(flight: Flight) -> Sampled | Failed:
    """Wait for the tokens of *flight*: the only wait of a step."""
    try:
        if flight.done is not None:
            flight.done.synchronize()
        tokens = flight.tokens_S.numpy().astype(np.int32)
        ok = flight.ok_S.numpy() != 0
    except Exception as error:  # noqa: BLE001 - a device reports here what went wrong in the step
        return failed(flight.plan, error)
    return sampled(flight.plan, tokens, ok)


def failed(plan: Plan, error: Exception) -> Failed:
    """The event that *plan* raised *error*."""
    reason = f"{type(error).__name__}: {error}"
    return Failed(plan.step, tuple(SeqId(seq) for seq in ints(plan.seqs)), reason)


def new_last(limits: Limits, device: torch.device) -> Tensor:
    """The table of last tokens of a device that has not stepped yet."""
    return torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=device)
