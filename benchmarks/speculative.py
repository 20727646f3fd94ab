"""Speculative decoding on a CPU in float32, greedy: plain decoding, n-grams and a draft model in turn in one run.

    python benchmarks/speculative.py [FOLDER] [--rounds N] [--threads N] [--tokens N] [--json FILE]

FOLDER: a model folder; without one, the demo model. The draft model is the model itself, so that every guess is right:
what remains is what a draft costs. Texts: one that repeats itself, and one that does not. Times are of this process's
CPU (time.process_time), which other work on the machine disturbs least, and by the clock; medians over the rounds.
Each measurement begins with an empty prefix cache, and its first step, the prompt's, is part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from agentinfer.build import Settings
from agentinfer.demo import default_cache, ensure_demo
from agentinfer.loop import World, generate, open_engine
from agentinfer.speculative import Tally, draft_model, ngram, speculating
from agentinfer.state.engine import initial
from agentinfer.state.request import SamplingParams
from agentinfer.text import chat

LIST = "apples, pears, plums, apples, pears, plums, apples, pears, plums, apples, pears,"
CODE = "".join(
    f"def get_{name}(self):\n    return self._{name}\n\n" for name in ("width", "height", "depth", "colour", "weight")
)
ESSAY = "Explain in a few sentences why the sky is blue, why sunsets are red, and what colour the sky of Mars has."


def prompts(engine):
    repeat = [{"role": "user", "content": f"Repeat this text exactly:\n\n{CODE}"}]
    essay = [{"role": "user", "content": ESSAY}]
    return {
        "a list, continued": LIST,
        "code, repeated": chat(engine.text, repeat),
        "an essay": chat(engine.text, essay),
    }


def measure(engine, prompt, tokens, propose):
    engine.world = World(initial(engine.machine.limits), engine.world.device, None)
    engine.note = tally = Tally()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    clock, cpu = time.perf_counter(), time.process_time()
    if propose is None:
        (result,) = generate(engine, [prompt], params, progress=False)
    else:
        with speculating(engine, propose):
            (result,) = generate(engine, [prompt], params, progress=False)
    return result.output_ids, time.process_time() - cpu, time.perf_counter() - clock, tally


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.folder or ensure_demo(default_cache(), print)
    settings = Settings(dtype="float32", device="cpu", max_num_seqs=4, max_model_len=512, num_blocks=64, seed=0)
    engine, drafter = open_engine(folder, settings), open_engine(folder, settings)
    ways = {
        "plain": None,
        "ngram n=3 k=5": ngram(3, 5),
        "ngram n=3 k=10": ngram(3, 10),
        "draft k=4, the model itself": draft_model(drafter, 4),
    }
    rows = []
    for name, prompt in prompts(engine).items():
        runs = {way: [] for way in ways}
        measure(engine, prompt, 8, None)
        for _ in range(args.rounds):
            for way, propose in ways.items():
                runs[way].append(measure(engine, prompt, args.tokens, propose))
        plain = statistics.median(run[1] for run in runs["plain"])
        for way, found in runs.items():
            tally, cpu = found[0][3], statistics.median(run[1] for run in found)
            row = {
                "text": name,
                "way": way,
                "steps": tally.steps,
                "guesses": tally.drafts,
                "right": tally.accepted,
                "cpu_s": round(cpu, 3),
                "clock_s": round(statistics.median(run[2] for run in found), 3),
                "speed": round(plain / cpu, 2),
                "equal": all(run[0] == runs["plain"][0][0] for run in found),
            }
            rows.append(row)
            print(row, flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"torch": torch.__version__, **vars(args), "rows": rows}, default=str, indent=1)
        )


if __name__ == "__main__":
    main()
