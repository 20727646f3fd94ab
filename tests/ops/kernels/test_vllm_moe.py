"""vLLM's fused experts as a provider: called by the signature of vllm 0.26, computed by the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import moe, vllm_moe
from agentinfer.ops.comm import alone
from agentinfer.ops.moe import Routing
from agentinfer.ops.products import Launch
from agentinfer.ops.provide import Ops, Stream, reference

ROUTING = Routing(3, "softmax", normalise=False)
SIGNATURE = (
    "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "apply_router_weight_on_input",
    "global_num_experts", "expert_map", "quant_config",
)  # fmt: skip
"""Of fused_experts in vllm 0.26."""


def computed(hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    assert hidden_states.is_contiguous()
    return moe.experts(hidden_states, topk_weights, topk_ids, w1, w2).to(hidden_states.dtype)


def as_it_is(
    hidden_states, w1, w2, topk_weights, topk_ids, activation="silu", apply_router_weight_on_input=False,
    global_num_experts=-1, expert_map=None, quant_config=None,
) -> Tensor:  # fmt: skip
    assert (activation, apply_router_weight_on_input, global_num_experts) == ("silu", False, -1)
    assert expert_map is None
    assert quant_config is None
    return computed(hidden_states, w1, w2, topk_weights, topk_ids)


def reordered(topk_ids, w2, topk_weights, hidden_states, w1) -> Tensor:
    return computed(hidden_states, w1, w2, topk_weights, topk_ids)


def without_ids(hidden_states, w1, w2, topk_weights, gating_output) -> None:
    raise AssertionError("called")


def with_a_config(hidden_states, w1, w2, topk_weights, topk_ids, quant_config) -> None:
    raise AssertionError("called")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Ops]:
    """Ops on top of the reference, for a vllm whose fused_experts is the given function."""

    def make(function: Any) -> Ops:
        monkeypatch.setattr(vllm_moe, "import_module", lambda _: SimpleNamespace(fused_experts=function))
        run = Launch(pdl=False, gemm_rows=0, narrow_rows=0, counters=torch.zeros(1, dtype=torch.int32))
        return vllm_moe.with_experts(reference(), run)

    return make


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(ops: Ops, count: int, *, shared: bool, pending: bool) -> Tensor:
    """The residual after the second half of a layer."""
    gate_up, down = rand(8, 64, 48, seed=1), 0.2 * rand(8, 48, 32, seed=2)
    more = (rand(80, 48, seed=3), 0.2 * rand(48, 40, seed=4)) if shared else (None, None)
    stream = Stream(rand(count, 48, seed=5), rand(count, 48, seed=6) if pending else None)
    normed, weights, experts, _ = ops.norm_route(
        Stream(rand(count, 48, seed=7), None), torch.ones(48), rand(8, 48, seed=8), None, ROUTING, 1e-6
    )
    if pending and ops.name != "reference":  # Triton's is [parts, T, D]
        stream = Stream(stream.residual_TD, rand(count, 48, seed=6).unsqueeze(0))
    after = ops.experts_add(normed, weights, experts, gate_up, down, *more, stream, alone().tp)
    if after.pending_TD is None:
        return after.residual_TD
    extra = after.pending_TD if after.pending_TD.dim() == 2 else after.pending_TD.sum(0)
    return after.residual_TD + extra


@pytest.mark.parametrize("function", [as_it_is, reordered])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pending", [True, False])
def test_a_layer_is_the_reference(
    here: Callable[[Any], Ops], function: Any, *, shared: bool, pending: bool
) -> None:  # fmt: skip
    """Several positions get the reference's experts, whatever the order of the function's parameters."""
    got = layer(here(function), 5, shared=shared, pending=pending)
    torch.testing.assert_close(got, layer(reference(), 5, shared=shared, pending=pending), rtol=1e-4, atol=1e-4)


def test_one_position_stays_with_the_other_ops(here: Callable[[Any], Ops]) -> None:
    """A single position is not vLLM's."""
    ops = here(lambda hidden_states, w1, w2, topk_weights, topk_ids: pytest.fail("called"))
    got = layer(ops, 1, shared=True, pending=False)
    torch.testing.assert_close(got, layer(reference(), 1, shared=True, pending=False))


@pytest.mark.parametrize(
    ("function", "message"), [(without_ids, "takes no topk_ids"), (with_a_config, "needs quant_config")]
)
def test_another_signature_is_refused(here: Callable[[Any], Ops], function: Any, message: str) -> None:
    """A version that takes other arguments is refused when the ops are made, by the name of the argument."""
    with pytest.raises(InvalidSetting, match=f"ops: vllm-moe: fused_experts of this vllm {message}"):
        here(function)


def test_what_is_not_there_is_named() -> None:
    """Without vllm the provider says so."""
    with pytest.raises(InvalidSetting, match=r"ops: vllm-moe: fused_experts can not be imported: .*vllm"):
        vllm_moe.load()


def test_several_ranks_and_half_a_pair_are_refused(here: Callable[[Any], Ops]) -> None:
    """Experts of several ranks, and one of the two weights of the shared ones."""
    ops, x = here(as_it_is), rand(2, 48)
    some = (x, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), rand(8, 64, 48), rand(8, 48, 32))
    with pytest.raises(InvalidSetting, match="vllm-moe: experts of 2 ranks"):
        ops.experts_add(*some, None, None, Stream(x, None), SimpleNamespace(size=2))
    with pytest.raises(ValueError, match="one is missing"):
        ops.experts_add(*some, rand(80, 48), None, Stream(x, None), alone().tp)
