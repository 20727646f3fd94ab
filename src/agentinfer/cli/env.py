"""`agentinfer env`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from textwrap import wrap
from typing import Any, Final, cast

import attrs
import torch

import agentinfer
from agentinfer.cli.plan import amount
from agentinfer.demo import default_cache
from agentinfer.ops import choose
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.choose import AUTO, ON_TOP, RULES, UNRUN, Site, chosen, refusal
from agentinfer.ops.mla import LatentShape
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.provide import Primitives

PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "attrs", "numpy", "rpds-py", "jinja2",
    "tqdm", "gguf", "llguidance",
)  # fmt: skip
PACKAGE_OF: Final = (
    ("triton", "triton"), ("vllm", "vllm"), ("flash-attn", "flash-attn"), ("torch", "torch"), ("fa3-mla", "vllm"),
    ("flashmla", "vllm"), ("vllm-moe", "vllm"),
)  # fmt: skip
"""Providers, and the packages that their kernels come from."""
HEADS: Final = HeadShape(32, 8, 128)
"""What the question of who computes is asked for: the heads of an 8B model, in blocks of BLOCK_SIZE tokens."""
BLOCK_SIZE: Final = 16
LATENT: Final = LatentShape(16, 128, 64, 512, 128)
"""The heads of DeepSeek-V2-Lite, of which providers of latent attention and of experts are asked .."""
EXPERTS: Final = ExpertShape(64, 6, 1408)
""".. and its experts."""
WIDTH: Final = 110
"""Columns of a line that can be cut."""


def run(args: argparse.Namespace) -> int:
    """0."""
    facts = surroundings()
    if args.json:
        print(json.dumps(facts))
        return 0
    for title, lines in facts.items():
        print(title)
        together = grouped(lines) if title == "ops" else [([name], value) for name, value in lines.items()]
        for names, value in together:
            print("\n".join(shown(names, value)))
    return 0


def grouped(facts: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """*facts* with the names of equal values together, where the first of them stands."""
    found: dict[str, list[str]] = {}
    for name, value in facts.items():
        found.setdefault(value, []).append(name)
    return [(names, value) for value, names in found.items()]


def shown(names: list[str], value: str) -> list[str]:
    """The lines of one value: beside its name, or above its names."""
    wrapped = partial(wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    if len(names) == 1:
        return wrapped(value, initial_indent=f"  {names[0]:<22}", subsequent_indent=" " * 24)
    inner = " " * 4
    return [f"  {value}", *wrapped(", ".join(names), initial_indent=inner, subsequent_indent=inner)]


def surroundings() -> dict[str, dict[str, str]]:
    """What this process runs on, and what it would use."""
    where = site()
    return {
        "versions": {
            "agentinfer": agentinfer.__version__,
            "python": f"{platform.python_version()} on {platform.platform()}",
            **{name: installed(name) or "not installed" for name in PACKAGES},
        },
        "devices": devices(),
        "providers": providers(where),
        "ops": ops(where),
        "caches": caches(),
    }


def site() -> Site:
    """Where an 8B model would run: in bfloat16 on the first GPU, else in float32 on the CPU."""
    if torch.cuda.is_available():
        return Site.of(torch.device("cuda", 0), torch.bfloat16, HEADS, BLOCK_SIZE)
    return Site.of(torch.device("cpu"), torch.float32, HEADS, BLOCK_SIZE)


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


def providers(where: Site) -> dict[str, str]:
    """Where kernels could come from, and what keeps each from being used on *where*."""
    versions = {name: installed(package) for name, package in PACKAGE_OF}
    found: dict[str, str] = {}
    deepseek = attrs.evolve(where, shape=HeadShape(16, 1, LATENT.cached_dim), latent=LATENT, experts=EXPERTS)
    for name in RULES:  # who brings latent attention or experts alone can say nothing of a dense model
        problem = refusal(name, deepseek if name in ON_TOP and name in choose.LATENT else where)
        version_ = f"{versions[name]}, " if versions.get(name) else ""
        never = f"; never run by this version: {UNRUN[name]}" if name in UNRUN else ""
        found[name] = version_ + ("can be used" if problem is None else f"can not be used: {problem}") + never
    return found


def ops(where: Site) -> dict[str, str]:
    """Who computes each call of a layer on *where* and why, if nobody asks for a provider; and the function of each
    primitive.
    """
    made, why = chosen(AUTO, where)
    dtype = str(where.dtype).removeprefix("torch.")
    question = f"{dtype} on {where.device}, heads of {where.shape.head_dim}, blocks of {where.block_size}"
    primitives = {f.name: getattr(made.primitives, f.name) for f in attrs.fields(Primitives)}
    functions = {name: f"{f.__module__}.{f.__qualname__}" for name, f in primitives.items()}
    return {"chosen for": question, **why, **functions}


def caches() -> dict[str, str]:
    """Where models are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return {"Hugging Face hub": str(HF_HUB_CACHE), "demo model": str(default_cache())}
