"""Whole experts spread over ranks: who holds what, what is read, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepseeks
from agentinfer.errors import CheckpointError, InvalidSetting
from agentinfer.models.model import load_model, random_model, read_config, weight_sizes
from agentinfer.models.weights import tree_leaves
from agentinfer.ops.comm import Group, Ranks
from agentinfer.ops.moe import ExpertShape
from agentinfer.ops.threads import Threads

ROOT = Path(__file__).parents[2]


def ranks_of(rank: int, size: int, *, ep: bool = True) -> Ranks:
    return Ranks(Group(rank, size, Threads.of(size)), ep=ep, device=torch.device("cpu"))


def test_each_rank_holds_its_experts_whole(tmp_path: Path) -> None:
    """Put side by side, the experts of the ranks are those of one rank, and the shared ones are still cut."""
    model = read_config(deepseeks.write(tmp_path))
    one = random_model(model, torch.float32, ranks_of(0, 1))[1].layers[1].ffn
    each = [random_model(model, torch.float32, ranks_of(r, 4))[1].layers[1].ffn for r in range(4)]
    assert [len(ffn.gate_up) for ffn in each] == [2] * 4
    assert torch.equal(torch.cat([ffn.gate_up for ffn in each]), one.gate_up)
    assert torch.equal(torch.cat([ffn.down for ffn in each]), one.down)
    assert torch.equal(torch.cat([ffn.shared.down for ffn in each], 1), one.shared.down)
    assert all(torch.equal(ffn.router, one.router) for ffn in each)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sizes_are_what_is_loaded(tmp_path: Path, size: int) -> None:
    """What the Spec tree says of bytes is what each rank holds."""
    folder = deepseeks.write(tmp_path)
    sizes = weight_sizes(read_config(folder), size, ep=True)
    for rank in range(size):
        weights = load_model(folder, None, ranks_of(rank, size))[1]
        held = [x.nbytes for x in tree_leaves(weights) if x is not weights.cos_sin]
        assert (sum(held), max(held)) == (sizes.rank_bytes, sizes.largest_bytes)


def test_other_experts_are_not_read(tmp_path: Path) -> None:
    """A number that is not finite is found by the rank that has its expert, and by nobody else."""
    tensors = deepseeks.tensors_of(deepseeks.V3, tmp_path)
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    tensors[name][3, 4] = torch.nan
    folder = deepseeks.write(tmp_path, deepseeks.V3, tensors)
    for rank in (0, 1, 3):
        load_model(folder, None, ranks_of(rank, 4))
    with pytest.raises(CheckpointError, match=f"{name}: holds NaN") as error:
        load_model(folder, None, ranks_of(2, 4))
    assert "experts.4" not in str(error.value)


def test_shape_of_a_rank() -> None:
    """A rank of DeepSeek-V2-Lite has some of the experts, as wide as the model has them."""
    model = read_config(ROOT / "configs" / "DeepSeek-V2-Lite")
    cut, spread = (model.shape_on(4, ep=ep) for ep in (False, True))
    assert cut.experts == ExpertShape(64, 6, 352)
    assert spread.experts == ExpertShape(16, 6, 1408)
    assert weight_sizes(model, 4, ep=True).rank_bytes == weight_sizes(model, 4).rank_bytes


def test_what_can_not_be_shared_is_refused(tmp_path: Path) -> None:
    """Experts that ranks do not divide, and a model without any, are refused by name."""
    model = read_config(deepseeks.write(tmp_path, {**deepseeks.V3, "n_routed_experts": 6, "n_group": 3}))
    with pytest.raises(InvalidSetting, match=r"ep: 4 ranks can not share 6 experts; these can: 1, 2, 3, 6"):
        weight_sizes(model, 4, ep=True)
    with pytest.raises(InvalidSetting, match="4 ranks can not share 6 experts"):
        load_model(tmp_path, None, ranks_of(0, 4))
    load_model(tmp_path, None, ranks_of(0, 4, ep=False))
    with pytest.raises(InvalidSetting, match="ep: Qwen3ForCausalLM has no experts to spread over ranks"):
        weight_sizes(read_config(ROOT / "configs" / "Qwen3-8B"), 2, ep=True)
