"""Routing against examples computed by hand, and the experts' loop against plain sums."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.moe import Routing, experts, route, router_logits

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.6, 1.5, 1.4, -2.0, 3.0]])
BIAS = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.05, 0.0, -0.3])
V3 = Routing(2, "sigmoid", normalise=True, scale=2.5, groups=4, kept_groups=2, group_score="top2")
V2 = Routing(3, "softmax", normalise=False)


def chosen(logits: Tensor, bias: Tensor | None, r: Routing) -> list[dict[int, float]]:
    """Of each position: expert -> weight."""
    weights, ids = route(logits, bias, r)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    return [dict(zip(i.tolist(), w.tolist(), strict=True)) for i, w in zip(ids, weights, strict=True)]


@pytest.mark.parametrize(
    ("routing", "bias", "want"),
    [
        (V3, BIAS, {4: 1.261877, 5: 1.238123}),
        (V2, None, {0: 0.184793, 4: 0.112083, 7: 0.502320}),
        (evolve(V2, scale=16.0, groups=4, kept_groups=2), None, {0: 2.956692, 1: 0.147205, 7: 8.037121}),
        (evolve(V2, normalise=True), None, {7: 0.628532, 0: 0.231224, 4: 0.140244}),
        (evolve(V2, normalise=True, scale=2.5), None, {7: 1.571329, 0: 0.578060, 4: 0.350610}),
        (evolve(V2, scoring="sigmoid"), None, {7: 0.952574, 0: 0.880797, 4: 0.817574}),
    ],
    ids=["v3", "v2 lite", "v2 groups", "normalised", "normalised and scaled", "sigmoid"],
)
def test_examples(routing: Routing, bias: Tensor | None, want: dict[int, float]) -> None:
    """Experts and weights are those computed by hand: the bias chooses and is not in the weights, groups are scored by
    the rule of their architecture.
    """
    (got,) = chosen(LOGITS, bias, routing)
    assert got == pytest.approx(want, abs=2e-6)


def test_wrong_rules_show() -> None:
    """The example tells V3's rules from their neighbours: groups by maximum, no groups, no bias."""
    right = set(chosen(LOGITS, BIAS, V3)[0])
    assert right == {4, 5}
    assert set(chosen(LOGITS, BIAS, evolve(V3, group_score="max"))[0]) == {0, 4}
    ungrouped = evolve(V3, groups=1, kept_groups=1)
    assert set(chosen(LOGITS, BIAS, ungrouped)[0]) == {0, 4}
    assert set(chosen(LOGITS, None, ungrouped)[0]) == {0, 7}


def test_negative_scores_stay_in_their_groups() -> None:
    """With a bias that makes every score negative the experts are still of the kept groups, and weights unbiased."""
    got = chosen(LOGITS, BIAS - 5.0, V3)
    assert got == chosen(LOGITS, BIAS, V3)
    # One kept group of two experts, both below all that a hidden expert would have with 0 in place of -inf.
    bias = torch.tensor([-9.0, -9.0, -9.0, -9.0, -8.0, -8.0, -9.0, -9.0])
    assert set(chosen(LOGITS, bias, evolve(V3, kept_groups=1))[0]) == {4, 5}


def test_weights_sum_to_the_scale() -> None:
    """Normalised weights sum to the scale, and to 0 rather than to NaN where every score underflows."""
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    weights, _ = route(logits, BIAS, V3)
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))
    weights, _ = route(torch.full((1, 8), -200.0), None, V3)
    assert torch.equal(weights, torch.zeros(1, 2))


def test_each_position_is_routed_by_itself() -> None:
    """What a position is given does not depend on its neighbours."""
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    assert chosen(logits, BIAS, V3) == [chosen(x[None], BIAS, V3)[0] for x in logits]


def test_logits_are_float32() -> None:
    """Two experts whose logits are one number in bfloat16 are told apart, and so are biases of that kind."""
    router = torch.tensor([[8.0, 2**-7], [8.0, 2**-6]], dtype=torch.bfloat16)
    logits = router_logits(torch.ones(1, 2, dtype=torch.bfloat16), router)
    assert logits.tolist() == [[8.0078125, 8.015625]]
    assert set(chosen(logits, None, Routing(1, "softmax", normalise=False))[0]) == {1}
    bias = torch.tensor([1.0, 1.0 + 2**-12])
    assert set(chosen(torch.zeros(1, 2), bias, Routing(1, "sigmoid", normalise=False))[0]) == {1}


def plain(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same sum, position by position."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight * (down[expert] @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_experts(count: int) -> None:
    """Each position gets the weighted sum of its experts, whether one, all or none are asked for."""
    draw = torch.Generator().manual_seed(2)
    x, gate_up = torch.randn(count, 6, generator=draw), torch.randn(8, 10, 6, generator=draw)
    down = torch.randn(8, 6, 5, generator=draw)
    weights, ids = route(torch.randn(count, 8, generator=draw), BIAS, evolve(V3, top_k=3))
    got = experts(x, weights, ids, gate_up, down)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, plain(x, weights, ids, gate_up, down), rtol=1e-5, atol=1e-5)


def test_crowded_experts_drop_nobody() -> None:
    """Where all positions want the same experts, all get them."""
    draw = torch.Generator().manual_seed(3)
    x, gate_up = torch.randn(64, 6, generator=draw), torch.randn(4, 10, 6, generator=draw)
    down, ids = torch.randn(4, 6, 5, generator=draw), torch.tensor([[3, 1]] * 64)
    weights = torch.rand(64, 2, generator=draw)
    torch.testing.assert_close(
        experts(x, weights, ids, gate_up, down), plain(x, weights, ids, gate_up, down), rtol=1e-5, atol=1e-5
    )  # fmt: skip


def test_experts_do_not_depend_on_neighbours() -> None:
    """In bfloat16 a position alone has the bits that it has among others: sums keep the order of the experts."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(9, 64, generator=draw).to(torch.bfloat16)
    gate_up = torch.randn(8, 32, 64, generator=draw).to(torch.bfloat16)
    down = torch.randn(8, 64, 16, generator=draw).to(torch.bfloat16)
    weights, ids = route(torch.randn(9, 8, generator=draw), None, V2)
    whole = experts(x, weights, ids, gate_up, down)
    for flipped in (ids, ids.flip(1)):
        order = weights if flipped is ids else weights.flip(1)
        alone = torch.cat(
            [experts(x[t : t + 1], order[t : t + 1], flipped[t : t + 1], gate_up, down) for t in range(9)]
        )
        torch.testing.assert_close(alone, whole, rtol=1e-2, atol=math.inf)
    assert torch.equal(experts(x, weights.flip(1), ids.flip(1), gate_up, down), whole)
