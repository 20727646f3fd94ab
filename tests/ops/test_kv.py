"""The KV pool and its linear handle."""

from __future__ import annotations

import math

import pytest
import torch

from agentinfer.errors import InvalidSetting, StaleHandle
from agentinfer.ops import kv as kvs
from agentinfer.ops.kv import KvCache

GIB = 1 << 30
CPU = torch.device("cpu")


def small(fill: float = 0.0) -> KvCache:
    return kvs.allocate([kvs.gqa(4, 2, 3, torch.float32)] * 2, 6, 3, 5, CPU, fill)


def test_memory_has_a_sink_block_and_row_on_top_and_whole_tensors() -> None:
    """num_blocks and rows count usable ones; k and v of a layer each begin a storage of their own."""
    kv = small()
    assert kv.layers[0].k.shape == (7, 4, 2, 3)
    assert kv.table.shape == (4, 5)
    assert kv.table.dtype == torch.int32
    layer = kv.layers[1]
    assert layer.v is not None
    assert layer.k.untyped_storage().data_ptr() != layer.v.untyped_storage().data_ptr()
    assert layer.k.storage_offset() == layer.v.storage_offset() == 0
    assert layer.layer == 1
    assert kv.step == -1
    assert not kv.layers[0].k.any()


def test_tests_may_poison_new_memory() -> None:
    """With fill NaN every slot of a new pool is NaN."""
    assert all(bool(layer.k.isnan().all()) and bool(layer.v.isnan().all()) for layer in small(math.nan).layers)


def test_a_latent_cache_has_no_values() -> None:
    """mla keeps one vector a token, whatever the heads."""
    kv = kvs.allocate([kvs.mla(16, 512, 64, torch.bfloat16)], 2, 1, 1, CPU)
    assert kv.layers[0].k.shape == (3, 16, 1, 576)
    assert kv.layers[0].v is None


def test_a_consumed_handle_is_stale() -> None:
    """After consume the old handle raises StaleHandle naming who took it; the new one works."""
    first = small()
    second = first.consume("forward")
    for use in (first.consume, first.check):
        with pytest.raises(StaleHandle, match="given to forward"):
            use("me")
    second.check("me")
    third = kvs.copy_blocks(second, [])
    with pytest.raises(StaleHandle, match="given to copy_blocks"):
        kvs.copy_blocks(second, [])
    third.check("me")


def test_renew_gives_the_only_live_handle_and_forgets_the_tables() -> None:
    """Whoever catches a failed step gets a live handle to the same memory, with step -1."""
    first = kvs.holding(small(), 5)
    second = first.consume("forward")
    live = kvs.renew(first, "launch")
    live.check("me")
    assert live.step == -1
    assert second.step == 5
    assert live.layers is first.layers
    with pytest.raises(StaleHandle, match="given to launch"):
        second.check("me")


def test_copy_blocks_reads_all_before_it_writes_any() -> None:
    """Copies act at once: a chain and a swap get the old contents."""
    kv = small()
    for layer in kv.layers:
        for plane in (layer.k, layer.v):
            plane.copy_(torch.arange(7.0).view(7, 1, 1, 1).expand_as(plane))
    kv = kvs.copy_blocks(kv, [(1, 2), (2, 3), (4, 5), (5, 4)])
    for layer in kv.layers:
        for plane in (layer.k, layer.v):
            assert plane[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 5, 4, 6]
            assert torch.equal(plane, plane[:, :1, :1, :1].expand_as(plane))


def test_bytes_per_token() -> None:
    """Qwen3-8B in bf16 takes 147,456 bytes a token, DeepSeek-V2-Lite 31,104."""
    assert kvs.bytes_per_token([kvs.gqa(16, 8, 128, torch.bfloat16)] * 36) == 147_456
    assert kvs.bytes_per_token([kvs.mla(64, 512, 64, torch.bfloat16)] * 27) == 31_104


@pytest.mark.parametrize(
    ("free", "bytes_per_block", "blocks"),
    [
        (80 - 16 - 3 - 1.5, 16 * 147_456, 24_371),
        (80 - 16 - 3, 16 * 147_456, 24_985),
        (80 - 16 - 3 - 1.5, 64 * 31_104, 28_884),
    ],
)
def test_the_budget_rule(free: float, bytes_per_block: int, blocks: int) -> None:
    """GRF-05: (free - reserve) * utilization // bytes a block."""
    fit = kvs.num_blocks_that_fit(free=int(free * GIB), reserve=0, utilization=0.9, bytes_per_block=bytes_per_block)
    assert fit == blocks
    capped = kvs.num_blocks_that_fit(
        free=int(free * GIB), reserve=0, utilization=0.9, bytes_per_block=bytes_per_block, most=100
    )
    assert capped == 100
    reserved = kvs.num_blocks_that_fit(
        free=int(free * GIB) + 2 * GIB, reserve=2 * GIB, utilization=0.9, bytes_per_block=bytes_per_block
    )
    assert reserved == blocks


@pytest.mark.parametrize(("free", "need"), [(99, 1), (1099, 11), (-5, 1)])
def test_too_few_blocks_are_an_error_with_the_numbers(free: int, need: int) -> None:
    """Less than one block, or than one request of max_model_len, is refused."""
    with pytest.raises(InvalidSetting, match=rf"100 bytes.*needs {need}.*max_model_len"):
        kvs.num_blocks_that_fit(free=free, reserve=0, utilization=1.0, bytes_per_block=100, blocks_per_request=need)
    assert (
        kvs.num_blocks_that_fit(free=1100, reserve=0, utilization=1.0, bytes_per_block=100, blocks_per_request=11) == 11
    )
