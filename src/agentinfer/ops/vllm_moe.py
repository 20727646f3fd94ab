"""The routed experts of several positions by vLLM's fused kernels (Triton's, tuned by vLLM).

These are Python, unlike vLLM's other kernels here: the package is imported, which takes seconds and sets up its logging
and environment variables. So it happens only where somebody asks for it.

Shapes: as in `experts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Final

from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.comm import Group
from agentinfer.ops.products import Launch, gated, product
from agentinfer.ops.provide import Ops, Stream
from agentinfer.ops.streams import added

MODULE: Final = "vllm.model_executor.layers.fused_moe.fused_moe"
ARGUMENTS: Final = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
"""What we pass, by name (vllm 0.26); all else keeps its default: SiLU, weights that are not
quantised, all experts here."""


def load() -> Callable[..., Tensor]:
    """vLLM's `fused_experts`. Raises InvalidSetting if it is not there, or takes other arguments than ours."""
    try:
        function = import_module(MODULE).fused_experts
    except (ImportError, AttributeError, OSError) as error:
        raise InvalidSetting("ops", f"vllm-moe: fused_experts can not be imported: {error}") from error
    taken = inspect.signature(function).parameters
    unknown = [name for name in ARGUMENTS if name not in taken]
    if unknown:
        raise InvalidSetting("ops", f"vllm-moe: fused_experts of this vllm takes no {', '.join(unknown)}")
    needed = [n for n, p in taken.items() if p.default is p.empty and n not in ARGUMENTS]
    if needed:
        raise InvalidSetting("ops", f"vllm-moe: fused_experts of this vllm needs {', '.join(needed)}")
    return function


def with_experts(ops: Ops, run: Launch) -> Ops:
    """*ops* (of Triton, launched as *run*), whose experts_add leaves the routed experts of several positions to vLLM.

    The shared ones stay ours; both sums are rounded to the model's dtype, as the reference rounds them. Raises
    InvalidSetting as `load` does; the call, for several ranks: what no rank has would be left unwritten.
    """
    fused_experts = load()

    def experts_add(
        normed: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor,
        shared_gate_up: Tensor | None, shared_down: Tensor | None, stream: Stream, group: Group,
    ) -> Stream:  # fmt: skip
        if group.size > 1:
            raise InvalidSetting("ops", f"vllm-moe: experts of {group.size} ranks; it has those of one rank alone")
        if len(normed) == 1:
            return ops.experts_add(
                normed, weights_TK, experts_TK, gate_up_EFD, down_EDF, shared_gate_up, shared_down, stream, group
            )
        if (shared_gate_up is None) != (shared_down is None):
            raise ValueError("shared experts have two weights, or there are none; one is missing")
        y = fused_experts(
            hidden_states=normed, w1=gate_up_EFD, w2=down_EDF, topk_weights=weights_TK, topk_ids=experts_TK
        )
        if shared_gate_up is not None and shared_down is not None:
            y = y + product(run, gated(run, normed, shared_gate_up, None), shared_down, None)
        return Stream(added(stream, normed.dtype), y.unsqueeze(0))

    return evolve(ops, name="vllm-moe", experts_add=experts_add)
