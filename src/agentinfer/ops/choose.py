"""Who computes: from a provider's name, or "auto", and what it would work on, to Ops and the reason for each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from attrs import frozen

from agentinfer.errors import InvalidSetting
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.provide import LayerShape, Ops, reference

AUTO: Final = "auto"
HALVES: Final = (torch.bfloat16, torch.float16)
UNRUN: Final = MappingProxyType(
    {
        "torch": "needs torch 2.13; this version was measured with 2.11: its calls are tested, not run",
    }
)
"""Providers whose kernels this version has never run, and why."""


@frozen
class Site:
    """What the ops would work on, and where."""

    device: torch.device
    dtype: torch.dtype
    shape: HeadShape
    block_size: int
    capability: tuple[int, int] | None = None
    """Of the CUDA device; None on others."""
    latent: LatentShape | None = None
    """Of latent attention; *shape* is then that of its absorbed form."""
    experts: ExpertShape | None = None
    scaled: bool = False
    """Weights are in 8 bits."""

    @classmethod
    def of(
        cls, device: torch.device, dtype: torch.dtype, shape: HeadShape | LayerShape, block_size: int, *,
        scaled: bool = False,
    ) -> Site:  # fmt: skip
        """The site, with the capability that its device has."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if isinstance(shape, HeadShape):
            return cls(device, dtype, shape, block_size, capability, scaled=scaled)
        return cls(device, dtype, shape.heads, block_size, capability, shape.latent, shape.experts, scaled)


def _first(*rules: tuple[bool, str]) -> str | None:
    """The message of the first rule that does not hold."""
    return next((message for holds, message in rules if not holds), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _installed(module: str) -> bool:
    return find_spec(module) is not None


def _heads(site: Site, *, most: int, multiple: int) -> tuple[bool, str]:
    dim = site.shape.head_dim
    return dim <= most and dim % multiple == 0, f"head_dim {dim} is no multiple of {multiple} up to {most}"


def _blocks(site: Site, multiple: int) -> tuple[bool, str]:
    return site.block_size % multiple == 0, f"block_size {site.block_size} is no multiple of {multiple}"


def _cuda(site: Site, *majors: int) -> tuple[bool, str]:
    if site.capability is None:
        return False, f"the device is {site.device.type}, its kernels need CUDA"
    wanted = " or ".join(f"{major}.x" for major in majors)
    return site.capability[0] in majors, f"compute capability {site.capability[0]}.{site.capability[1]}, not {wanted}"


def _halves(site: Site) -> tuple[bool, str]:
    return site.dtype in HALVES, f"dtype {_name(site.dtype)} is neither bfloat16 nor float16"


def _no_reference(site: Site) -> str | None:
    del site
    return None


def _no_triton(site: Site) -> str | None:
    problem = _first(
        (_installed("triton"), "triton is not installed"),
        _cuda(site, 8, 9, 10, 12),
        (site.dtype in (*HALVES, torch.float32), f"dtype {_name(site.dtype)} has no kernels"),
        _blocks(site, 16),
    )
    return problem or _no_triton_heads(site) or _no_triton_experts(site) or _no_triton_scaled(site)


def _no_triton_heads(site: Site) -> str | None:
    if site.latent is not None:
        return import_module("agentinfer.ops.latent").unsupported(site.latent)
    group, rest = divmod(site.shape.num_heads, site.shape.num_kv_heads)
    return _first(
        (site.shape.head_dim in (64, 128), f"head_dim {site.shape.head_dim} is neither 64 nor 128"),
        (rest == 0 and group <= 16, f"{site.shape.num_heads} query heads over {site.shape.num_kv_heads} KV heads"),
    )


def _no_triton_experts(site: Site) -> str | None:
    if site.experts is None:
        return None
    hopper, problem = _cuda(site, 9, 10, 12)
    if not hopper:
        return f"experts need TMA: {problem}"
    return import_module("agentinfer.ops.experts").unsupported(site.experts, site.dtype.itemsize)


def _no_triton_scaled(site: Site) -> str | None:
    hopper, problem = _cuda(site, 9, 10, 12)
    return None if hopper or not site.scaled else f"weights in 8 bits need TMA: {problem}"


def _no_vllm(site: Site) -> str | None:
    return _first(
        (_installed("vllm"), "vllm is not installed"),
        _cuda(site, 9),
        _halves(site),
        _heads(site, most=256, multiple=8),
        _blocks(site, 16),
        # It reads larger blocks whole: a NaN that a failed sequence left behind the last key would spread.
        (site.block_size <= 64, f"block_size {site.block_size} is more than 64"),
    )


def _no_flash_attn(site: Site) -> str | None:
    return _first(
        (_installed("flash_attn"), "flash-attn is not installed"),
        _cuda(site, 8, 9, 10, 12),
        _halves(site),
        _heads(site, most=256, multiple=8),
        _blocks(site, 256),
    )


def _no_torch(site: Site) -> str | None:
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    return _first(
        (version >= (2, 13), f"torch {torch.__version__}, its paged varlen_attn came with 2.13"),
        _cuda(site, 8, 9, 10, 12),
        _halves(site),
        _heads(site, most=256, multiple=8),
        _blocks(site, 256),
    )


def _no_persistent(site: Site) -> str | None:
    return _first(
        (_installed("cuda") and _installed("cuda.bindings"), "cuda-bindings is not installed"),
        _cuda(site, 9),
        (site.dtype == torch.bfloat16, f"dtype {_name(site.dtype)}, not bfloat16"),
    ) or _no_triton(site)


def _no_vllm_latent(site: Site) -> str | None:
    """What both of vLLM's kernels for latents need: of the site, and of Triton's kernels around them."""
    if site.latent is None:
        return "the model has no latent attention"
    return (
        _first((_installed("vllm"), "vllm is not installed"), _cuda(site, 9), _halves(site))
        or import_module("agentinfer.ops.vllm_latent").unsupported(site.latent)
        or _no_triton(site)
    )


def _no_fa3_mla(site: Site) -> str | None:
    # Of many heads it reads blocks of 64 whole: a NaN that a failed sequence left behind the last key would spread.
    size = site.block_size
    return _no_vllm_latent(site) or _first((size in (16, 32), f"block_size {size} is neither 16 nor 32"))


def _no_flashmla(site: Site) -> str | None:
    return _no_vllm_latent(site) or _first((site.block_size == 64, f"block_size {site.block_size} is not 64"))


def _no_vllm_moe(site: Site) -> str | None:
    return _first(
        (site.experts is not None, "the model has no experts"),
        (_installed("vllm"), "vllm is not installed"),
        _cuda(site, 9),
        _halves(site),
    ) or _no_triton(site)


RULES: Final[Mapping[str, Callable[[Site], str | None]]] = MappingProxyType(
    {
        "reference": _no_reference,
        "triton": _no_triton,
        "persistent": _no_persistent,
        "vllm": _no_vllm,
        "flash-attn": _no_flash_attn,
        "torch": _no_torch,
        "fa3-mla": _no_fa3_mla,
        "flashmla": _no_flashmla,
        "vllm-moe": _no_vllm_moe,
    }
)
"""Of each provider: why it can not work on a site; None if it can."""
NAMES: Final = (AUTO, *RULES)
ON_TOP: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "persistent": ("row_step", "for steps of one row"),
        "fa3-mla": ("attend_latent", "for steps of one query a row"),
        "flashmla": ("attend_latent", "for steps of one query a row"),
        "vllm-moe": ("experts_add", "for several positions"),
    }
)
"""Providers of one call, and when it is theirs: all else is what auto takes."""
LATENT: Final = ("reference", "triton", "fa3-mla", "flashmla", "vllm-moe")
"""Providers for models with latent attention."""
EXPERTS: Final = LATENT
"""Providers for models with experts."""
SCALED: Final = ("reference", "triton", "fa3-mla", "flashmla")
"""Providers for weights in 8 bits."""
SAMPLING: Final = ("sample", "sample_rows", "part_rows", "edit_rows", "enter_rows")
"""The calls that choose tokens, and what is done to logits before."""
ATTENTIONS: Final = ("vllm", "flash-attn", "torch")
"""Providers that do not sample, and whose layers ask nothing of the host: with sampling they can be captured."""


def refusal(name: str, site: Site) -> str | None:
    """Why the provider *name* can not work on *site*; None if it can. Loads nothing."""
    return _first(
        (site.latent is None or name in LATENT, "no latent attention yet"),
        (site.experts is None or name in EXPERTS, "no experts yet"),
        (not site.scaled or name in SCALED, "no products with weights in 8 bits yet (fp8 native)"),
    ) or RULES[name](site)


def _make_reference(site: Site) -> Ops:
    del site
    return reference()


def _make_triton(site: Site) -> Ops:
    return import_module("agentinfer.ops.triton_ops").triton_ops(site.device)


def _make_persistent(site: Site) -> Ops:
    return import_module("agentinfer.ops.persistent").persistent_ops(_auto(site)[0], site.device)


def _make_vllm(site: Site) -> Ops:
    del site
    return import_module("agentinfer.ops.vllm_ops").vllm_ops()


def _make_flash_attn(site: Site) -> Ops:
    del site
    return import_module("agentinfer.ops.flash_attn_ops").flash_attn_ops(import_module("flash_attn"))


def _make_torch(site: Site) -> Ops:
    del site
    module = import_module("agentinfer.ops.torch_ops")
    return module.torch_ops(module.paged_varlen_attn())


def _make_latent(site: Site, name: str) -> Ops:
    pdl = import_module("agentinfer.ops.kernels.launch").launches_dependents(site.device)
    return import_module("agentinfer.ops.vllm_latent").with_latent(_auto(site)[0], name, pdl=pdl)


def _make_vllm_moe(site: Site) -> Ops:
    run = import_module("agentinfer.ops.triton_ops").launch_on(site.device)
    return import_module("agentinfer.ops.vllm_moe").with_experts(_auto(site)[0], run)


MAKERS: Final[Mapping[str, Callable[[Site], Ops]]] = MappingProxyType(
    {
        "reference": _make_reference,
        "triton": _make_triton,
        "persistent": _make_persistent,
        "vllm": _make_vllm,
        "flash-attn": _make_flash_attn,
        "torch": _make_torch,
        "fa3-mla": partial(_make_latent, name="fa3-mla"),
        "flashmla": partial(_make_latent, name="flashmla"),
        "vllm-moe": _make_vllm_moe,
    }
)


def calls() -> tuple[str, ...]:
    """The names of what all Ops have."""
    others = ("name", "primitives", "traced", "row_step")
    return tuple(field.name for field in attrs.fields(Ops) if field.name not in others)


def choose(
    name: str, device: torch.device, dtype: torch.dtype, shape: HeadShape | LayerShape, block_size: int, *,
    scaled: bool = False,
) -> tuple[Ops, Mapping[str, str]]:  # fmt: skip
    """The Ops of the provider *name*, and of each of its calls who computes it and why.

    "auto": the reference on a CPU; on CUDA Triton's, with vLLM's FlashAttention-3 for steps of several queries a row
    where it is there, and the reference where Triton's rules do not hold. *scaled*: weights are in 8 bits, for which
    the reference is no choice of a GPU's. Raises InvalidSetting if there is no such provider, or if its rules do not
    hold.
    """
    return chosen(name, Site.of(device, dtype, shape, block_size, scaled=scaled))


def chosen(name: str, site: Site) -> tuple[Ops, Mapping[str, str]]:
    """`choose` on a site."""
    if name not in NAMES:
        raise InvalidSetting("ops", f"{name!r} is none of {', '.join(NAMES)}")
    if name == AUTO:
        return _auto(site)
    problem = refusal(name, site)
    if problem is not None:
        raise InvalidSetting("ops", f"{name}: {problem}")
    asked = f"{name}: asked for"
    if name in ON_TOP:
        call, when = ON_TOP[name]
        return MAKERS[name](site), MappingProxyType({**_auto(site)[1], call: f"{asked}, {when}"})
    others = {
        "triton": asked,
        "vllm": "torch: vllm's kernels are those of a layer",
        "flash-attn": "reference: flash-attn brings attention alone",
        "torch": "reference: torch's varlen_attn is attention alone",
    }
    layer = dict.fromkeys(("norm_qkv", "norm_gate_up", "norm_head"), asked) if name == "vllm" else {}
    ops, why = MAKERS[name](site), {"attend": asked, **layer}
    if name in ATTENTIONS and refusal("triton", site) is None:
        ours = MAKERS["triton"](site)
        ops = attrs.evolve(ops, **_sampling(ours))
        why |= dict.fromkeys(SAMPLING, f"triton: {name} does not sample, and graphs need it on the device")
    return ops, _because(others.get(name, asked), **why, **_lacking(name))


def _sampling(ops: Ops) -> Mapping[str, Any]:
    """What chooses tokens in *ops*."""
    return {name: getattr(ops, name) for name in SAMPLING}


def _because(reason: str, **others: str) -> Mapping[str, str]:
    return MappingProxyType({**dict.fromkeys(calls(), reason), **others})


def _lacking(name: str) -> Mapping[str, str]:
    """The calls that the provider *name* has not, for a site that needs none of them."""
    gone = [(call, "latent attention") for call in ("norm_latent", "attend_latent") if name not in LATENT]
    gone += [(call, "experts") for call in ("norm_route", "experts_add") if name not in EXPERTS]
    return {call: f"nobody: {name} has no {what} yet" for call, what in gone}


def _auto(site: Site) -> tuple[Ops, Mapping[str, str]]:
    if site.device.type == "cpu":
        return reference(), _because("reference: the device is a CPU")
    problem = refusal("triton", site)
    if problem is not None and site.scaled:
        raise InvalidSetting("fp8", f"native: triton can not, {problem}")
    if problem is not None:
        return reference(), _because(f"reference: triton can not, {problem}")
    ops = MAKERS["triton"](site)
    ours = "triton: this package's own kernels, the default on CUDA"
    problem = refusal("vllm", attrs.evolve(site, experts=None, scaled=False))  # its attention alone is wanted
    if problem is None:
        try:
            both = _with_fa3(ops)
        except InvalidSetting as error:
            problem = str(error)
        else:
            parts = "triton for one query a row; vllm's FlashAttention-3 for several"
            return both, _because(ours, attend=parts, **_lacking("triton"))
    return ops, _because(ours, attend=f"{ours}; no FlashAttention-3: {problem}", **_lacking("triton"))


def _with_fa3(ops: Ops) -> Any:
    return import_module("agentinfer.ops.vllm_ops").with_fa3(ops)


def choose_traced(
    name: str, device: torch.device, dtype: torch.dtype, shape: HeadShape | LayerShape, block_size: int, *,
    scaled: bool = False,
) -> Ops:  # fmt: skip
    """Ops that torch.compile can trace whole: plain torch, but for attention, which is the provider's called *name*.

    "auto": as `choose`. Raises InvalidSetting: of `ops` as `choose` does, of `compile` for a provider whose attention
    is no operator.
    """
    return traced_on(name, Site.of(device, dtype, shape, block_size, scaled=scaled))


def traced_on(name: str, site: Site) -> Ops:
    """`choose_traced` on a site."""
    if site.latent is not None or site.experts is not None:
        what = "latent attention" if site.latent is not None else "experts"
        raise InvalidSetting("compile", f"torch.compile can not trace {what} yet")
    if site.scaled:
        raise InvalidSetting("compile", "torch.compile can not trace products with weights in 8 bits yet (fp8 native)")
    if site.device.type == "cpu" and name in (AUTO, "reference"):
        return import_module("agentinfer.ops.custom").opaque_ops()
    if name in RULES and name not in ("triton", "vllm"):
        raise InvalidSetting(
            "compile", f"the attention of {name} is no operator here: ops must be auto, triton or vllm"
        )
    chosen(name, site)  # raises if its rules do not hold
    ours, _ = chosen("triton", site)
    traced = _traced_with_fa3(name, site)
    ops = traced or _opaque_gpu(fa3=False)
    return attrs.evolve(ops, **_sampling(ours))


def _traced_with_fa3(name: str, site: Site) -> Ops | None:
    """For who asked for vllm, or for the best where it is there."""
    if name == "triton" or refusal("vllm", site) is not None:
        return None
    try:
        return _opaque_gpu(fa3=True)
    except InvalidSetting:
        if name == "vllm":
            raise
        return None


def _opaque_gpu(*, fa3: bool) -> Ops:
    return import_module("agentinfer.ops.custom_gpu").opaque_gpu_ops(fa3=fa3)
