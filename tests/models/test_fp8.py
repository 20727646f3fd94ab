"""Checkpoints in 8 bits with a scale a block: what is read is what they stand for, and what is wrong is named."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseeks
from agentinfer.errors import CheckpointError
from agentinfer.models import checkpoint, fp8
from agentinfer.models.fields import Fields
from agentinfer.models.model import load_model
from agentinfer.models.weights import tree_leaves
from agentinfer.ops import scaled
from agentinfer.ops.comm import Ranks, alone
from agentinfer.ops.threads import Threads
from models import drive

CONFIG: Mapping[str, Any] = {
    **deepseeks.V3, "hidden_size": 144, "intermediate_size": 300, "moe_intermediate_size": 130, "q_lora_rank": 136,
    "kv_lora_rank": 160, "qk_nope_head_dim": 40, "qk_rope_head_dim": 8, "v_head_dim": 33, "num_hidden_layers": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""No size is a multiple of 128, and parts of ranks begin inside of blocks."""
WHOLE = ("norm", "embed_tokens", "lm_head", "mlp.gate.")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what is stored, what it stands for), by key."""
    packed, plain = {}, {}
    for key, x in deepseeks.tensors_of(CONFIG, tmp_path_factory.mktemp("made")).items():
        if any(part in key for part in WHOLE):
            packed[key] = plain[key] = x
        else:
            packed[key], packed[key + "_scale_inv"] = deepseeks.in_8_bits(x)
            plain[key] = deepseeks.out_of_8_bits(packed[key], packed[key + "_scale_inv"])
    return packed, plain


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, stored: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> list[Path]:
    """The same model in 8 bits, and in the float32 that those are."""
    root = tmp_path_factory.mktemp("models")
    config = {k: v for k, v in CONFIG.items() if k != "quantization_config"}
    return [deepseeks.write(root / "fp8", CONFIG, stored[0]), deepseeks.write(root / "plain", config, stored[1])]


def weights(folder: Path, ranks: Ranks, dtype: torch.dtype | None = None) -> list[Tensor]:
    return tree_leaves(load_model(folder, dtype, ranks)[1])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_read_is_what_it_stands_for(folders: list[Path], dtype: torch.dtype | None) -> None:
    """Every number is the stored one times the scale of its block, in float32, then rounded once."""
    got, want = (weights(folder, alone(), dtype) for folder in folders)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert {x.dtype for x in got} == {torch.float32, dtype or torch.float32}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_part(folders: list[Path], size: int) -> None:
    """Parts that begin inside of a block, along either axis, have the scales of where they lie."""

    def rank(group: Any) -> bool:
        ranks = Ranks(group, ep=False, device=torch.device("cpu"))
        got, want = (weights(folder, ranks) for folder in folders)
        return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    assert Threads.of(size).run(rank) == [True] * size


def test_logits(folders: list[Path]) -> None:
    """The model in 8 bits computes what the model of the numbers that those are computes."""
    got, want = (drive.load(folder).step({1: TOKENS})[1] for folder in folders)
    assert torch.equal(got, want)


@pytest.mark.parametrize("ep", [False, True])
def test_one_rank_reads_little(folders: list[Path], monkeypatch: pytest.MonkeyPatch, *, ep: bool) -> None:
    """A rank of four asks the files for about a quarter of the experts' numbers, cut or whole ones, not for all."""
    asked = [0, 0]
    opened = checkpoint._opened

    class Counting:
        """Counts the numbers of experts that are read; mutable."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def get_slice(self, key: str) -> Any:
            part = self.handle.get_slice(key)

            class Slice:
                def __getitem__(self, where: Any) -> Tensor:
                    x = part[where]
                    asked["experts" in key and key.endswith("weight")] += x.numel()
                    return x

                def __getattr__(self, name: str) -> Any:
                    return getattr(part, name)

            return Slice()

    from contextlib import contextmanager

    @contextmanager
    def counting(file: Path) -> Any:
        with opened(file) as handle:
            yield Counting(handle)

    monkeypatch.setattr(checkpoint, "_opened", counting)
    weights(folders[0], Ranks(Threads.of(4).group(1), ep=ep, device=torch.device("cpu")))
    total = 3 * 5 * 130 * 144  # four experts and a shared one
    assert 0.2 < asked[1] / total < 0.3


def spoil(root: Path, tensors: Mapping[str, Tensor], **change: Tensor | None) -> Path:
    """A checkpoint with some tensors replaced, or gone where None."""
    kept = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    return deepseeks.write(root, CONFIG, kept)


KEY = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({KEY + "_scale_inv": None}, f"{KEY} is of F8_E4M3 without its scales"),
        ({KEY: None}, f"missing: {KEY}.*unexpected: {KEY}_scale_inv"),
        ({KEY + "_scale_inv": torch.ones(1, 2)}, rf"{KEY}_scale_inv .*shape \(1, 2\).*wants .*\(2, 2\)"),
        ({KEY + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, rf"{KEY}_scale_inv .*I32"),
        ({KEY: torch.ones(130, 144)}, f"{KEY}_scale_inv.*F32 and needs no scales"),
        ({KEY: torch.ones(130, 144).to(torch.float8_e5m2)}, "F8_E5M2"),
        ({"model.norm.weight_scale_inv": torch.ones(2)}, "unexpected: model.norm.weight_scale_inv"),
        ({"model.layers.9.x.weight_scale_inv": torch.ones(2)}, "unexpected: model.layers.9.x"),
        ({KEY + "_scale_inv": torch.full((2, 2), math.nan)}, f"{KEY}: holds NaN"),
    ],
    ids=str,
)
def test_faults_are_named(
    tmp_path: Path, stored: tuple[dict[str, Tensor], dict[str, Tensor]], change: dict[str, Any], message: str
) -> None:
    """Scales that are missing, alone, of a wrong shape or kind, or not finite, are an error that names their key."""
    with pytest.raises(CheckpointError, match=message):
        weights(spoil(tmp_path / "bad", stored[0], **change), alone())


def test_layers_of_multi_token_prediction(
    tmp_path: Path, stored: tuple[dict[str, Tensor], dict[str, Tensor]], folders: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Layers behind the last are skipped with their scales where the config has them, which is said once; with or
    without them the model is the same, and without the config's word they are an error.
    """
    more = {k.replace("layers.1.", "layers.2."): v.clone() for k, v in stored[0].items() if "layers.1." in k}
    folder = deepseeks.write(
        tmp_path / "mtp", CONFIG, {**stored[0], **more, "model.layers.2.eh_proj.weight": torch.ones(2)}
    )
    with caplog.at_level(logging.INFO):
        got = weights(folder, alone())
    assert sum("multi-token prediction" in r.message for r in caplog.records) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, weights(folders[0], alone()), strict=True))
    silent = {**CONFIG, "num_nextn_predict_layers": 0}
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.2.eh_proj"):
        weights(
            deepseeks.write(
                tmp_path / "no", silent, {**stored[0], **more, "model.layers.2.eh_proj.weight": torch.ones(2)}
            ),
            alone(),
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"weight_block_size": [64, 128]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
    ],
)
def test_other_kinds_are_refused(change: dict[str, Any], named: str) -> None:
    """A way to quantize that is not read is refused by the name of what differs."""
    raw = {"quantization_config": {**CONFIG["quantization_config"], **change}}
    with pytest.raises(CheckpointError, match=f"config: quantization_config: .*{named}"):
        fp8.check_quantization(Fields(raw, "config"))
    fp8.check_quantization(Fields({"quantization_config": CONFIG["quantization_config"]}, "config"))
    fp8.check_quantization(Fields({"quantization_config": None}, "config"))


def test_parts() -> None:
    """Any part of a weight is multiplied by the scales of the blocks it lies in."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    stored, scales = deepseeks.in_8_bits(weight)
    whole = deepseeks.out_of_8_bits(stored, scales)
    assert fp8.scales_shape((300, 200)) == tuple(scales.shape) == (3, 2)
    for rows, columns in (
        (slice(0, 300), slice(0, 200)),
        (slice(100, 140), slice(127, 129)),
        (slice(256, 300), slice(3, 4)),
    ):
        cover = scales[fp8.covering(rows), fp8.covering(columns)]
        got = scaled.dequantized(stored[rows, columns], cover, (rows.start, columns.start))
        assert torch.equal(got, whole[rows, columns])
