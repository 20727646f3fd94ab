"""Weights held in 8 bits: what is held is what is stored, whole blocks of it on every rank, and what can not be so is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

import deepseeks
from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.eight_bits import in_8_bits
from agentinfer.models.fp8 import NATIVE
from agentinfer.models.model import (
    Model,
    dummy_model,
    held,
    load_model,
    model_of_tensors,
    random_model,
    read_config,
    weight_sizes,
)
from agentinfer.models.weights import Fused, Part, Spec, part_of, tree_leaves
from agentinfer.ops.comm import Ranks, alone
from agentinfer.ops.provide import reference
from agentinfer.ops.scaled import FLOAT8, Scaled, dequantized
from agentinfer.ops.threads import Threads
from models.drive import Driver
from models.test_fp8 import CONFIG as RAGGED

CONFIG: Mapping[str, Any] = {
    **RAGGED, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 128,
    "kv_lora_rank": 160, "qk_nope_head_dim": 120, "v_head_dim": 64,
}  # fmt: skip
"""Parts of ranks are whole blocks; edges of weights are ragged where they may be."""
HELD = ("q_a_proj", "q_b_proj", "kv_a_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    packed = {}
    for key, x in deepseeks.tensors_of(CONFIG, root).items():
        packed[key] = x
        if any(part in key for part in (*HELD, "kv_b_proj")):
            packed[key], packed[key + "_scale_inv"] = deepseeks.in_8_bits(x)
    return deepseeks.write(root, CONFIG, packed)


def load(folder: Path, ranks: Ranks, fp8: str = NATIVE) -> tuple[Model, Any]:
    return load_model(folder, None, ranks, fp8=fp8)


def wide(x: Any) -> Any:
    """A tree of weights in which those of 8 bits are what they stand for, experts one under the other."""
    if isinstance(x, Scaled):
        return dequantized(x.stored.flatten(0, -2), x.scales.flatten(0, -2))
    if isinstance(x, tuple):
        return tuple(wide(part) for part in x)
    return (
        attrs.evolve(x, **{f.name: wide(getattr(x, f.name)) for f in attrs.fields(type(x))})
        if attrs.has(type(x))
        else x
    )


def flat(weights: Any) -> list[Any]:
    return [x.flatten(0, -2) if x.dim() > 2 else x for x in tree_leaves(weights)]


@pytest.mark.parametrize(("size", "ep"), [(1, False), (2, False), (2, True)])
def test_what_is_held_is_what_is_stored(folder: Path, size: int, ep: bool) -> None:
    """On every rank, cut by width or with experts whole, numbers and scales multiply out to what is held otherwise; all
    matrices but kv_b, embedding, head and router are in 8 bits.
    """

    def rank(group: Any) -> bool:
        ranks = Ranks(group, ep=ep, device=torch.device("cpu"))
        got, want = load(folder, ranks)[1], load(folder, ranks, "dequantize")[1]
        assert sum(x.dtype == FLOAT8 for x in tree_leaves(got)) == 5 + 7  # of a dense layer, and of one with experts
        return all(torch.equal(a, b) for a, b in zip(flat(wide(got)), flat(want), strict=True))

    assert Threads.of(size).run(rank) == [True] * size


@pytest.mark.parametrize("make", [load_model, dummy_model])
@pytest.mark.parametrize(("size", "ep"), [(1, False), (2, False), (2, True)])
def test_sizes(folder: Path, size: int, ep: bool, make: Any) -> None:
    """What is held has the bytes that are planned, about a byte a number, and as many parameters as ever."""
    model = read_config(folder)
    plain, planned = (weight_sizes(held(model, fp8), size, ep=ep) for fp8 in ("dequantize", NATIVE))
    assert planned.num_parameters == plain.num_parameters
    assert planned.rank_bytes < 0.45 * plain.rank_bytes  # of float32

    def rank(group: Any) -> int:
        ranks = Ranks(group, ep=ep, device=torch.device("cpu"))
        weights = make(folder, None, ranks, fp8=NATIVE)[1]
        return sum(x.nbytes for x in tree_leaves(weights)) - weights.cos_sin.nbytes

    assert Threads.of(size).run(rank) == [planned.rank_bytes] * size


def test_logits(folder: Path) -> None:
    """The reference computes what it computes of the numbers that are stood for, in chunks and token by token."""
    drivers = [Driver(*load(folder, alone(), fp8), alone(), 4, reference()) for fp8 in ("dequantize", NATIVE)]
    for tokens in (TOKENS, [7], [1, 2, 3]):
        want, got = (driver.step({1: tokens})[1] for driver in drivers)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ep", [False, True])
def test_logits_of_two_ranks(folder: Path, ep: bool) -> None:
    """Two ranks, each with its blocks, compute what one does."""

    def rank(group: Any) -> Any:
        ranks = Ranks(group, ep=ep, device=torch.device("cpu"))
        return Driver(*load(folder, ranks), ranks, 4, reference()).step({1: TOKENS})[1]

    want = Driver(*load(folder, alone()), alone(), 4, reference()).step({1: TOKENS})[1]
    for got in Threads.of(2).run(rank):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_tensors_of_a_trainer_are_rounded(folder: Path) -> None:
    """Weights in another dtype become those that the checkpoint in 8 bits was made of."""
    model = attrs.evolve(held(read_config(folder), NATIVE), dtype=torch.float32)
    tensors = deepseeks.tensors_of(CONFIG, folder)
    got = tree_leaves(model_of_tensors(model, tensors, alone()))
    want = tree_leaves(load(folder, alone())[1])
    for a, b in zip(got, want, strict=True):
        close = 0.03 if a.dim() == 3 and a.dtype == torch.float32 and a.shape[-1] == 160 else 1e-6  # kv_b is read back
        torch.testing.assert_close(a.float(), b.float(), rtol=close, atol=close)
    _, random = random_model(model, torch.float32, alone())
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(tree_leaves(random), got, strict=True))


def test_dummies(folder: Path) -> None:
    """Drawn weights of 8 bits stand for normal numbers of the deviation of others, and their blocks differ."""
    weights = dummy_model(folder, None, alone(), fp8=NATIVE)[1]
    w = weights.layers[1].ffn.gate_up
    assert len(set(w.scales.flatten().tolist())) == w.scales.numel()
    assert not w.stored.float().isnan().any()
    x = dequantized(w.stored.flatten(0, 1), w.scales.flatten(0, 1))
    assert float(x.std()) == pytest.approx(0.02, rel=0.1)
    assert abs(float(x.mean())) < 1e-3


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"moe_intermediate_size": 130}, 1, r"experts\.0\.gate_proj\.weight: 130 rows lie before others"),
        ({}, 4, r"o_proj\.weight: rank 1 of 4 would begin at 64 of 256"),
        ({"v_head_dim": 65}, 2, r"o_proj\.weight: rank 1 of 2 would begin at 130 of 260"),
        ({"qk_nope_head_dim": 88}, 2, r"q_b_proj\.weight: rank 1 of 2 would begin at 192 of 384"),
        ({"intermediate_size": 384}, 2, r"mlp\.gate_proj\.weight: rank 1 of 2 would begin at 192 of 384"),
        ({"q_lora_rank": 136}, 1, r"q_a_proj\.weight: 136 rows lie before others"),
    ],
)
def test_parts_that_are_no_whole_blocks(tmp_path: Path, change: Mapping[str, Any], size: int, message: str) -> None:
    """A rank whose part would begin inside of a block is refused by the weight's name, and so is a seam."""
    deepseeks.tensors_of({**CONFIG, **change}, tmp_path)
    model = held(read_config(tmp_path), NATIVE)
    with pytest.raises(InvalidSetting, match=rf"^fp8: native: .*{message}.* dequantize can"):
        model.packed_on(size, ep=False)


def test_heads_that_ranks_share() -> None:
    """KV heads of whole blocks may be held by several ranks, others not."""
    spec = Spec("k", (256, 64), 0, 128, share=True, quantizable=True)
    scales = in_8_bits(Fused((spec,)), 4).scales.parts[0]
    assert [part_of(scales, rank, 4) for rank in range(4)] == [
        Part(0, 1, 1),
        Part(0, 1, 1),
        Part(1, 2, 1),
        Part(1, 2, 1),
    ]
    with pytest.raises(InvalidSetting, match="k: rank 1 of 2"):
        in_8_bits(Fused((attrs.evolve(spec, shape=(64, 64), unit=64),)), 2)
    bias = attrs.evolve(spec, quantizable=False)
    assert in_8_bits(Fused((bias,)), 4) == Fused((bias,))


def test_what_can_not_be_held_so(folder: Path, tmp_path: Path) -> None:
    """A checkpoint in another dtype, a matrix in another dtype, NaN in 8 bits and a made-up way are refused by name."""
    with pytest.raises(InvalidSetting, match="fp8: 'int8' is none of dequantize, native"):
        held(read_config(folder), "int8")
    plain = deepseeks.write(tmp_path / "plain", deepseeks.V3)
    with pytest.raises(InvalidSetting, match=r"fp8: native: DeepseekV3ForCausalLM: .* not in 8 bits"):
        load(plain, alone())
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.weight"
    bad = tensors[key].clone()
    bad.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: holds NaN"):
        load(deepseeks.write(tmp_path / "nan", CONFIG, {**tensors, key: bad}), alone())
    wide = {k: x for k, x in tensors.items() if k != key + "_scale_inv"} | {key: tensors[key].float()}
    folder = deepseeks.write(tmp_path / "wide", CONFIG, wide)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is of F32: fp8 native wants it in 8 bits"):
        load(folder, alone())
    load(folder, alone(), "dequantize")
