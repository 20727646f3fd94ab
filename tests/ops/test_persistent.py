"""The persistent kernel, run on a CPU thread by thread, against the reference ops in float32; and how it is cut up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, fields, frozen, has
from torch import Tensor

import emulated
from agentinfer.models import dense
from agentinfer.models.model import kv_layout, random_model, read_config
from agentinfer.ops import persistent
from agentinfer.ops.comm import alone
from agentinfer.ops.inputs import Inputs, by_hand
from agentinfer.ops.kv import KvCache, allocate, renew
from agentinfer.ops.provide import reference
from gpu_shapes import SHAPES
from tiny import write_tiny

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")


def cast(weights: Any, dtype: torch.dtype) -> Any:
    """The tree with all but the rope table in *dtype*."""
    if isinstance(weights, Tensor):
        return weights.to(dtype)
    if isinstance(weights, tuple):
        return tuple(cast(x, dtype) for x in weights)
    if has(type(weights)):
        changes = {f.name: cast(getattr(weights, f.name), dtype) for f in fields(type(weights)) if f.name != "cos_sin"}
        return evolve(weights, **changes)
    return weights


@frozen(eq=False)
class Case:
    """A model with the KV of some earlier positions, twice: bfloat16 for the kernel, float32 for the reference."""

    config: Any
    weights: Any
    truth: Any
    kv: KvCache
    true_kv: KvCache
    library: Any
    params: Any
    mailbox: persistent.Mailbox
    block_size: int


def case(
    folder: Path, block_size: int = 16, grid: int = 5, slot: int = 8192, shared: int = 98304, **config: Any
) -> Case:
    shape = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 1100, "max_position_embeddings": 4096, "num_hidden_layers": 2,
        "tie_word_embeddings": True, **config,
    }  # fmt: skip
    model, weights = random_model(read_config(write_tiny(folder / "model", **shape)), torch.float32, alone(CPU))
    weights = cast(weights, torch.bfloat16)
    layouts = kv_layout(model, 1, block_size, torch.bfloat16)
    blocks = 3200 // block_size
    kv = allocate(layouts, blocks, 1, blocks, CPU)
    true_kv = allocate(kv_layout(model, 1, block_size, torch.float32), blocks, 1, blocks, CPU)
    noise = torch.Generator().manual_seed(3)
    for mine, true in zip(kv.layers, true_kv.layers, strict=True):
        for plane, other in ((mine.k, true.k), (mine.v, true.v)):
            assert plane is not None
            assert other is not None
            plane.copy_(torch.randn(plane.shape, generator=noise))
            other.copy_(plane)
    c = model.config
    values = persistent.macros(weights, dense.local_heads(c, 1), grid, shared, slot)
    library = emulated.build(folder, values)
    mailbox = persistent.new_mailbox(values, CPU)
    assert library.num_boxes() == len(mailbox.boxes)
    params = persistent.new_params(weights, mailbox, c.norm_eps, c.scale, 10**9, 0)
    return Case(c, weights, cast(weights, torch.float32), kv, true_kv, library, params, mailbox, block_size)


def inputs(x: Case, kv: KvCache, token: int, position: int) -> tuple[Inputs, KvCache]:
    """One row whose blocks lie in no order."""
    blocks = list(range(1, len(kv.layers[0].k)))
    random.Random(1).shuffle(blocks)
    return by_hand(renew(kv, "test"), [[token]], [position], [blocks[: 1 + position // x.block_size]])


def stepped(x: Case, token: int, position: int, seed: int = 0) -> Tensor:
    at, kv = inputs(x, x.kv, token, position)
    logits = torch.zeros(1, x.config.vocab_size)
    persistent.fill(x.params, kv.layers, at, logits)
    emulated.run(x.library, x.params, seed)
    return logits


def wanted(x: Case, token: int, position: int) -> Tensor:
    at, kv = inputs(x, x.true_kv, token, position)
    return dense.forward(x.config, x.truth, reference(), alone(CPU), kv, at)[0]


def check(x: Case, token: int, position: int, seed: int = 0) -> None:
    """Logits, and the new keys and values, which are as near as rounding what they follow from allows."""
    got, want = stepped(x, token, position, seed), wanted(x, token, position)
    assert float((got - want).norm() / want.norm()) < 2e-2
    for mine, true in zip(x.kv.layers, x.true_kv.layers, strict=True):
        assert mine.v is not None
        assert true.v is not None
        for plane, other in ((mine.k, true.k), (mine.v, true.v)):
            assert float((plane.float() - other).abs().max()) < 0.05 * float(other.abs().max())
            other.copy_(plane)


@needs_compiler
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_logits_and_keys_are_the_reference_s(tmp_path: Path, shape: str) -> None:
    """Steps one after the other, without keys, with few, and with more than a slot of the ring holds."""
    x = case(tmp_path, grid=9, **SHAPES[shape])
    for seed, position in enumerate((0, 1, 5, 400)):
        check(x, 17 * seed + 1, position, seed)
    assert x.mailbox.control.tolist() == [4, 0, 0, 0]


WIDE = {
    "eight warps a row, uneven chunks": {
        "hidden_size": 264, "intermediate_size": 4104, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128, "num_hidden_layers": 1, "vocab_size": 300,
    },
    "two warps a row, groups of 7": {
        "hidden_size": 2304, "intermediate_size": 256, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 300,
    },
    "eight warps a row, whole chunks, groups of 16": {
        "hidden_size": 4096, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 1,
        "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 300,
    },
}  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("shape", sorted(WIDE))
def test_wide_models(tmp_path: Path, shape: str) -> None:
    """Rows that several warps share, heads that do, and more splits than warps."""
    x = case(tmp_path, grid=20, slot=16384, shared=131072, block_size=64, **WIDE[shape])
    check(x, 5, 700)


@needs_compiler
def test_a_lost_packet_fails_its_step_and_no_other(tmp_path: Path) -> None:
    """Whatever is lost: no logit of that step is a number, the step ends, it is told where it waited, and the next one
    is sound.
    """
    x = case(tmp_path, num_hidden_layers=1)
    for phase, name in enumerate(persistent.PHASES[1:], 1):
        x.params.lose, x.params.limit_ns = phase, 3000  # of the emulation's time: passes over the grid
        x.mailbox.control[2] = 0
        assert stepped(x, 3, 40, seed=phase).isnan().all()
        assert (persistent.where_late(x.mailbox) or "").endswith(name)
        x.params.lose, x.params.limit_ns = 0, 10**9
        x.mailbox.control[2] = 0
        check(x, 3, 40, seed=phase)
        assert persistent.where_late(x.mailbox) is None
