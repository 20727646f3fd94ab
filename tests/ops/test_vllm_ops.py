"""The calls of vLLM's operators: against the very schemas that vllm 0.26 registers, computed by the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import attention, norm, provide, rope, vllm_ops
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import alone
from ops.ragged import SCALE, Case, case

FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
SMALL = (
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    """rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache,
    bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()""",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
)
CACHE = (
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
DENSE_DECODE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
    "Tensor(c!)? out_) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)
MIXED = ([1, 20, 5, 1], [1, 20, 60, 70])


def fwd(*args: object) -> list[Tensor]:
    """The operator, by the reference. Arguments come in the schema's order."""
    names = [part.split()[-1] for part in FWD[4 : FWD.index(") ->")].split(",")]
    a = dict(zip(names, args, strict=True))
    q, table, context, ends = a["q"], a["page_table"], a["seqused_k"], a["cu_seqlens_q"]
    k, v = a["k"], a["v"]
    if table is None:  # keys lie packed: as blocks of one key
        assert context is None
        context, k, v = a["cu_seqlens_k"].diff(), k.unsqueeze(1), v.unsqueeze(1)
        first = a["cu_seqlens_k"][:-1].unsqueeze(1)
        table = (first + torch.arange(int(context.max()))).to(torch.int32)
    else:
        assert a["cu_seqlens_k"] is None
    assert a["is_causal"] is True
    assert a["max_seqlen_k"] >= int(context.max())
    assert a["max_seqlen_q"] >= int(ends.diff().max())
    assert (a["softcap"], a["cp_world_size"], a["cp_rank"], a["sm_margin"]) == (0.0, 1, 0, 0)
    assert table.dtype == context.dtype == ends.dtype == torch.int32
    window = None
    if a["window_size_left"] >= 0:
        assert a["window_size_right"] == 0
        window = a["window_size_left"] + 1
    else:
        assert a["window_size_right"] == -1
    lengths = attention.RowLengths(ends.diff().tolist(), context.tolist(), [False] * len(context))
    index = attention.attention_index(table, lengths, k.shape[1], window, q.dtype)
    if a["q_v"] is not None:  # latent attention: a second part of the query, whose keys are the values
        q, k = torch.cat((a["q_v"], q), dim=-1), torch.cat((v, k), dim=-1)
    return [attention.attend_index(q, k, v, index, a["softmax_scale"])]


def rotary_embedding(positions, query, key, head_size, cos_sin, neox, offset=0, inverse=False) -> None:
    assert (offset, inverse) == (0, False)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        turned, _ = rope.rotary_embedding(positions, heads, heads, cos_sin, not neox)
        heads.copy_(turned)


def rms_norm(out, x, w, eps) -> None:
    out.copy_(norm.rms_norm(x, w, eps))


def silu_and_mul(out, x) -> None:
    out.copy_(norm.silu_and_mul(x))


def add_norm(x, residual, weight, eps) -> None:
    assert x.is_contiguous()
    assert residual.is_contiguous()
    normed, total = norm.fused_add_rms_norm(x, residual, weight, eps)
    x.copy_(normed)
    residual.copy_(total)


def cache_write(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale) -> None:
    assert kind == "auto"
    assert k_scale.dtype == v_scale.dtype == torch.float32
    attention.scatter_kv(key, value, key_cache, value_cache, slots)


@pytest.fixture(autouse=True, scope="module")
def operators() -> Iterator[None]:
    """vLLM's namespaces, with the schemas of its operators."""
    spaces = {name: torch.library.Library(name, "FRAGMENT") for name in ("_vllm_fa3_C", "_C", "_C_cache_ops")}
    spaces["_vllm_fa3_C"].define(" ".join(FWD.split()))
    spaces["_vllm_fa3_C"].impl("fwd", fwd, "CPU")
    for schema in SMALL:
        spaces["_C"].define(schema)
    spaces["_C"].impl("rms_norm", rms_norm, "CPU")
    spaces["_C"].impl("fused_add_rms_norm", add_norm, "CPU")
    spaces["_C"].impl("rotary_embedding", rotary_embedding, "CPU")
    spaces["_C"].impl("silu_and_mul", silu_and_mul, "CPU")
    spaces["_C_cache_ops"].define(CACHE)
    spaces["_C_cache_ops"].impl("reshape_and_cache_flash", cache_write, "CPU")
    yield
    for space in spaces.values():
        space._destroy()


def same(x: Case, op: provide.Attend, window: int | None) -> None:
    got, cache = x.attend(op, window)
    want, wanted = x.attend(provide.attend_reference, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.k[1:], wanted.k[1:], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        attention.values_of(cache)[1:], attention.values_of(wanted)[1:], rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [MIXED, ([1, 1], [9, 40])])
def test_attention_of_vllm_is_called_as_its_schemas_say(
    lengths: tuple[list[int], list[int]], window: int | None, norm: bool
) -> None:
    """Every operator gets its arguments by its schema's names, and the result and the cache are the reference's."""
    same(case(*lengths, HeadShape(6, 2, 64), 16, norm=norm), vllm_ops.vllm_ops().attend, window)


@pytest.mark.parametrize("window", [None, 9])
def test_packed_keys_are_passed_as_the_schema_says(window: int | None) -> None:
    """Rows without earlier keys, which are read where they were computed, get the reference's result."""
    x = case([20, 1, 33], [20, 1, 33], HeadShape(6, 2, 64), 16, norm=False)
    q, k, v = provide.split_heads(x.qkv, x.shape)
    q, k = rope.rotary_embedding(x.x.positions, q, k, x.table, False)  # noqa: FBT003 - as the contract has it
    got = vllm_ops.attend_fa3_packed(q, k, v, x.x.cu_seqlens_q, 33, SCALE, window)
    want, _ = x.attend(provide.attend_reference, window)
    torch.testing.assert_close(got.flatten(1), want, rtol=1e-5, atol=1e-5)


def test_the_small_kernels_of_vllm_are_called_as_their_schemas_say() -> None:
    """Norms, activation and rope give what the reference gives; the fused norm reuses its arguments."""
    gen = torch.Generator().manual_seed(0)
    x, y, w = (torch.randn(s, generator=gen) for s in ((5, 64), (5, 64), (64,)))
    p, q = vllm_ops.vllm_ops().primitives, provide.reference().primitives
    torch.testing.assert_close(p.rms_norm(x, w, 1e-6), q.rms_norm(x, w, 1e-6))
    torch.testing.assert_close(p.silu_and_mul(x), q.silu_and_mul(x))
    heads, table = x.view(5, 1, 64), rope.cos_sin(rope.RopeSpec(1e4, 64), 8)
    for got, want in zip(
        p.rotary_embedding(torch.arange(5), heads, heads, table, False),  # noqa: FBT003 - as the contract has it
        q.rotary_embedding(torch.arange(5), heads, heads, table, False),  # noqa: FBT003 - the same
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    want = q.fused_add_rms_norm(x, y, w, 1e-6)
    got = p.fused_add_rms_norm(x, y, w, 1e-6)
    assert got[0] is x
    assert got[1] is y
    torch.testing.assert_close(got, want)


def test_a_layer_of_vllms_ops_equals_one_of_the_reference() -> None:
    """The calls of a layer one after another, on a stream that the fused norm writes in place."""
    gen = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    embed, w_norm, qkv, o, gate_up, down = (
        draw(*s) for s in ((10, 64), (64,), (96, 64), (64, 96), (64, 64), (64, 32))
    )  # fmt: skip
    group, results = alone().tp, []
    for ops in (vllm_ops.vllm_ops(), provide.reference()):
        stream = ops.embed(torch.tensor([3, 7, 1]), embed, group)
        for _ in range(2):
            x, stream = ops.norm_qkv(stream, w_norm, qkv, None, 1e-6)
            stream = ops.out_add(x, o, None, stream, group)
            x, stream = ops.norm_gate_up(stream, w_norm, gate_up, None, 1e-6)
            stream = ops.down_add(x, down, None, stream, group)
        results.append(ops.norm_head(stream, torch.tensor([0, 2]), w_norm, embed, 1e-6, group, 10))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_what_vllm_lacks_is_named() -> None:
    """Without the package, its library or an operator in it the provider says which is missing."""
    assert vllm_ops.missing("_no_such_space", "x.so", "fwd") == "vllm is not installed"


def test_a_library_that_does_not_load_is_named(tmp_path, monkeypatch) -> None:
    """A library of another torch and one that is not there are refused by InvalidSetting's words."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('nobody imports the package')")
    monkeypatch.syspath_prepend(tmp_path)
    assert vllm_ops.missing("_no_such_space", "x.so", "fwd") == "this vllm has no x.so"
    (tmp_path / "vllm/x.so").write_text("no library")
    assert "x.so does not fit torch" in (vllm_ops.missing("_no_such_space", "x.so", "fwd") or "")
    monkeypatch.setattr(vllm_ops, "missing", lambda *_: "it is broken")
    with pytest.raises(InvalidSetting, match="vllm: it"):
        vllm_ops.load_all()
