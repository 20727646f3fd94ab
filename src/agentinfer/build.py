"""From a model folder and settings to a machine and its memory; and how much of what would fit where."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from attrs import Attribute, evolve, field, frozen
from attrs.validators import instance_of, optional

from agentinfer.errors import InvalidSetting
from agentinfer.models.model import Model, kv_layout, load_model, read_config, stored_dtype, weight_sizes
from agentinfer.ops.comm import Ranks, alone
from agentinfer.ops.kv import KvLayout, allocate, bytes_per_token, num_blocks_that_fit
from agentinfer.ops.provide import Ops, reference
from agentinfer.state.ids import cdiv
from agentinfer.state.limits import Limits
from agentinfer.state.policy import POLICIES, Policy
from agentinfer.steps import Device, Machine, new_last

GIB: Final = 1 << 30
CPU_KV_GIB: Final = 2.0
"""KV memory on a CPU, unless told: nobody can say how much of its memory is free for us."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def _one_of(*names: str) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: object) -> None:
        if value is not None and value not in names:
            raise InvalidSetting(attribute.name, f"{value!r} is none of {', '.join(names)}")

    return check


def _between(low: float, high: float, *, open_low: bool) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (open_low and value == low):
            raise InvalidSetting(
                attribute.name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], not {value!r}"
            )

    return check


@frozen
class Settings:
    """What a user can choose about an engine. Raises InvalidSetting naming the field."""

    dtype: str | None = field(default=None, validator=_one_of(*DTYPES))
    """Of weights and KV; None: the checkpoint's."""
    device: str = "auto"
    """"auto": cuda if there is one, else cpu."""
    policy: str = field(default="throughput", validator=_one_of(*POLICIES))
    block_size: int = 16
    num_blocks: int | None = None
    """KV blocks; None: as many as fit."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None: what the model is made for."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_utilization: float = field(default=0.85, validator=_between(0, 1, open_low=True))
    """Share of the free memory, less the reserve, that KV takes on a GPU."""
    reserve_gib: float = field(default=2.0, validator=_between(0, 1e6, open_low=False))
    """GiB that are left alone on a GPU, for activations."""
    kv_gib: float | None = field(default=None, validator=_between(0, 1e6, open_low=True))
    """GiB of KV, instead of the rule."""
    prefix_cache: bool = field(default=True, validator=instance_of(bool))
    overlap: bool = field(default=True, validator=instance_of(bool))
    seed: int | None = field(default=None, validator=optional(instance_of(int)))
    """The engine's seed (Limits.seed); None: a fresh one."""


def build(
    folder: Path, settings: Settings, eos_ids: tuple[int, ...], policy: Policy | None = None, ops: Ops | None = None
) -> tuple[Machine, Device]:
    """Load the model in *folder* and allocate its KV memory. One rank.

    *eos_ids*: the tokens that end a sequence, besides the model's own. *policy*: a function instead of a name.
    Raises CheckpointError for the folder, InvalidSetting for the settings.
    """
    device = _device(settings.device)
    ranks = alone(device)
    chosen = evolve(read_config(folder), dtype=_dtype(folder, settings.dtype))
    limits = _limits(chosen, settings, eos_ids, _layouts(chosen, settings, ranks), device, loaded=0)
    model, weights = load_model(folder, chosen.dtype, ranks, limits.max_model_len)
    layouts = _layouts(model, settings, ranks)
    if device.type != "cpu":  # now it shows what the weights left
        limits = _limits(model, settings, eos_ids, layouts, device, loaded=torch.cuda.memory_reserved(device))
    columns = cdiv(limits.max_model_len, limits.block_size)
    kv = allocate(layouts, limits.num_blocks, limits.max_num_seqs, columns, device)
    machine = Machine(
        model=model,
        weights=weights,
        ops=reference() if ops is None else ops,
        ranks=ranks,
        limits=limits,
        policy=POLICIES[settings.policy] if policy is None else policy,
        overlap=settings.overlap,
    )
    return machine, Device(kv, new_last(limits, device))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSetting("device", f"{name!r} is no device: cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidSetting("device", f"{name!r} is not supported: cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting("device", f"{name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(folder: Path, name: str | None) -> torch.dtype:
    """The dtype that was asked for, else config.json's, else that of the stored weights."""
    if name is None:
        return read_config(folder).dtype or stored_dtype(folder)
    if name not in DTYPES:
        raise InvalidSetting("dtype", f"{name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def _layouts(model: Model, settings: Settings, ranks: Ranks) -> tuple[KvLayout, ...]:
    if type(settings.block_size) is not int or settings.block_size < 1:
        raise InvalidSetting("block_size", f"must be an integer of at least 1, not {settings.block_size!r}")
    return kv_layout(model, ranks.tp.size, settings.block_size)


def _limits(
    model: Model,
    settings: Settings,
    eos_ids: tuple[int, ...],
    layouts: tuple[KvLayout, ...],
    device: torch.device,
    *,
    loaded: int,
) -> Limits:
    """The sizes of the engine. *loaded*: bytes the weights hold on the device, 0 before they are there."""
    most = model.config.max_positions
    length = most if settings.max_model_len is None else settings.max_model_len
    if type(length) is not int or not 1 <= length <= most:
        raise InvalidSetting("max_model_len", f"{length!r}; the model is made for 1 to {most} tokens")
    blocks = settings.num_blocks
    if blocks is None:
        per_request = cdiv(length, settings.block_size)
        free, reserve, share = _kv_memory(settings, device, loaded)
        blocks = num_blocks_that_fit(
            free=free,
            reserve=reserve,
            utilization=share,
            bytes_per_block=bytes_per_token(layouts) * settings.block_size,
            blocks_per_request=per_request,
            most=None if settings.prefix_cache else settings.max_num_seqs * per_request,
        )
    seed = secrets.randbits(62) if settings.seed is None else settings.seed
    return Limits(
        block_size=settings.block_size,
        num_blocks=blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=length,
        vocab_size=model.config.vocab_size,
        eos_ids=tuple(sorted({*model.config.eos_ids, *eos_ids})),
        prefix_cache=settings.prefix_cache,
        seed=seed,
    )


def _kv_memory(settings: Settings, device: torch.device, loaded: int) -> tuple[int, int, float]:
    """(bytes free, bytes to leave, share of the rest) for KV."""
    if settings.kv_gib is not None:
        return int(settings.kv_gib * GIB), 0, 1.0
    if device.type == "cpu":
        return int(CPU_KV_GIB * GIB), 0, 1.0
    free, total = torch.cuda.mem_get_info(device)
    return free if loaded else total, int(settings.reserve_gib * GIB), settings.kv_utilization


@frozen
class MemoryPlan:
    """What a model would take on each of *tp* devices. Bytes unless the name says otherwise."""

    architecture: str
    dtype: str
    tp: int
    num_parameters: int
    weights: int
    largest_group: int
    """What loading needs on top of the weights, for a moment."""
    kv_per_token: int
    kv_per_block: int
    block_size: int
    memory: int
    num_blocks: int
    longest_context: int
    """Tokens of one sequence alone: what the pool holds, at most what the model is made for."""
    max_model_len: int
    sequences_of_max_model_len: float
    """How many of them the pool holds at once."""


def memory_plan(
    folder: Path,
    *,
    memory_gib: float,
    dtype: str | None = None,
    tp: int = 1,
    block_size: int = 16,
    kv_utilization: float = 0.85,
    reserve_gib: float = 2.0,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """How the model in *folder* would fill devices of *memory_gib*, read from its config.json alone.

    No block fits: num_blocks is 0, and no error. Raises CheckpointError; InvalidSetting for tp or dtype.
    """
    Settings(kv_utilization=kv_utilization, reserve_gib=reserve_gib, kv_gib=memory_gib)
    if type(block_size) is not int or block_size < 1:
        raise InvalidSetting("block_size", f"must be an integer of at least 1, not {block_size!r}")
    model = evolve(read_config(folder), dtype=_dtype(folder, dtype))
    most = model.config.max_positions
    length = most if max_model_len is None else max_model_len
    if not 1 <= length <= most:
        raise InvalidSetting("max_model_len", f"{length}; the model is made for 1 to {most} tokens")
    sizes = weight_sizes(model, tp)
    per_token = bytes_per_token(kv_layout(model, tp, block_size))
    memory = int(memory_gib * GIB)
    left = max(0, int((memory - sizes.rank_bytes - int(reserve_gib * GIB)) * kv_utilization))
    blocks = left // (per_token * block_size)
    return MemoryPlan(
        architecture=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        tp=tp,
        num_parameters=sizes.num_parameters,
        weights=sizes.rank_bytes,
        largest_group=sizes.largest_bytes,
        kv_per_token=per_token,
        kv_per_block=per_token * block_size,
        block_size=block_size,
        memory=memory,
        num_blocks=blocks,
        longest_context=min(blocks * block_size, most),
        max_model_len=length,
        sequences_of_max_model_len=blocks / cdiv(length, block_size),
    )
