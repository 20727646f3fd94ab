"""Logits against transformers, at every position, however a sequence is cut up; and that the metric sees faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from agentinfer.models import decoder, dense
from agentinfer.ops.custom import opaque_ops
from models import drive, tiny
from models.tiny import LENGTH, OTHERS, TOKENS

CLOSE = 1e-4


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def case(request: pytest.FixtureRequest, root: Path) -> tiny.Tiny:
    return tiny.make(request.param, root)


@cache
def wanted(model: tiny.Tiny, tokens: tuple[int, ...] = tuple(TOKENS)) -> Tensor:
    return model.logits(list(tokens))


every = pytest.mark.parametrize("case", list(tiny.CASES), indirect=True)
text = pytest.mark.parametrize("case", tiny.TEXT, indirect=True)


def run(driver: drive.Driver, sizes: list[int]) -> Tensor:
    """The logits of TOKENS, given in steps of these sizes."""
    out, at = [], 0
    for size in sizes:
        out.append(driver.step({1: TOKENS[at : at + size]})[1])
        at += size
    assert at == LENGTH
    return torch.cat(out)


@every
def test_whole(case: tiny.Tiny) -> None:
    """A prompt computed in one step has transformers' logits at all 26 positions, and they are no trivial ones."""
    want = wanted(case)
    assert len(want) >= 24
    assert float(want.std(-1).min()) > 0.1
    assert drive.worst(run(drive.load(case.folder), [LENGTH]), want) < CLOSE


@every
def test_decode(case: tiny.Tiny) -> None:
    """Computed token by token the logits are those of transformers."""
    assert drive.worst(run(drive.load(case.folder), [1] * LENGTH), wanted(case)) < CLOSE


@text
def test_chunked(case: tiny.Tiny) -> None:
    """Split in two at every point, and in threes, the logits are those of transformers."""
    loaded = drive.load(case.folder)
    for split in range(1, LENGTH):
        driver = drive.Driver(loaded.model, loaded.weights, loaded.ranks)
        assert drive.worst(run(driver, [split, LENGTH - split]), wanted(case)) < CLOSE, split
    driver = drive.Driver(loaded.model, loaded.weights, loaded.ranks, block_size=16)
    assert drive.worst(run(driver, [3] * 8 + [2]), wanted(case)) < CLOSE


@text
def test_cached_prefix(case: tiny.Tiny) -> None:
    """A row that begins with another row's full blocks has the logits of transformers after them."""
    for blocks in range(1, 7):
        driver = drive.load(case.folder)
        driver.step({1: TOKENS})
        driver.share(1, 3, blocks)
        got = driver.step({3: TOKENS[blocks * 4 :]})[3]
        assert drive.worst(got, wanted(case)[blocks * 4 :]) < CLOSE, blocks


@text
def test_batches(case: tiny.Tiny) -> None:
    """Rows of different lengths in one step, then decoding together, mixed with a chunk, have each its own logits."""
    driver = drive.load(case.folder)
    parts: dict[int, list[Tensor]] = {row: [] for row in range(1, 6)}
    sequences = {row + 1: tokens for row, tokens in enumerate([*OTHERS, TOKENS])}
    first = {4: sequences[4][:12], 1: sequences[1], 3: sequences[3][:20], 2: sequences[2][:8]}
    steps = [first, {3: sequences[3][20:21], 5: TOKENS[:15], 4: sequences[4][12:13], 2: sequences[2][8:]}]
    steps += [
        {5: TOKENS[15 + i : 16 + i], 3: sequences[3][21 + i : 22 + i], 4: sequences[4][13 + i : 14 + i]}
        for i in range(3)
    ]
    steps += [{4: sequences[4][16:17], 5: TOKENS[18:]}]
    for work in steps:
        for row, logits in driver.step(work).items():
            parts[row].append(logits)
    for row, tokens in sequences.items():
        assert drive.worst(torch.cat(parts[row]), wanted(case, tuple(tokens))) < CLOSE, row


@pytest.mark.parametrize("size", [2, 4])
@text
def test_tensor_parallel(case: tiny.Tiny, size: int) -> None:
    """Over 2 and 4 ranks (KV heads replicated, vocabulary and width padded) the logits are those of transformers."""
    steps = [{1: TOKENS[:10], 2: OTHERS[1]}, {1: TOKENS[10:24]}, {1: TOKENS[24:25]}, {1: TOKENS[25:]}]
    got = drive.tensor_parallel(case.folder, size, steps)
    assert drive.worst(torch.cat([x[1] for x in got]), wanted(case)) < CLOSE
    assert drive.worst(got[0][2], wanted(case, tuple(OTHERS[1]))) < CLOSE


EXPERTS = ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-odd", "qwen3-moe"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", EXPERTS, indirect=True)
def test_expert_parallel(case: tiny.Tiny, size: int) -> None:
    """With whole experts spread over 2 and 4 ranks the logits are those of transformers, whoever has tokens."""
    steps = [{1: TOKENS[:10], 2: OTHERS[1]}, {1: TOKENS[10:24]}, {1: TOKENS[24:25]}, {1: TOKENS[25:]}]
    got = drive.tensor_parallel(case.folder, size, steps, ep=True)
    assert drive.worst(torch.cat([x[1] for x in got]), wanted(case)) < CLOSE
    assert drive.worst(got[0][2], wanted(case, tuple(OTHERS[1]))) < CLOSE


@pytest.mark.parametrize(
    "case", ["qwen2", "qwen3-window", "llama-bias", "deepseek-v2", "deepseek-v3", "qwen3-moe"], indirect=True
)
def test_other_ops(case: tiny.Tiny) -> None:
    """Written in calls of Ops, the model runs over another maker's ops as well."""
    loaded = drive.load(case.folder)
    driver = drive.Driver(loaded.model, loaded.weights, loaded.ranks, ops=opaque_ops())
    assert drive.worst(run(driver, [20, 5, 1]), wanted(case)) < CLOSE


def layers(w: dense.Dense, change: Callable[[Any], Any]) -> dense.Dense:
    return attrs.evolve(w, layers=tuple(change(x) for x in w.layers))


def shuffled_qkv(x: Any) -> Any:
    """K rows where V rows belong."""
    q, k, v = x.qkv.split([len(x.qkv) // 2, len(x.qkv) // 4, len(x.qkv) // 4])
    return attrs.evolve(x, qkv=torch.cat((q, v, k)))


FAULTS: dict[str, tuple[str, Callable[[dense.Dense], dense.Dense]]] = {
    "bias dropped": ("qwen2", lambda w: layers(w, lambda x: attrs.evolve(x, qkv_bias=None))),
    "o bias dropped": ("qwen3-bias", lambda w: layers(w, lambda x: attrs.evolve(x, o_bias=None))),
    "mlp bias dropped": ("llama-bias", lambda w: layers(w, lambda x: attrs.evolve(x, gate_up_bias=None))),
    "q_norm ignored": ("qwen3", lambda w: layers(w, lambda x: attrs.evolve(x, q_norm=torch.ones(16)))),
    "k_norm ignored": ("qwen3", lambda w: layers(w, lambda x: attrs.evolve(x, k_norm=torch.ones(16)))),
    "no qk norm": ("qwen3", lambda w: layers(w, lambda x: attrs.evolve(x, q_norm=None, k_norm=None))),
    "norm of the next layer": (
        "llama",
        lambda w: layers(w, lambda x: attrs.evolve(x, attn_norm=w.layers[1].attn_norm)),
    ),
    "k and v swapped": ("llama", lambda w: layers(w, shuffled_qkv)),
    "gate and up swapped": ("llama", lambda w: layers(w, lambda x: attrs.evolve(x, gate_up=x.gate_up.roll(80, 0)))),
    "cos and sin swapped": ("llama", lambda w: attrs.evolve(w, cos_sin=w.cos_sin.roll(6, 1))),
    "embedding as head": ("llama", lambda w: attrs.evolve(w, head=w.embed)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_metric_sees_weight_faults(fault: str, root: Path) -> None:
    """Each fault of the weights moves some logit far more than the tolerance: parity is a test that can fail."""
    name, break_it = FAULTS[fault]
    case = tiny.make(name, root)
    good = drive.load(case.folder)
    bad = drive.Driver(good.model, break_it(good.weights), good.ranks)
    assert drive.worst(run(bad, [LENGTH]), wanted(case)) > 0.05


CONFIG_FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "theta": ("qwen3", lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, theta=1e4))),
    "yarn ignored": ("qwen2-tied-yarn", lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, kind="default"))),
    "yarn magnitude": ("qwen2-tied-yarn", lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, attention_factor=1.0))),
    "llama3 ignored": ("llama-llama3", lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, kind="default"))),
    "linear ignored": ("llama-linear", lambda c: attrs.evolve(c, rope=attrs.evolve(c.rope, kind="default"))),
    "window ignored": ("qwen2-window", lambda c: attrs.evolve(c, windows=(None, None))),
    "window of the wrong layer": ("qwen2-window", lambda c: attrs.evolve(c, windows=(5, None))),
    "window off by one": ("qwen3-window", lambda c: attrs.evolve(c, windows=(6, None))),
    "eps": ("llama", lambda c: attrs.evolve(c, norm_eps=1e-2)),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_metric_sees_config_faults(fault: str, root: Path) -> None:
    """Each misread field of the config moves some logit far more than the tolerance."""
    name, misread = CONFIG_FAULTS[fault]
    case = tiny.make(name, root)
    good = drive.load(case.folder)
    model = attrs.evolve(good.model, config=misread(good.model.config))
    packed = decoder.Weights(good.weights.embed, good.weights.layers, good.weights.norm, good.weights.head)
    bad = drive.Driver(model, model.ready(model.config, packed, 64), good.ranks)
    got = run(bad, [LENGTH])
    assert drive.worst(got, wanted(case)) > 0.01
    if fault == "theta":
        assert drive.worst(got[:1], wanted(case)[:1]) < CLOSE  # no rope fault shows at position 0
