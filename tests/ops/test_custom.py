"""The custom operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentinfer.ops import attention, custom
from agentinfer.ops import kv as kvs
from agentinfer.ops.comm import Group, alone
from agentinfer.ops.inputs import by_hand, tables_of
from agentinfer.ops.rope import RopeSpec, cos_sin
from agentinfer.ops.threads import Threads

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_the_norms_and_the_activation(dtype: torch.dtype) -> None:
    """Schemas, fake kernels and aliasing of the elementwise operators are right, on contiguous and sliced inputs."""
    x, w = torch.randn(3, 16).to(dtype), torch.randn(16).to(dtype)
    sliced = torch.randn(3, 4, 32).to(dtype)[:, 1:3, ::2]
    for value in (x, sliced):
        torch.library.opcheck(custom.rms_norm, (value, w, 1e-6))
        torch.library.opcheck(custom.fused_add_rms_norm, (value, value.clone(), w, 1e-6))
        torch.library.opcheck(custom.silu_and_mul, (value,))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_dim", [8, 6])
def test_opcheck_of_rope(interleaved: bool, rope_dim: int) -> None:
    """So are those of rope, whole and partial, on views of packed heads."""
    packed = torch.randn(5, 6, 8)
    table = cos_sin(RopeSpec(1e4, rope_dim), 16)
    torch.library.opcheck(custom.rotary_embedding, (torch.arange(5), packed[:, :4], packed[:, 4:], table, interleaved))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[1, 1], [3, 1], [2, 4]])
def test_opcheck_of_attention_and_the_kv_write(counts: list[int], dtype: torch.dtype) -> None:
    """So are those of paged attention and the write, which mutates the two caches and nothing else."""
    kv = kvs.allocate([kvs.gqa(4, 2, 8, dtype)], 6, 2, 2, torch.device("cpu"))
    x, kv = by_hand(kv, [[1] * n for n in counts], [2, 1], [[3, 5], [2, 6]])
    k_cache, v_cache = kv.layers[0].k, attention.values_of(kv.layers[0])
    new = torch.randn(sum(counts), 2, 8).to(dtype)
    torch.library.opcheck(custom.write_kv, (new, new, k_cache, v_cache, x.slots))
    q = torch.randn(sum(counts), 4, 8).to(dtype)
    for window in (0, 2):
        args = (q, k_cache, v_cache, tables_of(x, 4), x.cu_seqlens_q, x.context, 0.35, window)
        torch.library.opcheck(custom.paged_attention, args)
        want = attention.paged_attention(q, kv.layers[0], x, 0.35, window or None)
        torch.testing.assert_close(custom.paged_attention(*args), want)


def test_padding_is_seen_by_the_sink_block() -> None:
    """A row whose first block is 0 gives zeros, whatever the sink holds."""
    kv = kvs.allocate([kvs.gqa(4, 1, 8, torch.float32)], 3, 1, 1, torch.device("cpu"), math.nan)
    kv.layers[0].k[2] = 1
    attention.values_of(kv.layers[0])[2] = 1
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    ends, context = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    layer = kv.layers[0]
    out = custom.paged_attention(torch.ones(2, 1, 8), layer.k, attention.values_of(layer), table, ends, context, 1.0, 0)
    assert torch.equal(out[:, 0], torch.tensor([[1.0], [0.0]]).expand(2, 8))


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_as_operators(size: int) -> None:
    """A group made opaque gives what the group gives, and its operators pass opcheck; of one rank it is the group
    itself.
    """
    if size == 1:
        group = alone().tp
        assert custom.opaque(group, "test_one") is group
        return

    def work(plain: Group) -> tuple[Tensor, Tensor, Tensor]:
        group = custom.opaque(plain, f"test_two_{plain.rank}")
        x = torch.arange(6.0).view(2, 3) + 10 * plain.rank
        return group.all_reduce_sum(x), group.all_gather_last_dim(x), group.broadcast(x, 1)

    for total, joined, source in Threads.of(2).run(work):
        base = torch.arange(6.0).view(2, 3)
        assert torch.equal(total, 2 * base + 10)
        assert torch.equal(joined, torch.cat((base, base + 10), -1))
        assert torch.equal(source, base + 10)


class Doubling:
    """A Comm of two ranks that hold equal values: enough to check operators without a second thread."""

    def all_reduce_sum(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        del rank
        return x + x

    def all_gather_last_dim(self, x: Tensor, rank: int) -> Tensor:
        """See Comm."""
        del rank
        return torch.cat((x, x), -1)

    def broadcast(self, x: Tensor, source: int, rank: int) -> Tensor:
        """See Comm."""
        del source, rank
        return x.clone()


def test_opcheck_of_the_collectives() -> None:
    """Schemas, fake kernels and aliasing of the collectives are right."""
    comm = custom.opaque(Group(0, 2, Doubling()), "test_doubling").comm
    assert isinstance(comm, custom.OpaqueComm)
    for x in (torch.randn(3, 4), torch.randn(3, 4).bfloat16(), torch.randn(0, 4)):
        torch.library.opcheck(comm.reduce_op, (x,))
        torch.library.opcheck(comm.gather_op, (x,))
        torch.library.opcheck(comm.broadcast_op, (x, 1))


def test_operators_trace_whole() -> None:
    """A function of the operators compiles with fullgraph, in at most two graphs for all sizes, and equals eager."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(1)
        return graph.forward

    def block(x: Tensor, r: Tensor, w: Tensor, gate_up: Tensor) -> Tensor:
        y, r = custom.fused_add_rms_norm(x, r, w, 1e-6)
        return r[:, :4] + custom.silu_and_mul(y @ gate_up)

    compiled = torch.compile(block, backend=count, fullgraph=True)
    for n in (1, 2, 3, 7, 8):
        args = (torch.randn(n, 8), torch.randn(n, 8), torch.randn(8), torch.randn(8, 8))
        torch.testing.assert_close(compiled(*args), block(*args))
    assert len(graphs) <= 2
