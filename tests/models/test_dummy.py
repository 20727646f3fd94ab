"""Dummy weights: what they are, and that ranks agree on what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.model import dummy_model, random_model, read_config
from agentinfer.models.weights import Fused, Spec, dummy_tensors, tree_leaves
from agentinfer.ops.comm import Group, Ranks, alone
from agentinfer.ops.threads import Threads
from models.stored import configure

CPU = torch.device("cpu")
F32 = torch.float32


def drawn(spec: Spec, rank: int = 0, size: int = 1, **more: float) -> Tensor:
    return dummy_tensors(Fused((spec,)), Group(rank, size, Threads.of(size)), CPU, F32, **more)


def test_numbers() -> None:
    """Matrices are normal of the standard deviation, norms one, biases zero, and none is not finite."""
    x = drawn(Spec("x", (400, 300)))
    assert abs(float(x.mean())) < 4e-4
    assert float(x.std()) == pytest.approx(0.02, rel=0.02)
    assert float(drawn(Spec("x", (400, 300)), std=0.5).std()) == pytest.approx(0.5, rel=0.02)
    assert torch.equal(drawn(Spec("x", (7,), kind="norm")), torch.ones(7))
    assert torch.equal(drawn(Spec("x", (7,), kind="bias")), torch.zeros(7))


def test_a_weight_depends_on_its_name_and_the_seed_alone() -> None:
    """Equal names and seeds give equal numbers, whatever they are fused with; others give others."""
    a, b = Spec("a", (8, 16)), Spec("b", (4, 16))
    fused = dummy_tensors(Fused((b, a)), Group(0, 1, Threads.of(1)), CPU, F32)
    assert torch.equal(fused, torch.cat([drawn(b), drawn(a)]))
    assert not torch.equal(drawn(a), drawn(a, seed=1))
    assert not torch.equal(drawn(a)[:4], drawn(b))


def test_ranks_agree_on_what_they_share() -> None:
    """A weight that is not cut, and a KV head that two ranks hold, are the same on both; parts of one weight differ."""
    whole, heads = Spec("whole", (6, 5)), Spec("heads", (8, 5), cut=0, unit=4, share=True)
    rows = Spec("rows", (8, 5), cut=0)
    assert torch.equal(drawn(whole, 0, 2), drawn(whole, 1, 2))
    assert torch.equal(drawn(heads, 0, 4), drawn(heads, 1, 4))
    assert not torch.equal(drawn(heads, 1, 4), drawn(heads, 2, 4))
    assert not torch.equal(drawn(rows, 0, 2), drawn(rows, 1, 2))


@pytest.mark.parametrize("cut", [0, 1])
def test_padding_is_zero(cut: int) -> None:
    """What pads a rank's part is zero, on either axis, and what does not is not."""
    shape = (5, 6) if cut == 0 else (6, 5)
    spec = Spec("x", shape, cut=cut, pad=True)
    parts = [drawn(spec, rank, 4).narrow(cut, 0, 2) for rank in range(4)]
    held = [int((part != 0).any(dim=1 - cut).sum()) for part in parts]
    assert held == [2, 2, 1, 0]


def test_a_folder_with_a_config_alone(tmp_path: Path) -> None:
    """config.json is all that is read; the weights have the shapes and dtype of those of a checkpoint."""
    folder = configure(tmp_path / "bare", dtype="bfloat16")
    model, dummies = dummy_model(folder, None, alone(CPU), 16)
    assert model.dtype is torch.bfloat16
    original, weights = random_model(read_config(folder), F32, alone(CPU))
    assert model.config == original.config
    found, wanted = tree_leaves(dummies), tree_leaves(weights)
    assert {x.dtype for x in found} == {torch.bfloat16, F32}, "all but the rotary table are of the model's dtype"
    assert [x.shape[1:] for x in found] == [x.shape[1:] for x in wanted]
    dtype, again = dummy_model(folder, F32, alone(CPU))
    assert dtype.dtype is F32
    assert [x.shape for x in tree_leaves(again)] == [x.shape for x in wanted]


def test_what_can_not_be_drawn(tmp_path: Path) -> None:
    """No config.json, no dtype anywhere, too many positions and ranks that can not share the heads are refused."""
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        dummy_model(tmp_path, None, alone(CPU))
    folder = configure(tmp_path / "bare")
    with pytest.raises(InvalidSetting, match=r"dtype: .*config\.json names none"):
        dummy_model(folder, None, alone(CPU))
    with pytest.raises(InvalidSetting, match="max_model_len: 33"):
        dummy_model(folder, F32, alone(CPU), 33)
    with pytest.raises(InvalidSetting, match="tp: 3 ranks"):
        dummy_model(folder, F32, Ranks(Group(0, 3, Threads.of(3)), ep=False, device=CPU))
