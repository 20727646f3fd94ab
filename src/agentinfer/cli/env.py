"""`agentinfer env`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, cast

import attrs
import torch

import agentinfer
from agentinfer.cli.locate import demo_cache
from agentinfer.cli.plan import amount
from agentinfer.ops.provide import Ops, Primitives, reference

PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "attrs", "numpy", "rpds-py", "jinja2",
    "tqdm", "gguf",
)  # fmt: skip
KERNELS: Final = MappingProxyType({"triton": "triton", "vllm": "vllm", "flash-attn": "flash_attn"})
"""Packages that bring kernels, and what they are imported as."""


def run(args: argparse.Namespace) -> int:
    """0."""
    facts = surroundings()
    if args.json:
        print(json.dumps(facts))
        return 0
    for title, lines in facts.items():
        print(title)
        for name, value in lines.items():
            print(f"  {name:<22}{value}")
    return 0


def surroundings() -> dict[str, dict[str, str]]:
    """What this process runs on, and what it would use."""
    return {
        "versions": {
            "agentinfer": agentinfer.__version__,
            "python": f"{platform.python_version()} on {platform.platform()}",
            **{name: installed(name) or "not installed" for name in PACKAGES},
        },
        "devices": devices(),
        "providers": providers(),
        "ops": ops(),
        "caches": caches(),
    }


def installed(package: str) -> str | None:
    """The version of *package*, which is not imported; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> dict[str, str]:
    """The CPU, and every GPU that torch sees."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {amount(memory)}"}
    for i in range(torch.cuda.device_count()):
        facts = cast(Any, torch.cuda).get_device_properties(i)
        found[f"cuda:{i}"] = f"{facts.name}, capability {facts.major}.{facts.minor}, {amount(facts.total_memory)}"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        found["cuda"] = "none: " + ("torch is built without it" if built is None else f"torch has CUDA {built}, no GPU")
    return found


def providers() -> dict[str, str]:
    """Where kernels could come from."""
    found = {reference().name: "plain torch, on every device: in use"}
    for name, module in KERNELS.items():
        there = find_spec(module) is not None
        found[name] = (
            f"{installed(name) or 'found'}, not used: this version has no ops of it" if there else "not installed"
        )
    return found


def ops() -> dict[str, str]:
    """Who computes each call of a layer, and each primitive, and why."""
    chosen = reference().name
    names = [f.name for f in (*attrs.fields(Ops), *attrs.fields(Primitives)) if f.name not in ("name", "primitives")]
    return dict.fromkeys((*names, "sample"), f"{chosen}: the only provider of this version")


def caches() -> dict[str, str]:
    """Where models are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return {"Hugging Face hub": str(HF_HUB_CACHE), "demo model": str(demo_cache())}
