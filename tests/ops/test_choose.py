"""Which provider computes: the rules of each, and what "auto" makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from agentinfer.errors import InvalidSetting
from agentinfer.ops import choose
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import Site
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.provide import LayerShape, Ops, lacking, reference

HOPPER = Site(torch.device("cuda"), torch.bfloat16, HeadShape(32, 8, 128), 16, (9, 0))
CPU = torch.device("cpu")


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every package is there, and makers give ops of their names."""
    monkeypatch.setattr(choose, "_installed", lambda _: True)
    monkeypatch.setattr(choose.torch, "__version__", "2.13.0")
    made = {name: evolve(reference(), name=name) for name in choose.RULES}
    monkeypatch.setattr(choose, "MAKERS", {name: lambda _, ops=ops: ops for name, ops in made.items()})
    monkeypatch.setattr(choose, "_with_fa3", lambda ops: evolve(ops, name=ops.name + "+fa3"))
    return made


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("triton", {"block_size": 24}, "block_size 24"),
        ("triton", {"shape": HeadShape(8, 8, 96)}, "head_dim 96"),
        ("triton", {"shape": HeadShape(34, 2, 64)}, "34 query heads"),
        ("triton", {"dtype": torch.float64}, "float64"),
        ("triton", {"device": CPU, "capability": None}, "cpu"),
        ("persistent", {"dtype": torch.float16}, "float16, not bfloat16"),
        ("persistent", {"capability": (10, 0)}, "capability 10.0"),
        ("persistent", {"shape": HeadShape(8, 8, 96)}, "head_dim 96"),
        ("vllm", {"dtype": torch.float32}, "float32"),
        ("vllm", {"capability": (8, 0)}, "capability 8.0"),
        ("vllm", {"block_size": 8}, "block_size 8"),
        ("vllm", {"shape": HeadShape(8, 8, 300)}, "head_dim 300"),
        ("flash-attn", {}, "block_size 16 is no multiple of 256"),
        ("flash-attn", {"block_size": 256, "dtype": torch.float32}, "float32"),
        ("torch", {}, "block_size 16 is no multiple of 256"),
        ("torch", {"block_size": 256, "capability": (7, 5)}, "capability 7.5"),
        ("fa3-mla", {}, "the model has no latent attention"),
        ("flashmla", {}, "the model has no latent attention"),
        ("vllm-moe", {}, "the model has no experts"),
    ],
)
def test_a_broken_rule_is_named(everything: object, name: str, change: dict[str, Any], message: str) -> None:
    """A provider that can not work on the site raises InvalidSetting with its name and the rule."""
    with pytest.raises(InvalidSetting, match=f"{name}: .*{message}"):
        choose.chosen(name, evolve(HOPPER, **change))


def test_what_is_not_installed_and_what_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package and an old torch are named, and so is a name that no provider has."""
    monkeypatch.setattr(choose, "_installed", lambda _: False)
    monkeypatch.setattr(choose.torch, "__version__", "2.11.0+cu130")
    for name in ("triton", "vllm", "flash-attn"):
        assert choose.refusal(name, HOPPER) == f"{name} is not installed"
    for name in ("fa3-mla", "flashmla", "vllm-moe"):
        assert choose.refusal(name, on_hopper(SHAPES[1][0])) == "vllm is not installed"
    assert choose.refusal("persistent", HOPPER) == "cuda-bindings is not installed"
    assert "2.11.0+cu130" in (choose.refusal("torch", HOPPER) or "")
    with pytest.raises(InvalidSetting, match="'magic' is none of auto, reference, triton"):
        choose.chosen("magic", HOPPER)


def test_every_provider_can_be_asked_for(everything: dict[str, Any]) -> None:
    """Where its rules hold a provider is what one gets by its name, with a reason for every call; who does not sample
    gets Triton's sampling.
    """
    for name in set(choose.RULES) - set(choose.ON_TOP):
        ops, why = choose.chosen(name, evolve(HOPPER, block_size=64 if name == "vllm" else 256))
        assert ops.name == name
        assert ops.attend is everything[name].attend
        assert why["sample"].startswith("triton" if name != "reference" else "reference")
        assert tuple(why) == choose.calls()
        assert why["attend"] == f"{name}: asked for"


@pytest.mark.parametrize(
    ("name", "call", "when"),
    [
        ("persistent", "row_step", "for steps of one row"),
        ("fa3-mla", "attend_latent", "for steps of one query a row"),
        ("flashmla", "attend_latent", "for steps of one query a row"),
        ("vllm-moe", "experts_add", "for several positions"),
    ],
)  # fmt: skip
def test_who_brings_one_call_comes_on_top_of_auto(everything: object, name: str, call: str, when: str) -> None:
    """One call is theirs; all else is done, for the same reasons, by what auto would take."""
    del everything
    site = HOPPER if name == "persistent" else on_hopper(SHAPES[1][0])
    site = evolve(site, block_size=64) if name == "flashmla" else site
    ops, why = choose.chosen(name, site)
    assert ops.name == name
    assert why == {**choose.chosen("auto", site)[1], call: f"{name}: asked for, {when}"}


def test_blocks_that_flash_attention_3_reads_whole_are_refused(everything: object) -> None:
    """vllm takes blocks of up to 64 tokens: of larger ones it reads what lies behind the last key."""
    del everything
    assert choose.refusal("vllm", evolve(HOPPER, block_size=64)) is None
    assert "128" in (choose.refusal("vllm", evolve(HOPPER, block_size=128)) or "")


def test_auto(everything: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is Triton with FlashAttention-3 for prefill on Hopper, Triton alone without vllm, the reference where Triton
    can not, and on a CPU.
    """
    ops, why = choose.chosen("auto", HOPPER)
    assert ops.name == "triton+fa3"
    assert "FlashAttention-3" in why["attend"]
    assert why["norm_qkv"].startswith("triton: ")
    for site in (evolve(HOPPER, dtype=torch.float32), evolve(HOPPER, capability=(8, 0))):
        ops, why = choose.chosen("auto", site)
        assert ops.name == "triton"
        assert "no FlashAttention-3" in why["attend"]
    ops, why = choose.chosen("auto", evolve(HOPPER, block_size=8))
    assert ops.name == "reference"
    assert "block_size 8" in why["attend"]

    def broken(_: object) -> None:
        raise InvalidSetting("ops", "vllm: it does not load")

    monkeypatch.setattr(choose, "_with_fa3", broken)
    ops, why = choose.chosen("auto", HOPPER)
    assert ops.name == "triton"
    assert "it does not load" in why["attend"]
    ops, why = choose.choose("auto", CPU, torch.float32, HeadShape(4, 2, 16), 4)
    assert ops.name == "reference"
    assert set(why.values()) == {"reference: the device is a CPU"}


LATENT = LatentShape(16, 128, 64, 512, 128)
EXPERTS = ExpertShape(64, 6, 1408)


SHAPES = [
    (LayerShape(HeadShape(16, 1, 576), LATENT, None), "latent attention"),
    (LayerShape(HeadShape(16, 1, 576), LATENT, EXPERTS), "latent attention"),
    (LayerShape(HeadShape(32, 8, 128), None, EXPERTS), "experts"),
]


def on_hopper(shape: LayerShape) -> Site:
    return evolve(HOPPER, shape=shape.heads, latent=shape.latent, experts=shape.experts)


@pytest.mark.parametrize(("shape", "what"), SHAPES)
def test_latents_and_experts(everything: object, shape: LayerShape, what: str) -> None:
    """Triton and the reference have latent attention and experts, auto is Triton's, with FlashAttention-3 where keys
    are no latents; others refuse, and so does compile mode.
    """
    del everything
    site = on_hopper(shape)
    ops, why = choose.chosen("auto", site)
    assert ops.name == ("triton" if site.latent else "triton+fa3")
    assert why["attend_latent"].startswith("triton: ")
    assert why["experts_add"].startswith("triton: ")
    for name in ("persistent", "vllm", "flash-attn", "torch"):
        with pytest.raises(InvalidSetting, match=f"{name}: no {what} yet"):
            choose.chosen(name, site)
    with pytest.raises(InvalidSetting, match=f"compile: .*{what}"):
        choose.traced_on("reference", evolve(site, device=CPU, capability=None))
    assert Site.of(CPU, torch.float32, shape, 16).latent is shape.latent
    assert choose.choose("auto", CPU, torch.float32, shape, 4)[0].name == "reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": evolve(LATENT, nope_dim=96)}, "qk_nope_head_dim 96 is no power of two from 16 to 256"),
        ({"latent": evolve(LATENT, rope_dim=8)}, "qk_rope_head_dim 8"),
        ({"latent": evolve(LATENT, latent_dim=1024)}, "kv_lora_rank 1024"),
        ({"latent": evolve(LATENT, value_dim=100)}, "v_head_dim 100"),
        ({"experts": evolve(EXPERTS, width=1404)}, "experts of width 1404"),
        ({"capability": (8, 0)}, "experts need TMA: compute capability 8.0"),
        ({"block_size": 4}, "block_size 4"),
    ],
)
def test_latents_and_experts_that_triton_refuses(everything: object, change: dict[str, Any], message: str) -> None:
    """Triton names the width that it has no program for; auto is then the reference and says so."""
    del everything
    site = evolve(on_hopper(SHAPES[1][0]), **change)
    with pytest.raises(InvalidSetting, match=f"triton: {message}"):
        choose.chosen("triton", site)
    ops, why = choose.chosen("auto", site)
    assert ops.name == "reference"
    assert why["attend"].startswith(f"reference: triton can not, {message}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fa3-mla", {"block_size": 64}, "block_size 64 is neither 16 nor 32"),
        ("fa3-mla", {"latent": evolve(LATENT, rope_dim=32)}, "qk_rope_head_dim 32 are not 512 and 64"),
        ("fa3-mla", {"latent": evolve(LATENT, nope_dim=96)}, "qk_nope_head_dim 96 is no power of two"),
        ("flashmla", {}, "block_size 16 is not 64"),
        ("flashmla", {"block_size": 64, "latent": evolve(LATENT, latent_dim=256)}, "kv_lora_rank 256"),
        ("flashmla", {"block_size": 64, "dtype": torch.float32}, "float32"),
        ("flashmla", {"block_size": 64, "capability": (10, 0)}, "capability 10.0"),
        ("vllm-moe", {"dtype": torch.float32}, "float32"),
        ("vllm-moe", {"capability": (12, 0)}, "capability 12.0"),
        ("vllm-moe", {"experts": evolve(EXPERTS, width=1404)}, "experts of width 1404"),
    ],
)
def test_latents_and_experts_that_vllm_refuses(
    everything: object, name: str, change: dict[str, Any], message: str
) -> None:  # fmt: skip
    """Its kernels for latents and experts, and ours around them, name the rule that does not hold."""
    del everything
    with pytest.raises(InvalidSetting, match=f"{name}: .*{message}"):
        choose.chosen(name, evolve(on_hopper(SHAPES[1][0]), **change))


def test_who_lacks_a_call_says_so(everything: object) -> None:
    """On a dense site nobody computes experts and latent attention for vllm, which the table of reasons tells."""
    del everything
    _, why = choose.chosen("vllm", HOPPER)
    assert why["attend_latent"] == "nobody: vllm has no latent attention yet"
    assert why["experts_add"] == "nobody: vllm has no experts yet"
    ops = lacking("vllm", "experts")
    with pytest.raises(InvalidSetting, match="ops: vllm: no experts yet"):
        ops(1, 2, 3)


def test_makers_make_what_they_say() -> None:
    """The reference is made as asked for; providers without their package fail by an import, not by a wrong result."""
    assert choose.MAKERS["reference"](HOPPER).name == "reference"
    with pytest.raises(InvalidSetting, match="vllm"):
        choose.MAKERS["vllm"](HOPPER)
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        choose.MAKERS["flash-attn"](HOPPER)


def test_ops_that_a_compiler_can_trace(everything: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, auto and vllm attend by FlashAttention-3 where it is there, triton by tiles, all sample by Triton; a
    CPU has operators of the reference, and other providers, broken rules and unknown names are refused.
    """
    missing: list[str] = []

    def opaque_gpu(*, fa3: bool) -> Ops:
        if fa3 and missing:
            raise InvalidSetting("ops", missing[0])
        return evolve(reference(), name=f"fa3 {fa3}")

    monkeypatch.setattr(choose, "_opaque_gpu", opaque_gpu)
    ours, _ = choose.chosen("triton", HOPPER)
    for name, site, want in [
        ("auto", HOPPER, True), ("vllm", HOPPER, True), ("triton", HOPPER, False),
        ("auto", evolve(HOPPER, dtype=torch.float32), False),
    ]:  # fmt: skip
        ops = choose.traced_on(name, site)
        assert ops.name == f"fa3 {want}"
        assert ops.sample_rows is ours.sample_rows
    missing.append("vllm: it does not load")
    assert choose.traced_on("auto", HOPPER).name == "fa3 False"
    for name, site, message in [
        ("vllm", HOPPER, "ops: vllm: it does not load"), ("vllm", evolve(HOPPER, dtype=torch.float32), "ops: vllm: "),
        ("reference", HOPPER, "compile: .*reference"), ("flash-attn", HOPPER, "compile: .*flash-attn"),
        ("magic", HOPPER, "ops: 'magic'"), ("auto", evolve(HOPPER, block_size=8), "ops: triton: block_size 8"),
    ]:  # fmt: skip
        with pytest.raises(InvalidSetting, match=message):
            choose.traced_on(name, site)
    ops = choose.choose_traced("auto", CPU, torch.float32, HeadShape(4, 2, 16), 4)
    assert ops.name == "opaque"
    assert ops.traced is not None


SCALED = evolve(on_hopper(SHAPES[1][0]), scaled=True)


def test_weights_in_8_bits(everything: object) -> None:
    """Auto, Triton and who replaces attention alone take them, on GPUs that have TMA; others refuse, and nobody falls
    back to the reference on a GPU.
    """
    del everything
    for name in ("auto", "triton", "fa3-mla", "flashmla", "reference"):
        assert choose.chosen(name, evolve(SCALED, block_size=64 if name == "flashmla" else 16))[0].name
    for name, site in (("vllm", evolve(HOPPER, scaled=True)), ("vllm-moe", SCALED), ("persistent", SCALED)):
        with pytest.raises(InvalidSetting, match=f"^ops: {name}: no "):
            choose.chosen(name, site)
    dense = evolve(HOPPER, scaled=True, capability=(8, 9))
    with pytest.raises(InvalidSetting, match=r"^ops: triton: weights in 8 bits need TMA: .* 8\.9"):
        choose.chosen("triton", dense)
    with pytest.raises(InvalidSetting, match=r"^fp8: native: triton can not, weights in 8 bits need TMA"):
        choose.chosen("auto", dense)
    assert "FlashAttention-3" in choose.chosen("auto", evolve(HOPPER, scaled=True))[1]["attend"]
    with pytest.raises(InvalidSetting, match=r"^compile: .* weights in 8 bits yet \(fp8 native\)"):
        choose.choose_traced("auto", CPU, torch.float32, HeadShape(4, 2, 16), 4, scaled=True)
    assert choose.choose("auto", CPU, torch.float32, HeadShape(4, 2, 16), 4, scaled=True)[0].name == "reference"
