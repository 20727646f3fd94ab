"""Specs: what each rank gets of each tensor, what loading checks and costs, random weights, sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import agentinfer
from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models import dense, weights
from agentinfer.models.config import read_dense
from agentinfer.models.model import load_model, random_model, read_config, stored_dtype, weight_sizes
from agentinfer.models.weights import (
    Fused,
    Part,
    Spec,
    fused_shape,
    load_tensors,
    part_of,
    random_tensors,
    tree_leaves,
    tree_map,
)
from agentinfer.ops.comm import Group, Ranks, alone
from agentinfer.ops.threads import Threads
from models.stored import CONFIG, NAMES, TENSORS, configure, equal, load, store

CPU = torch.device("cpu")


def ranks_of(rank: int, size: int) -> Ranks:
    """One rank of several: loading needs no collective."""
    return Ranks(Group(rank, size, Threads.of(size)), ep=False, device=CPU)


def test_loads_what_is_stored(tmp_path: Path) -> None:
    """Every number of the file arrives, q over k over v and gate over up."""
    w = load(store(tmp_path))
    t = TENSORS
    for i, layer in enumerate(w.layers):
        p = f"model.layers.{i}."
        parts = [t[p + f"self_attn.{x}_proj.weight"] for x in "qkv"]
        assert torch.equal(layer.qkv, torch.cat(parts))
        assert torch.equal(layer.qkv_bias, torch.cat([t[p + f"self_attn.{x}_proj.bias"] for x in "qkv"]))
        assert torch.equal(layer.gate_up, torch.cat([t[p + "mlp.gate_proj.weight"], t[p + "mlp.up_proj.weight"]]))
        assert torch.equal(layer.o_bias, t[p + "self_attn.o_proj.bias"])
        assert torch.equal(layer.q_norm, t[p + "self_attn.q_norm.weight"])
        assert torch.equal(layer.ffn_norm, t[p + "post_attention_layernorm.weight"])
    assert torch.equal(w.head, t["lm_head.weight"])
    assert torch.equal(w.embed, t["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_missing(tmp_path: Path, name: str) -> None:
    """A checkpoint without any one of its tensors is refused, naming it, whichever it is."""
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load(store(tmp_path, {k: v for k, v in TENSORS.items() if k != name}))


@pytest.mark.parametrize("name", NAMES)
def test_renamed(tmp_path: Path, name: str) -> None:
    """A typo in any name is refused with both names: what is missing and what is unexpected."""
    with pytest.raises(CheckpointError) as e:
        load(store(tmp_path, {k + "x" if k == name else k: v for k, v in TENSORS.items()}))
    assert f"missing: {name}" in str(e.value)
    assert f"unexpected: {name}x in model.safetensors" in str(e.value)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shape(tmp_path: Path, name: str) -> None:
    """A tensor one row longer is refused with both shapes; at tp=2 too, and one of the shard's shape as well."""
    x = TENSORS[name]
    longer = torch.cat((x, x[:1]))
    for rank in (alone(), ranks_of(1, 2)):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} has shape .*the model wants"):
            load_model(store(tmp_path, {**TENSORS, name: longer}), None, rank)
        if len(x) % 2 == 0:
            with pytest.raises(CheckpointError, match=f"{name} has shape"):
                load_model(store(tmp_path, {**TENSORS, name: x[: len(x) // 2].clone()}), None, rank)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_not_finite(tmp_path: Path, name: str, value: float) -> None:
    """A single NaN or infinity anywhere, the last number included, is refused, naming file and key and no other key."""
    bad = TENSORS[name].clone()
    bad.view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name}: holds NaN or infinity") as e:
        load(store(tmp_path, {**TENSORS, name: bad}))
    assert sum(other in str(e.value) for other in NAMES) == 1


@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_wrong_dtype(tmp_path: Path, kind: torch.dtype) -> None:
    """Integers, fp8 without scales and other dtypes under a weight's name are refused, naming file, key and dtype."""
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} is of "):
        load(store(tmp_path, {**TENSORS, name: TENSORS[name].to(kind)}))


def test_overflow_on_cast(tmp_path: Path) -> None:
    """A number that float16 can not hold is an error of that key, not an infinity in the model."""
    name = "model.layers.0.self_attn.o_proj.weight"
    big = TENSORS[name].clone()
    big[3, 3] = 70000.0
    folder = store(tmp_path, {**TENSORS, name: big})
    assert load(folder).layers[0].o[3, 3] == 70000
    with pytest.raises(CheckpointError, match=rf"{name}: .*too large for torch\.float16"):
        load_model(folder, torch.float16, alone())


def test_dtype(tmp_path: Path) -> None:
    """The dtype is what the caller says, else config.json, else most of the stored numbers; all weights have it."""
    half = {k: v.to(torch.float16) if v.dim() == 2 else v for k, v in TENSORS.items()}
    folder = store(tmp_path, half)
    assert stored_dtype(folder) == torch.float16
    for told, said, want in [
        (None, None, torch.float16),
        (None, "bfloat16", torch.bfloat16),
        (torch.float32, "bfloat16", torch.float32),
    ]:
        configure(folder, **({} if said is None else {"dtype": said}))
        model, w = load_model(folder, told, alone())
        assert model.dtype == want
        assert {x.dtype for x in tree_leaves(w) if x is not w.cos_sin} == {want}
        assert w.cos_sin.dtype == torch.float32
    with pytest.raises(InvalidSetting, match=r"dtype: torch\.float64"):
        load_model(folder, torch.float64, alone())


def test_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tied, the head is the embedding's own memory; a head in the file is not used, and a warning says so."""
    without = {k: v for k, v in TENSORS.items() if k != "lm_head.weight"}
    w = load(configure(store(tmp_path, without), tie_word_embeddings=True))
    assert w.head is w.embed
    assert not caplog.records
    w = load(configure(store(tmp_path), tie_word_embeddings=True))
    assert torch.equal(w.head, TENSORS["model.embed_tokens.weight"])
    assert "lm_head.weight is not used" in caplog.text


def test_order_in_the_file(tmp_path: Path) -> None:
    """Which of head and embedding comes first in the file changes nothing."""
    first = load(store(tmp_path / "a", dict(sorted(TENSORS.items()))))
    second = load(store(tmp_path / "b", dict(sorted(TENSORS.items(), reverse=True))))
    assert equal(first, second)


def test_harmless_keys(tmp_path: Path) -> None:
    """Rope frequencies that old checkpoints carry are known to be of no use."""
    load(store(tmp_path, {**TENSORS, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))


def test_max_positions(tmp_path: Path) -> None:
    """The rope table is as long as the longest sequence to be served; more than the model is made for is refused."""
    folder = store(tmp_path)
    assert load_model(folder, None, alone(), 10)[1].cos_sin.shape == (10, 8)
    assert load(folder).cos_sin.shape == (32, 8)
    for bad in (0, 33):
        with pytest.raises(InvalidSetting, match="max_model_len"):
            load_model(folder, None, alone(), bad)


def rows(spec: Spec, size: int) -> list[Part]:
    return [part_of(spec, rank, size) for rank in range(size)]


def test_kv_head_map() -> None:
    """With fewer KV heads than ranks, neighbouring ranks hold the same head; query heads go in order."""
    k, q = Spec("k", (4 * 8, 16), 0, 8, share=True), Spec("q", (16 * 8, 16), 0, 8)
    assert [p.start // 8 for p in rows(k, 8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(p.stop - p.start, p.length) for p in rows(k, 8)} == {(8, 8)}
    assert [(p.start // 8, p.stop // 8) for p in rows(q, 8)] == [(2 * r, 2 * r + 2) for r in range(8)]
    assert [p.start // 8 for p in rows(k, 4)] == [0, 1, 2, 3]
    assert [p.start // 8 for p in rows(Spec("k", (16, 16), 0, 8, share=True), 4)] == [0, 0, 1, 1]
    assert [p.start for p in rows(Spec("k", (8, 16), 0, 8, share=True), 2)] == [0, 0]
    for spec, size in ((k, 3), (q, 3), (k, 6), (Spec("x", (10, 4), 1), 3)):
        with pytest.raises(InvalidSetting, match="tp"):
            part_of(spec, 0, size)


@pytest.mark.parametrize(("width", "size"), [(97, 2), (9, 4), (5, 4), (8, 4), (1, 3)])
def test_padding(width: int, size: int) -> None:
    """A width that the ranks do not divide is padded: every number is somewhere once, the rest is zero."""
    spec = Spec("x", (width, 3), 0, pad=True)
    whole = torch.arange(1.0, width * 3 + 1).view(width, 3)
    shards = [
        load_tensors(Fused((spec,)), {"x": whole}, Group(r, size, Threads.of(size)), CPU, torch.float32)
        for r in range(size)
    ]
    assert len({x.shape for x in shards}) == 1
    together = torch.cat(shards)
    assert torch.equal(together[:width], whole)
    assert not together[width:].any()
    assert sum(p.stop - p.start for p in rows(spec, size)) == width


@pytest.mark.parametrize("size", [2, 4])
def test_shards(tmp_path: Path, size: int) -> None:
    """The ranks' parts put together are the whole: rows of column-parallel, columns of row-parallel weights."""
    folder = store(tmp_path)
    w = [load_model(folder, None, ranks_of(r, size))[1] for r in range(size)]
    t = TENSORS
    o = torch.cat([x.layers[0].o for x in w], 1)
    assert torch.equal(o, t["model.layers.0.self_attn.o_proj.weight"])
    assert all(torch.equal(x.layers[0].o_bias, t["model.layers.0.self_attn.o_proj.bias"]) for x in w)
    assert all(torch.equal(x.layers[1].k_norm, t["model.layers.1.self_attn.k_norm.weight"]) for x in w)
    gates = torch.cat([x.layers[1].gate_up.chunk(2)[0] for x in w])
    assert torch.equal(gates[:13], t["model.layers.1.mlp.gate_proj.weight"])
    assert not gates[13:].any()
    down = torch.cat([x.layers[1].down for x in w], 1)
    assert torch.equal(down[:, :13], t["model.layers.1.mlp.down_proj.weight"])
    assert not down[:, 13:].any()
    k = t["model.layers.0.self_attn.k_proj.weight"].view(2, 8, 16)
    for rank, x in enumerate(w):
        heads = x.layers[0].qkv.view(-1, 8, 16)
        assert torch.equal(heads[4 // size], k[rank * 2 // size])
    assert torch.equal(torch.cat([x.embed for x in w])[:21], t["model.embed_tokens.weight"])


def test_never_sliced_twice() -> None:
    """A tensor that already has this rank's shape is taken as it is; one of any other shape is refused."""
    spec = Spec("x", (8, 4), 0)
    group = Group(1, 2, Threads.of(2))
    whole = torch.arange(32.0).view(8, 4)
    for given in (whole, whole[4:]):
        got = load_tensors(Fused((spec,)), {"x": given}, group, CPU, torch.float32)
        assert torch.equal(got, whole[4:])
    with pytest.raises(CheckpointError, match="x has shape"):
        load_tensors(Fused((spec,)), {"x": whole[:3]}, group, CPU, torch.float32)


def test_holes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a fused tensor that is never written is found, whichever it is."""
    fused = Fused(tuple(Spec(name, (4, 4)) for name in "abc"))
    given = {name: torch.ones(4, 4) for name in "abc"}
    real = weights._fill_part
    for hole in "abc":

        def leaky(place: Tensor, spec: Spec, *rest: Any, hole: str = hole) -> None:
            if spec.name != hole:
                real(place, spec, *rest)

        monkeypatch.setattr(weights, "_fill_part", leaky)
        with pytest.raises(CheckpointError, match=f"^{hole}: holds NaN"):
            load_tensors(fused, given, alone().tp, CPU, torch.float32)


def test_pack_of_tensors_is_pack_of_specs() -> None:
    """pack over tensors with torch.cat gives what loading gives: order and places are written once."""
    config = read_dense(CONFIG, Path("nowhere"))
    tree = dense.specs(config)
    by_hand = dense.pack(tree_map(lambda s: TENSORS[s.name], tree), torch.cat)
    loaded = load_tensors(dense.pack(tree, Fused), TENSORS, alone().tp, CPU, torch.float32)
    assert equal(by_hand, loaded)
    shapes = [fused_shape(f, 0, 1) for f in tree_leaves(dense.pack(tree, Fused))]
    assert [tuple(x.shape) for x in tree_leaves(loaded)] == shapes


def test_sizes(tmp_path: Path) -> None:
    """What the Spec tree says of bytes is what is loaded, on each rank, padding and shared heads included."""
    folder = store(tmp_path)
    model = read_config(folder)
    for size in (1, 2, 4):
        sizes = weight_sizes(model, size, torch.float32)
        for rank in range(size):
            w = load_model(folder, torch.float32, ranks_of(rank, size))[1]
            held = [x.nbytes for x in tree_leaves(w) if x is not w.cos_sin]
            assert sum(held) == sizes.rank_bytes
            assert max(held) == sizes.largest_bytes
        assert sizes.num_parameters == sum(x.numel() for x in TENSORS.values())
    with pytest.raises(InvalidSetting, match="dtype"):
        weight_sizes(model, 1)


def test_random_weights() -> None:
    """Random weights depend on name and seed alone, and have the spreads that make faults visible."""
    config = read_dense({**CONFIG, "hidden_size": 256, "vocab_size": 1000}, Path("nowhere"))
    one, two = random_tensors(dense.specs(config)), random_tensors(dense.specs(config).layers[1])
    assert all(torch.equal(one[name], x) for name, x in two.items())
    assert not torch.equal(one["model.embed_tokens.weight"], one["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], random_tensors(dense.specs(config), seed=1)["lm_head.weight"])
    assert one["lm_head.weight"].std().item() == pytest.approx(0.15, rel=0.02)
    norm: Tensor = one["model.norm.weight"]
    assert norm.mean().item() == pytest.approx(1, abs=0.06)
    assert norm.std().item() == pytest.approx(0.2, rel=0.2)
    assert 0.05 < one["model.layers.0.self_attn.q_proj.bias"].std().item() < 0.2


def test_random_model(tmp_path: Path) -> None:
    """A model without a checkpoint is the one that its random weights would be stored as."""
    folder = store(tmp_path, random_tensors(dense.specs(read_dense(CONFIG, Path("nowhere"))), seed=5))
    model, w = random_model(read_config(folder), torch.float32, alone(), seed=5)
    assert model.dtype == torch.float32
    assert equal(w, load(folder))


MEMORY = """
import json, sys, threading
from pathlib import Path
import torch
from agentinfer.models.model import load_model, read_config, weight_sizes
from agentinfer.ops.comm import Group, Ranks
from agentinfer.ops.threads import Threads
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
folder, size, dtype = Path(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
ranks = Ranks(Group(size - 1, size, Threads.of(size)), ep=False, device=torch.device("cpu"))
load_model(folder.parent / "small", dtype, ranks)
sizes = weight_sizes(read_config(folder), size, dtype)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model, w = load_model(folder, dtype, ranks)
print(json.dumps([status("VmHWM") - before, sizes.rank_bytes, sizes.largest_bytes]))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 86 MB in float32, nearly half of it embedding."""
    root = tmp_path_factory.mktemp("memory")
    store(root / "small")
    change = {"hidden_size": 256, "intermediate_size": 1000, "vocab_size": 40000, "num_hidden_layers": 2}
    folder = configure(root / "big", **change)
    return store(folder, random_tensors(dense.specs(read_dense({**CONFIG, **change}, folder))), configured=True)


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_peak_memory(big: Path, size: int, dtype: str) -> None:
    """The peak of a loading process, mapped files counted, is under the rank's packed bytes + the largest group."""
    env = {**os.environ, "PYTHONPATH": str(Path(str(agentinfer.__path__[0])).parent)}
    command = [sys.executable, "-c", MEMORY, str(big), str(size), dtype]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    peak, packed, largest = (int(x) for x in out.strip("[]\n").split(","))
    print(f"peak {peak:,} packed {packed:,} largest {largest:,}")
    assert packed * 0.9 < peak < packed + largest + (4 << 20)
