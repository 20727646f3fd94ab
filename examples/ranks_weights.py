"""A trainer's new weights on several ranks, each of which has its own copy of them.

    torchrun --nproc-per-node 2 examples/ranks_weights.py FOLDER

FOLDER: a model folder with one model.safetensors. Rank 0 drives the engine; the others follow, and are asked for their
weights when rank 0 swaps to tensors. (For a folder that all can read, `swap_weights(engine, folder)` is all there is to
do, and `open_ranks(folder, settings, tp=2)` needs no torchrun.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

import agentinfer as ai
from agentinfer.cli.launch import place_of
from agentinfer.ranks import STEP_S, follow_rank
from agentinfer.text import eos_union, load_text

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def trained(folder: Path) -> Mapping[str, Tensor]:
    """What a trainer would have in memory: whole tensors by their checkpoint keys. This one turns the head round."""
    tensors = load_file(folder / "model.safetensors")
    return {name: -x if name == "lm_head.weight" else x for name, x in tensors.items()}


def main() -> None:
    """Answer, swap, answer again."""
    folder, place = Path(sys.argv[1]), place_of(os.environ)
    if place is None:
        sys.exit("start this with torchrun, and at least two ranks")
    settings = ai.Settings(max_num_seqs=4, num_blocks=64, max_model_len=64)
    if place.rank:
        eos = eos_union((), load_text(folder))
        follow_rank(folder, settings, eos, place, STEP_S, weights=lambda: trained(folder))
        return
    params = ai.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with ai.open_ranks(folder, settings, place.size, place) as engine:
        before = ai.generate(engine, PROMPTS, params, progress=False)
        version = ai.swap_weights(engine, trained(folder))
        after = ai.generate(engine, PROMPTS, params, progress=False)
    for old, new in zip(before, after, strict=True):
        print(f"version 0: {old.output_ids}\nversion {version}: {new.output_ids}")


if __name__ == "__main__":
    main()
