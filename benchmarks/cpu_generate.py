"""Greedy decoding on a CPU in float32, beside transformers on the same weights, in turn in one run.

    python benchmarks/cpu_generate.py [FOLDER] [--json FILE] [--rounds N] [--threads N]

FOLDER: a model folder; without one, the demo model. Each side generates 64 tokens (the end tokens off):
one request; 16 equal requests together, and one after another; 16 of mixed lengths together, against a batch
that transformers pads. Medians over the rounds; before them, one of each to warm up. Our prefix cache is
emptied by a new engine for each measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import transformers

from agentinfer.build import Settings
from agentinfer.loop import World, generate, open_engine
from agentinfer.state.engine import initial
from agentinfer.state.request import SamplingParams

TOKENS = 64
TEXT = (
    "Explain in a few sentences why the sky is blue, why sunsets are red, and what the colour of the sky would be on a "
    "planet with a thicker atmosphere. Then name three books on optics, and say for whom each of them was written. "
)


class Ours:
    def __init__(self, folder):
        settings = Settings(dtype="float32", device="cpu", max_num_seqs=16, max_model_len=2048, seed=0)
        self.engine = open_engine(folder, settings)
        self.params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    def __call__(self, prompts):
        engine = self.engine
        engine.world = World(initial(engine.machine.limits), engine.world.device, None)
        begin = time.perf_counter()
        results = generate(engine, prompts, self.params, progress=False)
        took = time.perf_counter() - begin
        assert all(len(r.output_ids) == TOKENS for r in results), results
        return took, [list(r.output_ids) for r in results]


class Theirs:
    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # as ours: the end tokens do not end anything
        self.pad = 0

    @torch.inference_mode()
    def __call__(self, prompts):
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=self.pad,
        )
        took = time.perf_counter() - begin
        return took, out[:, width:].tolist()


def one_by_one(side, prompts):
    """Total seconds of *prompts* one after another."""
    runs = [side([p]) for p in prompts]
    return sum(took for took, _ in runs), [out[0] for _, out in runs]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = args.folder
    if folder is None:
        from agentinfer.demo import cache_dir, ensure_demo

        folder = ensure_demo(cache_dir(os.environ, Path.home()), print)
    ours, theirs = Ours(folder), Theirs(folder)
    prompt = ours.engine.text.tokenizer.encode(TEXT).ids
    equal = [prompt] * 16
    mixed = [prompt[: 3 + 2 * i] + prompt * (i % 3) for i in range(16)]
    cases = {
        "one request": (lambda s: s([prompt])),
        "16 equal together": (lambda s: s(equal)),
        "16 mixed together": (lambda s: s(mixed)),
        "16 one after another": (lambda s: one_by_one(s, equal)),
    }
    times = {(name, side): [] for name in cases for side in ("ours", "theirs")}
    same = {}
    for i in range(args.rounds + 1):
        for name, run in cases.items():
            if name == "16 one after another" and i != 1:
                continue
            a, mine = run(ours)
            b, other = run(theirs)
            same[name] = sum(x == y for x, y in zip(mine, other, strict=True)) / len(mine)
            if i:
                times[name, "ours"].append(a)
                times[name, "theirs"].append(b)
    rows = []
    for name in cases:
        a, b = (statistics.median(times[name, side]) for side in ("ours", "theirs"))
        n = 1 if name == "one request" else 16
        rows.append(
            {
                "case": name,
                "ours_tok_s": round(n * TOKENS / a, 1),
                "transformers_tok_s": round(n * TOKENS / b, 1),
                "speed_ratio": round(b / a, 2),
                "equal_outputs": same[name],
            }
        )
        row = rows[-1]
        print(f"{name:>22}: {row['ours_tok_s']} tok/s, transformers {row['transformers_tok_s']}, {row['speed_ratio']}x")
    seconds = {name: statistics.median(times[name, "ours"]) for name in cases}
    theirs_s = {name: statistics.median(times[name, "theirs"]) for name in cases}
    batch = theirs_s["16 one after another"] / seconds["16 equal together"]
    own = seconds["16 one after another"] / seconds["16 equal together"]
    print(f"16 equal together: {batch:.1f}x transformers' 16 one after another, {own:.1f}x our own")
    if args.json:
        found = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "prompt_tokens": len(prompt),
            "tokens": TOKENS,
            "rows": rows,
            "batch_of_16_over_transformers_one_by_one": round(batch, 2),
            "batch_of_16_over_our_one_by_one": round(own, 2),
        }
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
