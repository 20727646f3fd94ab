"""Rotary embedding: frequencies, table, application."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from agentinfer.ops import rope
from agentinfer.ops.norm import rms_norm
from agentinfer.ops.rope import RopeSpec

V2_LITE = RopeSpec(1e4, 64, "yarn", factor=40, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)
YARN_FREQUENCIES = [
    1.0, 0.7498942093324559, 0.5623413251903491, 0.4216965034285823, 0.31622776601683794,
    0.23713737056616555, 0.1778279410038923, 0.1333521432163324, 0.1, 0.07498942093324558,
    0.056234132519034905, 0.03900692656714386, 0.026879360111431223, 0.018378146218877827, 0.01244795587027246,
    0.008334508951020777, 0.0055, 0.0035619974943291656, 0.002249365300761396, 0.0013705136361428923,
    0.0007905694150420947, 0.0004149903984907897, 0.0001778279410038922, 3.33380358040831e-05, 2.5e-05,
    1.8747355233311396e-05, 1.4058533129758728e-05, 1.0542412585714557e-05,
    7.90569415042095e-06, 5.9284342641541385e-06,
    4.445698525097307e-06, 3.33380358040831e-06,
]  # fmt: skip


def test_yarn_of_deepseek_v2_lite() -> None:
    """NUM-01: ramp bounds 10 and 23, the 32 frequencies, cos/sin times 1, softmax scale times m^2."""
    assert rope.yarn_bounds(V2_LITE) == (10, 23)
    torch.testing.assert_close(rope.inv_freq(V2_LITE), torch.tensor(YARN_FREQUENCIES), rtol=1e-6, atol=0)
    assert rope.magnitude(V2_LITE) == 1.0
    assert math.isclose(rope.latent_softmax_scale(V2_LITE, 192), 0.11472138679292611, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "magnitude", "scale"),
    [
        (1.0, 1.0, 1.0, 0.1352337788608801),
        (1.0, 0.707, 1.0857263992561355, 0.11472138679292611),
        (0.0, 0.0, 1.3688879454113936, 0.07216878364870322),
    ],
)
def test_the_two_mscale_rules(mscale: float, all_dim: float, magnitude: float, scale: float) -> None:
    """NUM-01: cos/sin take m(mscale) / m(mscale_all_dim), the softmax scale m(mscale_all_dim)^2 and only that."""
    spec = RopeSpec(1e4, 64, "yarn", factor=40, original_max_position=4096, mscale=mscale, mscale_all_dim=all_dim)
    assert math.isclose(rope.magnitude(spec), magnitude, rel_tol=1e-12)
    assert math.isclose(rope.latent_softmax_scale(spec, 192), scale, rel_tol=1e-12)


def test_plain_yarn_and_explicit_factor() -> None:
    """Factor 4 without mscales multiplies cos and sin by 1.138629436; an explicit attention factor wins; the softmax
    scale stays.
    """
    spec = RopeSpec(1e6, 128, "yarn", factor=4, original_max_position=32768)
    assert math.isclose(rope.magnitude(spec), 1.138629436, rel_tol=1e-9)
    assert rope.latent_softmax_scale(spec, 192) == 192**-0.5
    explicit = RopeSpec(1e6, 128, "yarn", factor=4, original_max_position=32768, attention_factor=0.5)
    assert rope.magnitude(explicit) == 0.5
    torch.testing.assert_close(rope.cos_sin(explicit, 3)[0, :64], torch.full((64,), 0.5))


def test_tiny_yarn() -> None:
    """O1: dim 8, factor 4 from 16 positions ramps from 0 to 1."""
    spec = RopeSpec(1e4, 8, "yarn", factor=4, original_max_position=16, mscale=0.707, mscale_all_dim=0.707)
    assert rope.yarn_bounds(spec) == (0, 1)
    torch.testing.assert_close(rope.inv_freq(spec), torch.tensor([1.0, 0.025, 0.0025, 0.00025]), rtol=1e-6, atol=0)


def test_default_frequencies() -> None:
    """NUM-02: dim 128 and theta 1e6 give 0.8058421878 and 1.240937758e-06."""
    frequencies = rope.inv_freq(RopeSpec(1e6, 128))
    torch.testing.assert_close(frequencies[[1, 63]], torch.tensor([0.8058421878, 1.240937758e-06]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (RopeSpec(1e6, 32), {"rope_type": "default"}),
        (RopeSpec(1e6, 32, "linear", factor=4), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeSpec(5e5, 32, "llama3", factor=8, original_max_position=128, low_freq_factor=1, high_freq_factor=4),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (
            RopeSpec(1e6, 32, "yarn", factor=4, original_max_position=128),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            RopeSpec(1e4, 32, "yarn", factor=8, original_max_position=64, beta_fast=16, beta_slow=2, truncate=False),
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        ),
        (
            RopeSpec(1e4, 32, "yarn", factor=8, original_max_position=64, mscale=1, mscale_all_dim=0.707),
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.707,
            },
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-untruncated", "yarn-mscale"],
)
def test_the_table_equals_that_of_transformers(spec: RopeSpec, parameters: dict[str, Any]) -> None:
    """cos and sin of 512 positions are within 1e-5 of transformers' for every scaling kind."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": spec.theta, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512).unsqueeze(0))
    table = rope.cos_sin(spec, 512)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :16], cos[0, :, :16], rtol=0, atol=1e-5)
    torch.testing.assert_close(table[:, 16:], sin[0, :, :16], rtol=0, atol=1e-5)


def turn(x: list[float], position: int, theta: float, *, interleaved: bool) -> torch.Tensor:
    table = rope.cos_sin(RopeSpec(theta, len(x)), 16)
    q = torch.tensor(x, dtype=torch.float32).view(1, 1, -1)
    out, _ = rope.rotary_embedding(torch.tensor([position]), q, q, table, interleaved)
    return out.flatten()


@pytest.mark.parametrize(
    ("theta", "interleaved", "want"),
    [
        (1e6, False, [-1.413352520780047, 1.987991018006742, -2.828857481741469, 4.005981991013504]),
        (1e6, True, [-1.27223251272018, -1.8388649851410237, 2.987986518010117, 4.008981986513506]),
        (1e4, False, [-1.413352520780047, 1.8791180666879925, -2.828857481741469, 4.058191135400942]),
        (1e4, True, [-1.27223251272018, -1.8388649851410237, 2.87866810043698, 4.088186635603437]),
    ],
)
def test_both_pair_styles(theta: float, interleaved: bool, want: list[float]) -> None:
    """NUM-03: half-split pairs and neighbours each give their own known rotation."""
    torch.testing.assert_close(
        turn([1, 2, 3, 4], 3, theta, interleaved=interleaved), torch.tensor(want), rtol=1e-5, atol=1e-5
    )


def test_dot_products_depend_on_the_style() -> None:
    """NUM-03: q at 5 with k at 2; de-interleaving both and turning half-split equals interleaved."""
    q, k = [1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 2.0, 1.5]

    def dot(q: list[float], k: list[float], *, interleaved: bool) -> float:
        return float(turn(q, 5, 1e4, interleaved=interleaved) @ turn(k, 2, 1e4, interleaved=interleaved))

    assert math.isclose(dot(q, k, interleaved=False), -2.1562225874595407, rel_tol=1e-5)
    assert math.isclose(dot(q, k, interleaved=True), 13.092364883060048, rel_tol=1e-5)
    order = [0, 2, 1, 3]
    assert math.isclose(
        dot([q[i] for i in order], [k[i] for i in order], interleaved=False), 13.092364883060048, rel_tol=1e-5
    )


def test_norm_a_head_then_rope() -> None:
    """NUM-05: q/k norm acts on each head by itself, before rope."""
    heads = torch.tensor([[[1.0, 2, 3, 4], [4, 0, 0, 0]]])
    normed = rms_norm(heads, torch.tensor([1, 1, 2, 0.5]), 1e-6)
    want = [
        [0.3651483473268884, 0.7302966946537768, 2.1908900839613303, 0.7302966946537768],
        [1.999999750000047, 0, 0, 0],
    ]
    torch.testing.assert_close(normed[0], torch.tensor(want), rtol=1e-6, atol=1e-7)
    turned, _ = rope.rotary_embedding(
        torch.tensor([3]), normed, normed, rope.cos_sin(RopeSpec(1e6, 4), 4), interleaved=False
    )
    want = [-0.6706725503065789, 0.7281025215234879, -2.117435006280219, 0.7324842951187432]
    torch.testing.assert_close(turned[0, 0], torch.tensor(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_strides_and_bf16(interleaved: bool) -> None:
    """Only the first rope-dim numbers turn, of views too; bf16 is the float32 result rounded once."""
    table = rope.cos_sin(RopeSpec(1e4, 8), 64)
    positions = torch.tensor([0, 63, 7])
    packed = torch.randn(3, 5, 12)
    q, k = packed[:, :3], packed[:, 3:]
    before = packed.clone()
    a, b = rope.rotary_embedding(positions, q, k, table, interleaved)
    assert torch.equal(packed, before)
    assert torch.equal(a[..., 8:], q[..., 8:])
    whole, _ = rope.rotary_embedding(positions, packed[..., :8], k, table, interleaved)
    torch.testing.assert_close(torch.cat((a, b), 1)[..., :8], whole)
    assert torch.equal(a[0], q[0])
    half, _ = rope.rotary_embedding(positions, q.bfloat16(), k.bfloat16(), table, interleaved)
    exact, _ = rope.rotary_embedding(positions, q.bfloat16().float(), k, table, interleaved)
    assert torch.equal(half, exact.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "foo"}, "'foo' is unknown; known: default, linear, llama3, yarn"),
        ({"theta": 0.0}, "theta must be positive"),
        ({"theta": math.inf}, "theta must be positive and finite"),
        ({"dim": 7}, "dim must be a positive even"),
        ({"factor": -1.0}, "factor must be positive"),
    ],
)
def test_a_bad_spec_is_refused(change: dict[str, Any], message: str) -> None:
    """A field that makes no sense is refused by name."""
    with pytest.raises(ValueError, match=message):
        RopeSpec(**{"theta": 1e4, "dim": 8, **change})
