"""DeepSeek and Qwen3-MoE beyond parity: faults that the metric must see, and what transformers can not tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import deepseeks
from agentinfer.models import deepseek
from agentinfer.models.mlp import PackedExperts
from agentinfer.models.model import load_model
from agentinfer.models.weights import tree_map
from agentinfer.ops import moe
from agentinfer.ops.comm import alone
from agentinfer.ops.norm import rms_norm, silu_and_mul
from agentinfer.ops.provide import Ops, Stream, reference
from models import drive, tiny
from models.tiny import LENGTH, TOKENS

CLOSE, SEEN = 1e-4, 0.01


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@cache
def wanted(case: tiny.Tiny) -> Tensor:
    return case.logits(TOKENS)


def run(driver: drive.Driver, sizes: tuple[int, ...] = (LENGTH,)) -> Tensor:
    out, at = [], 0
    for size in sizes:
        out.append(driver.step({1: TOKENS[at : at + size]})[1])
        at += size
    return torch.cat(out)


def misread(name: str, root: Path, change: Callable[[Any], Any]) -> Tensor:
    """Logits of a case whose config is read as *change* has it."""
    good = drive.load(tiny.make(name, root).folder)
    model = attrs.evolve(good.model, config=change(good.model.config))
    return run(drive.Driver(model, good.weights, good.ranks))


def routing(**change: Any) -> Callable[[Any], Any]:
    """A config with another rule of routing."""
    return lambda c: attrs.evolve(
        c, experts=attrs.evolve(c.experts, routing=attrs.evolve(c.experts.routing, **change))
    )  # fmt: skip


def rope(**change: Any) -> Callable[[Any], Any]:
    """A config with another rope, the table of angles as it was: only the softmax scale reads it."""
    return lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, **change))


CONFIG_FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no YaRN square, v2": ("deepseek-v2", rope(mscale_all_dim=0.0)),
    "no YaRN square, v3": ("deepseek-v3", rope(mscale_all_dim=0.0)),
    "square of the other mscale": ("deepseek-v2-lora", rope(mscale_all_dim=1.0)),
    "wrong rope style": ("deepseek-v2", lambda c: attrs.evolve(c, interleaved=False)),
    "wrong rope style, halves": ("deepseek-v3-halves", lambda c: attrs.evolve(c, interleaved=True)),
    "not renormalised": ("deepseek-v3", routing(normalise=False)),
    "renormalised": ("deepseek-v3-odd", routing(normalise=True)),
    "not renormalised, qwen3": ("qwen3-moe", routing(normalise=False)),
    "renormalised, qwen3": ("qwen3-moe-raw", routing(normalise=True)),
    "not scaled": ("deepseek-v3", routing(scale=1.0)),
    "not scaled, v2": ("deepseek-v2-groups", routing(scale=1.0)),
    "no groups": ("deepseek-v3", routing(groups=1, kept_groups=1)),
    "no groups, v2": ("deepseek-v2-groups", routing(groups=1, kept_groups=1)),
    "groups by maximum": ("deepseek-v3", routing(group_score="max")),
    "groups by two": ("deepseek-v2-groups", routing(group_score="top2")),
    "softmax": ("deepseek-v3", routing(scoring="softmax")),
    "an expert less": ("deepseek-v2", routing(top_k=2)),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_metric_sees_config_faults(fault: str, root: Path) -> None:
    """Each rule that is misread moves some logit far more than the tolerance."""
    name, change = CONFIG_FAULTS[fault]
    assert drive.worst(misread(name, root, change), wanted(tiny.make(name, root))) > SEEN


def test_latents_have_an_eps_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model's eps in the norms of latents the logits are wrong; the cases have one that shows."""
    case = tiny.make("deepseek-v3", root)
    monkeypatch.setattr(deepseek, "LATENT_EPS", 1e-2)
    assert drive.worst(run(drive.load(case.folder)), wanted(case)) > SEEN


def each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Weights whose layers are all changed."""
    return lambda w: attrs.evolve(w, layers=tuple(change(x) for x in w.layers))


def of_experts(change: Callable[[PackedExperts[Tensor]], Any]) -> Callable[[Any], Any]:
    """Weights whose layers of experts are changed."""
    return each(lambda x: attrs.evolve(x, ffn=change(x.ffn)) if isinstance(x.ffn, PackedExperts) else x)


def swapped(x: Any) -> Any:
    """The rows of keys where those of values belong, as far as they are as many."""
    return attrs.evolve(x, kv_b=x.kv_b.roll(6, 1))


def rolled(x: Any) -> Any:
    """The rope key where the latent begins."""
    return attrs.evolve(x, down=torch.cat((x.down[:48], x.down[48:].roll(4, 0))))


WEIGHT_FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no correction bias": ("deepseek-v3", of_experts(lambda e: attrs.evolve(e, bias=None))),
    "no shared experts": ("deepseek-v2", of_experts(lambda e: attrs.evolve(e, shared=None))),
    "experts in another order": ("deepseek-v2", of_experts(lambda e: attrs.evolve(e, down=e.down.roll(1, 0)))),
    "gate and up swapped": ("qwen3-moe", of_experts(lambda e: attrs.evolve(e, gate_up=e.gate_up.roll(10, 1)))),
    "kv norm ignored": ("deepseek-v2", each(lambda x: attrs.evolve(x, kv_norm=torch.ones(16)))),
    "q norm ignored": ("deepseek-v3", each(lambda x: attrs.evolve(x, q_norm=torch.ones(24)))),
    "keys and values swapped": ("deepseek-v2", each(swapped)),
    "rope before the latent": ("deepseek-v2", each(rolled)),
}  # fmt: skip


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_metric_sees_weight_faults(fault: str, root: Path) -> None:
    """Each misplaced weight moves some logit far more than the tolerance."""
    name, break_it = WEIGHT_FAULTS[fault]
    case = tiny.make(name, root)
    good = drive.load(case.folder)
    bad = drive.Driver(good.model, break_it(good.weights), good.ranks)
    assert drive.worst(run(bad), wanted(case)) > SEEN


def with_router(route: Callable[[Tensor, Tensor | None, moe.Routing], tuple[Tensor, Tensor]]) -> Ops:
    """The reference, with another router."""

    def norm_route(
        stream: Stream, norm: Tensor, router: Tensor, bias: Tensor | None, r: moe.Routing, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Stream]:
        assert stream.pending_TD is not None
        total = stream.residual_TD + stream.pending_TD
        normed = rms_norm(total, norm, eps)
        return normed, *route(moe.router_logits(normed, router), bias, r), Stream(total, None)

    return attrs.evolve(reference(), norm_route=norm_route)


def biased_weights(logits: Tensor, bias: Tensor | None, r: moe.Routing) -> tuple[Tensor, Tensor]:
    """The bias leaks into the weights."""
    assert bias is not None
    _, ids = moe.route(logits, bias, r)
    weights = (logits.sigmoid() + bias).gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * r.scale, ids


def zeroed(logits: Tensor, bias: Tensor | None, r: moe.Routing) -> tuple[Tensor, Tensor]:
    """Hidden groups have 0, not -inf: with negative scores they win."""
    assert bias is not None
    scores = logits.sigmoid()
    grouped = (scores + bias).view(len(logits), r.groups, -1)
    kept = grouped.topk(2, -1).values.sum(-1).topk(r.kept_groups, -1).indices
    hidden = torch.ones(len(logits), r.groups, dtype=torch.bool).scatter_(1, kept, value=False)
    ids = grouped.masked_fill(hidden.unsqueeze(-1), 0.0).flatten(1).topk(r.top_k, -1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * r.scale, ids


@pytest.mark.parametrize(("route", "right"), [(moe.route, True), (biased_weights, False), (zeroed, False)])
def test_metric_sees_router_faults(route: Any, right: bool, root: Path) -> None:
    """A bias in the weights, and 0 in place of -inf under negative biases, are seen; the true router put in is not."""
    case = tiny.make("deepseek-v3", root)
    good = drive.load(case.folder)
    biases = torch.cat([x.ffn.bias for x in good.weights.layers if isinstance(x.ffn, PackedExperts)])
    assert float(biases.max()) < 0.5
    assert float((biases < -0.5).float().mean()) > 0.5
    worst = drive.worst(run(drive.Driver(good.model, good.weights, good.ranks, ops=with_router(route))), wanted(case))
    assert worst < CLOSE if right else worst > SEEN


def test_no_near_ties(root: Path) -> None:
    """No expert is chosen by a near tie in models without groups or biases: they can not pass or fail by luck."""
    gaps: list[float] = []

    def watch(logits: Tensor, bias: Tensor | None, r: moe.Routing) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1) if r.scoring == "softmax" else logits.sigmoid()
        best = (scores if bias is None else scores + bias).sort(-1, descending=True).values
        gaps.append(float((best[:, r.top_k - 1] - best[:, r.top_k]).min()))
        return moe.route(logits, bias, r)

    for name in ("deepseek-v2", "deepseek-v2-lora", "qwen3-moe"):
        good = drive.load(tiny.make(name, root).folder)
        run(drive.Driver(good.model, good.weights, good.ranks, ops=with_router(watch)))
    assert min(gaps) > 1e-5


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "qwen3-moe"])
def test_bfloat16_by_the_same_routes(name: str, root: Path) -> None:
    """In bfloat16, sent to the experts that float32 chooses (so that no near tie decides), logits are float32's but for
    rounding; weights of routes are float32 in both.
    """
    folder, routes = tiny.make(name, root).folder, list[Tensor]()

    def record(logits: Tensor, bias: Tensor | None, r: moe.Routing) -> tuple[Tensor, Tensor]:
        weights, ids = moe.route(logits, bias, r)
        routes.append(ids)
        return weights, ids

    def follow(logits: Tensor, bias: Tensor | None, r: moe.Routing) -> tuple[Tensor, Tensor]:
        del bias
        ids = routes.pop(0)
        weights = (logits.softmax(-1) if r.scoring == "softmax" else logits.sigmoid()).gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) if r.normalise else weights
        return weights * r.scale, ids

    model, weights = load_model(folder, torch.bfloat16, alone())
    wide = tree_map(lambda x: x.to(torch.float32), weights)
    as_wide = attrs.evolve(model, dtype=torch.float32)
    want = run(drive.Driver(as_wide, wide, alone(), ops=with_router(record)))
    got = run(drive.Driver(model, weights, alone(), ops=with_router(follow)))
    assert not routes
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert 1e-4 < float(errors.max()) < 0.04


def by_hand(w: Any, x: Tensor, scale: float, *, normalise: bool) -> Tensor:
    """One layer's feed-forward half, a position at a time, with V2's rule of weights. *x*: normed positions."""
    out = []
    for row in x:
        scores = (w.router @ row).softmax(-1)
        ids = scores.argsort(descending=True)[:3].tolist()
        total = sum(float(scores[i]) for i in ids)
        y = w.shared.down @ silu_and_mul(w.shared.gate_up @ row)
        for i in ids:
            weight = float(scores[i]) / total if normalise else float(scores[i]) * scale
            gate, up = (w.gate_up[i] @ row).chunk(2)
            y = y + weight * (w.down[i] @ (functional.silu(gate) * up))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("normalise", [True, False])
def test_v2_normalises_or_scales(tmp_path: Path, normalise: bool) -> None:
    """DeepSeek-V2 with norm_topk_prob, where transformers is no oracle: weights are normalised and not scaled, else
    scaled and not normalised.
    """
    config = {**deepseeks.V2, "norm_topk_prob": normalise, "routed_scaling_factor": 3.0}
    model, weights = load_model(deepseeks.write(tmp_path / "v2", config), None, alone())
    w, x = weights.layers[1].ffn, torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    ops, one = reference(), torch.ones(48)
    r = model.config.experts.routing
    assert (r.normalise, r.scale) == ((True, 1.0) if normalise else (False, 3.0))
    normed, ws, ids, stream = ops.norm_route(Stream(x, None), one, w.router, w.bias, r, 1e-6)
    got = ops.experts_add(normed, ws, ids, w.gate_up, w.down, w.shared.gate_up, w.shared.down, stream, alone().tp)
    want = by_hand(w, rms_norm(x, one, 1e-6), 3.0, normalise=normalise)
    assert got.pending_TD is not None
    torch.testing.assert_close(got.pending_TD, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.residual_TD, x)


def test_one_expert_is_not_normalised(tmp_path: Path) -> None:
    """DeepSeek-V2 with one expert a token scales its weight, whatever norm_topk_prob says; V3 normalises."""
    for base, want in ((deepseeks.V2, (False, 2.5)), (deepseeks.V3, (True, 2.5))):
        change = {"norm_topk_prob": True, "num_experts_per_tok": 1, "routed_scaling_factor": 2.5}
        deepseeks.tensors_of({**base, **change}, tmp_path)
        r = load_model(deepseeks.write(tmp_path / "m", {**base, **change}), None, alone())[0].config.experts.routing
        assert (r.normalise, r.scale) == want


@pytest.mark.parametrize("none", [0, None])
def test_without_shared_experts(tmp_path: Path, none: int | None) -> None:
    """Without shared experts the model is the one whose shared experts give zero."""
    config = {**deepseeks.V3, "n_shared_experts": none}
    tensors = deepseeks.tensors_of(deepseeks.V3, tmp_path / "all")
    few = {k: v for k, v in tensors.items() if "shared" not in k}
    zero = {k: torch.zeros_like(v) if "shared" in k else v for k, v in tensors.items()}
    got = run(drive.load(deepseeks.write(tmp_path / "few", config, few)))
    want = run(drive.load(deepseeks.write(tmp_path / "zero", deepseeks.V3, zero)))
    assert drive.worst(got, want) < 1e-6


def test_frequency_of_layers_with_experts(tmp_path: Path) -> None:
    """moe_layer_freq: from the first such layer on every second one has experts, the others are dense."""
    config = {**deepseeks.V3, "moe_layer_freq": 2, "num_hidden_layers": 5}
    weights = load_model(deepseeks.write(tmp_path / "m", config), None, alone())[1]
    assert [isinstance(x.ffn, PackedExperts) for x in weights.layers] == [False, False, True, False, True]


def test_bias_and_router_stay_float32(tmp_path: Path) -> None:
    """In a bfloat16 model the router and its correction bias are float32, as stored."""
    folder = deepseeks.write(tmp_path / "m")
    got = load_model(folder, torch.bfloat16, alone())[1].layers[1].ffn
    want = load_model(folder, torch.float32, alone())[1].layers[1].ffn
    assert torch.equal(got.bias, want.bias)
    assert torch.equal(got.router, want.router)
    assert got.gate_up.dtype == torch.bfloat16


def test_experts_lie_in_two_tensors(tmp_path: Path) -> None:
    """All experts of a layer are views of two tensors: [E, 2F, D] with gate first, and [E, D, F]."""
    folder = deepseeks.write(tmp_path / "m")
    made = deepseeks.tensors_of(deepseeks.V3, tmp_path / "n")
    w = load_model(folder, None, alone())[1].layers[2].ffn
    p = "model.layers.2.mlp.experts.5."
    assert (w.gate_up.shape, w.down.shape) == ((8, 32, 48), (8, 48, 16))
    assert w.gate_up.is_contiguous()
    assert w.down.is_contiguous()
    assert torch.equal(w.gate_up[5], torch.cat((made[p + "gate_proj.weight"], made[p + "up_proj.weight"])))
    assert torch.equal(w.down[5], made[p + "down_proj.weight"])


def test_a_hole_in_the_experts_is_named(tmp_path: Path) -> None:
    """One weight of one expert missing is an error that names it, and so is a correction bias that is not there."""
    made = deepseeks.tensors_of(deepseeks.V3, tmp_path / "n")
    for key in ("model.layers.2.mlp.experts.5.gate_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"):
        few = {k: v for k, v in made.items() if k != key}
        with pytest.raises(Exception, match=f"missing: {key}"):
            load_model(deepseeks.write(tmp_path / "m", deepseeks.V3, few), None, alone())
