"""How much of what would fit where: of a model and devices that need not be there."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from agentinfer.build import GIB, Settings, dtype_of
from agentinfer.errors import InvalidSetting
from agentinfer.models.fp8 import DEQUANTIZE
from agentinfer.models.model import held, kv_layout, read_config, weight_sizes
from agentinfer.ops.kv import bytes_per_token
from agentinfer.state.ids import cdiv


@frozen
class MemoryPlan:
    """What a model would take on each of *tp* devices. Bytes unless the name says otherwise."""

    architecture: str
    dtype: str
    quantized: bool
    """The checkpoint's weights are, in 8 bits.."""
    fp8: str
    """.. and on a device they are held in `dtype` ("dequantize"), or as they are ("native")."""
    tp: int
    num_parameters: int
    weights: int
    largest_group: int
    """What loading needs on top of the weights, for a moment."""
    kv_per_token: int
    kv_per_block: int
    block_size: int
    memory: int
    kv_memory: int
    """What KV may take."""
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
    kv_gib: float | None = None,
    dtype: str | None = None,
    fp8: str = DEQUANTIZE,
    tp: int = 1,
    ep: bool = False,
    block_size: int = 16,
    kv_utilization: float = 0.85,
    reserve_gib: float = 2.0,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """How the model in *folder* would fill devices of *memory_gib*, read from its config.json alone.

    *kv_gib*: GiB of KV on each, instead of the rule. *ep*: experts are spread over the devices, not cut. No block fits:
    num_blocks is 0, and no error.
    Raises CheckpointError; InvalidSetting for tp, ep, fp8 or dtype.
    """
    if not 0 < memory_gib <= 1e6:
        raise InvalidSetting("memory_gib", f"must be in (0, 1e+06], not {memory_gib!r}")
    Settings(
        kv_utilization=kv_utilization,
        reserve_gib=reserve_gib,
        kv_gib=kv_gib,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    model = held(evolve(read_config(folder), dtype=dtype_of(folder, Settings(dtype=dtype))), fp8)
    most = model.config.max_positions
    length = most if max_model_len is None else max_model_len
    if length > most:
        raise InvalidSetting("max_model_len", f"{length}; the model is made for 1 to {most} tokens")
    sizes = weight_sizes(model, tp, ep=ep)
    per_token = bytes_per_token(kv_layout(model, tp, block_size))
    memory = int(memory_gib * GIB)
    left = max(0, memory - sizes.rank_bytes)
    if kv_gib is None:
        left = max(0, int((left - int(reserve_gib * GIB)) * kv_utilization))
    else:
        left = min(left, int(kv_gib * GIB))
    blocks = left // (per_token * block_size)
    return MemoryPlan(
        architecture=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        quantized=model.quantized,
        fp8=fp8,
        tp=tp,
        num_parameters=sizes.num_parameters,
        weights=sizes.rank_bytes,
        largest_group=sizes.largest_bytes,
        kv_per_token=per_token,
        kv_per_block=per_token * block_size,
        block_size=block_size,
        memory=memory,
        kv_memory=left,
        num_blocks=blocks,
        longest_context=min(blocks * block_size, most),
        max_model_len=length,
        sequences_of_max_model_len=blocks / cdiv(length, block_size),
    )
