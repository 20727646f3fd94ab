"""Routing and experts by our kernels, in Triton's interpreter, against the reference."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import experts as ours
from agentinfer.ops import moe, provide
from agentinfer.ops.comm import Group, alone
from agentinfer.ops.kernels.add_norm import add_norm
from agentinfer.ops.kernels.expert_gemm import ExpertTile, expert_gemm, expert_tile
from agentinfer.ops.kernels.expert_gemv import expert_gemv
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.route import choose_experts, router_logits
from agentinfer.ops.kernels.route_one import route_one
from agentinfer.ops.kernels.tiles import GemvTile
from agentinfer.ops.moe import Routing
from agentinfer.ops.products import Launch
from agentinfer.ops.provide import Stream
from agentinfer.ops.threads import Threads

RUN = Launch(pdl=False, gemm_rows=0, narrow_rows=0, counters=torch.zeros(1, dtype=torch.int32))
LITE = Routing(3, "softmax", normalise=False)
ROUTINGS = {
    "v2 lite": LITE,
    "v2 groups": evolve(LITE, scale=16.0, groups=4, kept_groups=2),
    "normalised": evolve(LITE, normalise=True, scale=2.5),
    "sigmoid": evolve(LITE, scoring="sigmoid"),
    "v3": Routing(4, "sigmoid", normalise=True, scale=2.5, groups=4, kept_groups=2, group_score="top2"),
    "one": Routing(1, "softmax", normalise=False),
}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(weights: Tensor, experts: Tensor, count: int) -> Tensor:
    """[T, E]: the weight of each expert, 0 where it is not chosen."""
    return torch.zeros(len(weights), count).scatter(1, experts, weights)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
@pytest.mark.parametrize(("experts", "width"), [(8, 64), (10, 200), (3, 2050)])
def test_router_logits(count: int, experts: int, width: int) -> None:
    """Logits are the product in float32, and those of a row do not depend on how many rows there are."""
    x, router = rand(count, width), rand(experts, width, seed=1)
    got = router_logits(x, router)
    torch.testing.assert_close(got, moe.router_logits(x, router), rtol=1e-5, atol=1e-4)
    if count:
        assert torch.equal(router_logits(x[:1], router), got[:1])


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("experts", [8, 20])
@pytest.mark.parametrize("shift", [None, 0.0, -5.0])
def test_choose_experts(name: str, experts: int, shift: float | None) -> None:
    """Every rule gives the experts and weights of the reference, with biases that make all scores negative too."""
    r, logits = ROUTINGS[name], rand(25, experts)
    bias = None if shift is None else 0.1 * rand(experts, seed=1) + shift
    weights, chosen = choose_experts(logits, bias, r)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    want = spread(*moe.route(logits, bias, r), experts)
    torch.testing.assert_close(spread(weights, chosen, experts), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("experts", "width"), [(8, 64), (20, 200)])
@pytest.mark.parametrize("bias", [None, 0.0])
def test_route_one(name: str, experts: int, width: int, bias: float | None) -> None:
    """Norm, logits and choice of a single position in one kernel are those of three, twice with the same counter;
    of a position that is normed already too.
    """
    counters, norm, router = torch.zeros(1, dtype=torch.int32), 1 + 0.2 * rand(width, seed=2), rand(experts, width)
    shift = None if bias is None else bias + rand(experts, seed=3)
    for seed in (4, 5):
        x = rand(1, width, seed=seed)
        normed, weights, chosen = route_one(x, norm, router, shift, ROUTINGS[name], 1e-6, counters)
        want = add_norm(x, None, norm, 1e-6, torch.float32)
        torch.testing.assert_close(normed, want)
        again = route_one(normed, None, router, shift, ROUTINGS[name], 1e-6, counters)
        assert again[0] is normed
        assert torch.equal(again[1], weights)
        assert torch.equal(again[2], chosen)
        mine = spread(weights, chosen, experts)
        theirs = spread(*choose_experts(router_logits(want, router), shift, ROUTINGS[name]), experts)
        torch.testing.assert_close(mine, theirs)
        assert counters.item() == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is computed with infinities and NaN
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_stay_in_range(name: str) -> None:
    """Whatever the logits are, the experts of a position are distinct and exist; of equals the lowest come first."""
    nan, inf = float("nan"), float("inf")
    logits = torch.stack([torch.full((8,), x) for x in (nan, inf, -inf, 0.0)] + [torch.tensor([nan, 1.0] * 4)])
    _, chosen = choose_experts(logits, None, ROUTINGS[name])
    assert ((chosen >= 0) & (chosen < 8)).all()
    assert all(len(set(row.tolist())) == len(row) for row in chosen)
    assert chosen[3].tolist() == list(range(ROUTINGS[name].top_k))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the same
def test_weights_of_nothing() -> None:
    """Where every score underflows, normalised weights are 0 and not NaN; no rows give no rows."""
    weights, _ = choose_experts(torch.full((1, 8), -200.0), None, ROUTINGS["v3"])
    assert torch.equal(weights, torch.zeros(1, 4))
    weights, chosen = choose_experts(torch.zeros(0, 8), None, LITE)
    assert weights.shape == chosen.shape == (0, 3)


def routes(count: int, chosen: int, experts: int) -> tuple[Tensor, Tensor]:
    """(weights, experts), some experts with many positions and some with none."""
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t)) for t in range(count)])
    return rand(count, chosen, seed=5).abs(), ids[:, :chosen].contiguous()


@pytest.mark.parametrize(("count", "chosen", "experts"), [(1, 2, 8), (40, 3, 5), (700, 3, 12), (16, 1, 1)])
@pytest.mark.parametrize("rows", [4, 16])
def test_expert_rows(count: int, chosen: int, experts: int, rows: int) -> None:
    """Every pair is once in a tile of its expert, in order, tiles are padded with M, and no tile is missing."""
    _, ids = routes(count, chosen, experts)
    sorted_ = expert_rows(ids, experts, rows)
    pairs, total = count * chosen, int(sorted_.used)
    assert total <= len(sorted_.experts)
    tiles = sorted_.pairs.view(-1, rows)[:total]
    whose = sorted_.experts[:total]
    assert sorted(tiles[tiles < pairs].tolist()) == list(range(pairs))
    assert int((tiles == pairs).sum()) == total * rows - pairs
    for expert in range(experts):
        mine = tiles[whose == expert].flatten()
        want = (ids.flatten() == expert).nonzero().flatten().int()
        assert torch.equal(mine[: len(want)], want)
        assert (mine[len(want) :] == pairs).all()
        assert len(mine) == -(-len(want) // rows) * rows


def weights_of(experts: int, width: int, model: int, shared: int) -> tuple[Tensor, ...]:
    """gate_up, down, shared gate_up, shared down."""
    return (
        rand(experts, 2 * width, model, seed=1) / model**0.5, rand(experts, model, width, seed=2) / width**0.5,
        rand(2 * shared, model, seed=3) / model**0.5, rand(model, shared, seed=4) / max(shared, 1) ** 0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("count", "rows"), [(2, 16), (7, 4), (40, 16)])
@pytest.mark.parametrize(("width", "model"), [(32, 64), (40, 72)])
def test_expert_gemm(count: int, rows: int, width: int, model: int) -> None:
    """Parts of all positions add up to the reference, with tiles that do not divide the shape."""
    gate_up, down, _, _ = weights_of(6, width, model, 0)
    x, (weights, ids) = rand(count, model), routes(count, 3, 6)
    out = torch.full((3, count, model), float("nan"))
    tile = ExpertTile(rows, 32, 32, 2, 1)
    expert_gemm(x, weights, expert_rows(ids, 6, rows), gate_up, down, out, tile=tile)
    torch.testing.assert_close(out.sum(0), moe.experts(x, weights, ids, gate_up, down), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [0, 32, 64])
@pytest.mark.parametrize("tiles", [None, (GemvTile(4, 32, 1), GemvTile(8, 16, 1))])
def test_expert_gemv(shared: int, tiles: tuple[GemvTile, GemvTile] | None) -> None:
    """One position's experts and the shared ones, onto what was there, equal the reference."""
    gate_up, down, *both = weights_of(6, 32, 72, shared)
    x, (weights, ids) = rand(1, 72), routes(1, 3, 6)
    residual = rand(1, 72, seed=7)
    more = both if shared else (None, None)
    got = expert_gemv(x, weights, ids, gate_up, down, *more, residual.clone(), tiles=tiles)
    want = provide.reference().experts_add(
        x, weights, ids, gate_up, down, *more, Stream(residual, residual), alone().tp
    )  # fmt: skip
    torch.testing.assert_close(got, want.pending_TD, rtol=1e-4, atol=1e-5)


def total(stream: Stream) -> Tensor:
    """Residual and what is pending."""
    pending = stream.pending_TD
    return (
        stream.residual_TD
        if pending is None
        else stream.residual_TD + pending.view(-1, *stream.residual_TD.shape).sum(0)
    )


@pytest.mark.parametrize("name", ["v2 lite", "v3"])
@pytest.mark.parametrize("count", [1, 2, 33])
@pytest.mark.parametrize("shared", [0, 32, 48])
@pytest.mark.parametrize("pending", [False, True])
def test_a_layer_is_the_reference(name: str, count: int, shared: int, pending: bool) -> None:
    """Norm, route and experts of any number of positions, with shared experts of any width, are the reference's."""
    gate_up, down, *both = weights_of(8, 32, 64, shared)
    router, bias = rand(8, 64, seed=11), 0.1 * rand(8, seed=12) if name == "v3" else None
    norm, more = 1 + 0.2 * rand(64, seed=13), both if shared else (None, None)
    residual, y = rand(count, 64, seed=14), rand(2, count, 64, seed=15)
    results = []
    for ops in ("ours", "reference"):
        if ops == "ours":
            stream = Stream(residual.clone(), y if pending else None)
            *work, stream = ours.norm_route(RUN, stream, norm, router, bias, ROUTINGS[name], 1e-6)
            stream = ours.experts_add(RUN, *work, gate_up, down, *more, stream, alone().tp)
        else:
            plain, stream = provide.reference(), Stream(residual, y.sum(0) if pending else None)
            *work, stream = plain.norm_route(stream, norm, router, bias, ROUTINGS[name], 1e-6)
            stream = plain.experts_add(*work, gate_up, down, *more, stream, alone().tp)
        results.append(total(stream))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_half_precision_and_split_sums() -> None:
    """In float16 the shared experts' partial sums lie behind the experts' parts, near the float32 reference."""
    wide = weights_of(8, 32, 64, 512)
    gate_up, down, *both = (w.half() for w in wide)
    x, (weights, ids) = rand(5, 64), routes(5, 3, 8)
    run = Launch(pdl=False, gemm_rows=64, narrow_rows=64, counters=torch.zeros(1, dtype=torch.int32))
    residual = rand(5, 64, seed=6)
    got = ours.experts_add(
        run, x.half(), weights, ids, gate_up, down, *both, Stream(residual, residual[None]), alone().tp
    )  # fmt: skip
    want = provide.reference().experts_add(x, weights, ids, *wide, Stream(residual, residual), alone().tp)
    assert got.pending_TD is not None and len(got.pending_TD) > 4  # noqa: PT018 - the second needs the first
    torch.testing.assert_close(total(got), total(want), rtol=2e-2, atol=2e-2)


def test_many_positions_keep_less() -> None:
    """Beyond some hundred positions, parts are of the model's dtype and the router's product is torch's."""
    gate_up, down, *_ = weights_of(4, 32, 64, 0)
    residual, router, norm = rand(520, 64, seed=14), rand(4, 64, seed=11), torch.ones(64).half()
    r = Routing(1, "softmax", normalise=False)
    *work, stream = ours.norm_route(RUN, Stream(residual, None), norm, router, None, r, 1e-6)
    got = ours.experts_add(RUN, *work, gate_up.half(), down.half(), None, None, stream, alone().tp)
    want = moe.experts(work[0].float(), work[1], work[2], gate_up, down)
    assert got.pending_TD is not None
    assert got.pending_TD.dtype == torch.float16
    torch.testing.assert_close(got.pending_TD.sum(0).float(), want, rtol=2e-2, atol=2e-2)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows one grid at a time, and ranks are threads."""
    from triton.runtime.interpreter import GridExecutor

    lock, plain = threading.Lock(), GridExecutor.__call__

    def alone_in_it(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone_in_it)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_over_two_ranks(count: int) -> None:
    """Experts cut by width over two ranks, shared ones too, give every rank the sum of both."""
    gate_up, down, sgu, sd = weights_of(4, 32, 64, 32)
    x, (weights, ids), residual = rand(count, 64), routes(count, 2, 4), rand(count, 64, seed=6)

    def cut(rank: int) -> tuple[Tensor, ...]:
        half = slice(16 * rank, 16 * rank + 16)
        gates = torch.cat((gate_up[:, :32][:, half], gate_up[:, 32:][:, half]), 1).contiguous()
        return (
            gates,
            down[..., half].contiguous(),
            torch.cat((sgu[:32][half], sgu[32:][half])),
            sd[:, half].contiguous(),
        )

    def rank(group: Group) -> Tensor:
        stream = Stream(residual.clone(), None)
        return total(ours.experts_add(RUN, x, weights, ids, *cut(group.rank), stream, group))

    want = provide.reference().experts_add(x, weights, ids, gate_up, down, sgu, sd, Stream(residual, None), alone().tp)
    for got in Threads.of(2).run(rank):
        torch.testing.assert_close(got, total(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["v2 lite", "v3"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("shared", [0, 48])
@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_experts_spread_over_ranks(name: str, count: int, shared: int) -> None:
    """Of four ranks with two experts each, kernels and reference number and add alike; poison in experts that nobody
    chose never shows.
    """
    gate_up, down, sgu, sd = weights_of(8, 32, 64, shared)
    router, norm, residual = rand(8, 64, seed=11), 1 + 0.2 * rand(64, seed=13), rand(count, 64, seed=14)
    bias = 0.1 * rand(8, seed=12) if name == "v3" else None
    part = shared // 4

    def layer(group: Group, *, ours_too: bool) -> Tensor:
        r, held, mine = ROUTINGS[name], 8 // group.size, slice(part * group.rank, part * (group.rank + 1))
        if group.size > 1:
            r = evolve(r, first=held * group.rank, held=held)
        own = slice(held * group.rank, held * (group.rank + 1))
        more = (sgu, sd) if group.size == 1 else (
            torch.cat((sgu[:shared][mine], sgu[shared:][mine])), sd[:, mine].contiguous()
        )  # fmt: skip
        if ours_too:
            *work, stream = ours.norm_route(RUN, Stream(residual.clone(), None), norm, router, bias, r, 1e-6)
        else:
            *work, stream = provide.reference().norm_route(Stream(residual, None), norm, router, bias, r, 1e-6)
        if group.size > 1:
            assert ((work[2] >= -1) & (work[2] < held)).all()
            assert (work[2] == -1).any()
        gates = gate_up[own].clone()
        gates[sorted(set(range(held)) - set(work[2].flatten().tolist()))] = torch.nan
        weights = (gates, down[own].contiguous(), *(more if shared else (None, None)))
        call = partial(ours.experts_add, RUN) if ours_too else provide.reference().experts_add
        return total(call(*work, *weights, stream, group))

    want = layer(alone().tp, ours_too=False)
    for kernels in (False, True):
        for got in Threads.of(4).run(partial(layer, ours_too=kernels)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_not_supported_is_refused() -> None:
    """Rows that TMA can not read and a missing weight of the shared experts are refused by name."""
    gate_up, down, sgu, _ = weights_of(4, 30, 64, 32)
    x, (weights, ids) = rand(2, 64), routes(2, 2, 4)
    stream, tp = Stream(rand(2, 64), None), alone().tp
    with pytest.raises(InvalidSetting, match="rows of 30 are no multiple of 16 bytes"):
        ours.experts_add(RUN, x, weights, ids, gate_up, down, None, None, stream, tp)
    with pytest.raises(ValueError, match="one is missing"):
        ours.experts_add(RUN, x, weights, ids, gate_up, down, sgu, None, stream, tp)
    assert ours.unsupported(moe.ExpertShape(4, 2, 30), 2) == "experts of width 30: rows are no multiple of 16 bytes"
    assert ours.unsupported(moe.ExpertShape(64, 6, 1408), 2) is None


@pytest.mark.parametrize("pairs", [2, 48, 384, 1536, 3000, 49152])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles(pairs: int, itemsize: int) -> None:
    """Tiles are powers of two that fit a multiprocessor, larger for more rows."""
    t = expert_tile(pairs, 64, itemsize)
    assert all(n & (n - 1) == 0 for n in (t.rows, t.n, t.k))
    assert t.stages * t.k * (t.rows + 2 * t.n) * itemsize <= 220 << 10
    assert t.rows >= expert_tile(pairs // 2, 64, itemsize).rows
