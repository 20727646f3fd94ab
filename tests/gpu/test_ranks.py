"""Engines of two GPUs: what they compute, in graphs and without; and sums between GPUs. `run.sh ranks` calls these."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.torch import load_file, save_file

import deepseeks
import sources
from agentinfer.build import Settings
from agentinfer.loop import Engine, generate, open_engine
from agentinfer.ranks import open_ranks
from agentinfer.scoring import Score, score
from agentinfer.state.check import violations
from agentinfer.state.request import SamplingParams
from agentinfer.swap import swap_weights

Folder = Callable[[str, str], Path]
SETTINGS = Settings(
    device="cuda", num_blocks=600, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, seed=3
)
PROMPTS = [[(7 * i + j) % 90 for j in range(3 + 11 * i)] for i in range(9)]
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


def params() -> list[SamplingParams]:
    """Greedy, noisy, filtered and edited ones."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "top_p": 0.8, "seed": 6},
        {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.5, "logprobs": 2},
    )  # fmt: skip
    return [SamplingParams(max_tokens=48, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(len(PROMPTS))]


def said(engine: Engine) -> list[tuple[int, ...]]:
    """What the engine answers."""
    results = generate(engine, PROMPTS, params(), progress=False)
    assert [r.error for r in results] == [None] * len(PROMPTS)
    assert violations(engine.world.state) == []
    return [r.output_ids for r in results]


def over_two(folder: Path, settings: Settings) -> list[tuple[int, ...]]:
    """What an engine of two ranks answers."""
    with open_ranks(folder, settings, 2) as engine:
        return said(engine)


def test_sums_between_gpus() -> None:
    """Sums of all sizes, in graphs and without, are right and the same on both GPUs."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = sources.ROOT / "tests" / "all_reduce_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            out, _ = rank.communicate(timeout=150)
            assert rank.returncode == 0, out[-3000:]
            assert out.endswith("right\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # reads and closes its pipe, whichever of them failed


@pytest.mark.parametrize("shape", ["qwen3", "groups of 4, untied"])
def test_dense_engines(tiny_folder: Folder, shape: str) -> None:
    """In float32, two GPUs answer what one does, greedy, noisy, filtered and edited, in graphs and eagerly."""
    folder = tiny_folder(shape, "float32")
    want = said(open_engine(folder, SETTINGS))
    assert over_two(folder, SETTINGS) == want
    assert over_two(folder, evolve(SETTINGS, eager=True)) == want


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("config", [deepseeks.V2, deepseeks.V3], ids=["v2", "v3"])
def test_experts_and_latents(tmp_path: Path, config: Any, ep: bool) -> None:
    """So do they with latent attention and experts, cut by width or spread."""
    folder = deepseeks.write(tmp_path, {**config, **SIZES})
    want = said(open_engine(folder, SETTINGS))
    assert over_two(folder, evolve(SETTINGS, ep=ep)) == want
    assert over_two(folder, evolve(SETTINGS, ep=ep, eager=True)) == want


def test_many_steps_in_graphs_are_those_without(tiny_folder: Folder) -> None:
    """In bfloat16, 2,000 replayed steps of a full bucket end in the tokens of eager ones."""
    folder = tiny_folder("qwen3", "bfloat16")
    long = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
    sizes = {"max_model_len": 2128, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_blocks": 1200}
    settings, found = evolve(SETTINGS, **sizes), []
    for eager in (False, True):
        with open_ranks(folder, evolve(settings, eager=eager), 2) as engine:
            found.append([r.output_ids for r in generate(engine, PROMPTS[:8], long, progress=False)])
    assert found[0] == found[1]


def test_the_end_of_ranks_shuts_nccl_down(tiny_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """At once, although graphs have held its kernels; with an error, too, nobody waits."""
    folder = tiny_folder("qwen3", "bfloat16")
    with open_ranks(folder, SETTINGS, 2) as engine:
        said(engine)
        begin = time.monotonic()
    took = time.monotonic() - begin
    assert "was not shut down" not in caplog.text
    assert took < 10.0
    with pytest.raises(ZeroDivisionError), open_ranks(folder, SETTINGS, 2) as engine:  # noqa: PT012
        said(engine)
        begin = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - begin < 10.0


def test_scores_and_new_weights(tiny_folder: Folder, tmp_path: Path) -> None:
    """In float32, two GPUs score as one does, and go on with new weights as one does, in graphs that were captured
    before.
    """
    folder = tiny_folder("qwen3", "float32")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x * 1.5 if x.dim() == 2 else x for name, x in tensors.items()}, tmp_path / "model.safetensors")

    def drive(engine: Engine) -> list[Any]:
        found: list[Any] = []
        for source in (tmp_path, folder):
            found += [said(engine), score(engine, PROMPTS, top=3), swap_weights(engine, source)]
        return [*found, said(engine)]

    want = drive(open_engine(folder, SETTINGS))
    with open_ranks(folder, SETTINGS, 2) as engine:
        got = drive(engine)
    assert got[0] == got[-1]
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(mine, list) and isinstance(mine[0], Score):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
                np.testing.assert_array_equal(one.top_ids, other.top_ids)
        else:
            assert mine == theirs
