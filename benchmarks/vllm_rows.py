"""vLLM's side of vs_vllm.py: one engine on dummy weights, one JSON line a row. Runs where vLLM is importable.

    python benchmarks/vllm_rows.py FOLDER OUT.jsonl --rows decode1,decode64,prefill8192,mix,start [--eager] [--reinit]

Ways of measuring are those of `agentinfer bench`: a decode step is (time of 256 tokens - time of 32) / 224 after
prompts of 128 ids; a prefill is a request of one token; the mix is drawn by the same calls from the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import time
import traceback
from pathlib import Path

SHORT, LONG, PROMPT = 32, 256, 128
IDS = 10_001


def reinit(model):
    """Normal(0, 0.02), norms 1. vLLM's own dummy values make all experts of a router tie."""
    import torch

    torch.cuda.manual_seed(0)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0)
        elif p.dim() >= 2:
            for chunk in p.data.flatten(0, -2).split(8192):
                chunk.normal_(0, 0.02)
    torch.cuda.synchronize()


class Rows:
    def __init__(self, args):
        if args.reinit:
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        begin = time.time()
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        imported = time.time()
        self.llm = LLM(
            model=args.folder,
            load_format="dummy",
            max_model_len=args.max_model_len,
            enforce_eager=args.eager,
            tensor_parallel_size=args.tp,
        )
        ready = time.time()
        self.draw = random.Random(1234)
        self.generate(self.prompts(1, SHORT), self.greedy(1))
        self.start = {
            "interpreter": begin - args.started,
            "imports": imported - begin,
            "engine": ready - imported,
            "first_token": time.time() - ready,
            "total": time.time() - args.started,
        }
        if args.reinit:
            self.llm.apply_model(reinit)
        self.generate(self.prompts(2, SHORT), self.greedy(16))
        self.generate(self.prompts(2, SHORT), self.params(temperature=0.6, ignore_eos=True, max_tokens=16))

    def prompts(self, count, length):
        return [{"prompt_token_ids": [self.draw.randrange(IDS) for _ in range(length)]} for _ in range(count)]

    def greedy(self, tokens):
        return self.params(temperature=0.0, ignore_eos=True, max_tokens=tokens)

    def generate(self, prompts, params):
        begin = time.perf_counter()
        done = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, sum(len(x.outputs[0].token_ids) for x in done)

    def decode(self, batch, runs):
        self.generate(self.prompts(batch, PROMPT), self.greedy(8))
        each = []
        for _ in range(runs):
            short, tokens = self.generate(self.prompts(batch, PROMPT), self.greedy(SHORT))
            assert tokens == batch * SHORT
            long, tokens = self.generate(self.prompts(batch, PROMPT), self.greedy(LONG))
            assert tokens == batch * LONG
            each.append((long - short) / (LONG - SHORT) * 1e3)
        ms = statistics.median(each)
        return {"ms_per_step": ms, "tokens_per_s": batch * 1e3 / ms, "runs_ms": each}

    def prefill(self, length, runs):
        self.generate(self.prompts(1, length), self.greedy(1))
        each = [self.generate(self.prompts(1, length), self.greedy(1))[0] * 1e3 for _ in range(runs)]
        return {"ms": statistics.median(each), "runs_ms": each}

    def mix(self, runs, count=256, lengths=(100, 1024), temperature=0.6):
        rates = []
        for run in range(runs):
            draw = random.Random(0)
            ids = [[draw.randrange(IDS) for _ in range(draw.randint(*lengths))] for _ in range(count)]
            if run:  # other ids: no prefix is found again
                ids = [[(x + run * IDS) % (6 * IDS) for x in prompt] for prompt in ids]
            params = [
                self.params(temperature=temperature, ignore_eos=True, max_tokens=draw.randint(*lengths), seed=None)
                for _ in range(count)
            ]
            took, tokens = self.generate([{"prompt_token_ids": prompt} for prompt in ids], params)
            assert tokens == sum(p.max_tokens for p in params)
            rates.append({"total_s": took, "output_tokens": tokens, "tokens_per_s": tokens / took})
        return {"tokens_per_s": statistics.median(x["tokens_per_s"] for x in rates), "runs": rates}

    def row(self, name):
        kind, number = re.fullmatch(r"([a-z]+)(\d*)", name).groups()
        match kind:
            case "start":
                return self.start
            case "decode":
                return self.decode(int(number), 5 if number == "1" else 3)
            case "prefill":
                return self.prefill(int(number), 7)
            case "mix":
                return self.mix(2)
        raise ValueError(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--rows", type=lambda given: given.split(","), required=True)
    parser.add_argument("--started", type=float, default=time.time(), help="when this process was started")
    parser.add_argument("--until", type=float, default=float("inf"), help="when to begin no other row")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--reinit", action="store_true")
    args = parser.parse_args()
    rows = Rows(args)
    with Path(args.out).open("a", encoding="utf-8") as out:
        for name in args.rows:
            try:
                found = {"skipped": "no time"} if time.time() > args.until else rows.row(name)
            except Exception as error:  # noqa: BLE001 - the other rows go on
                traceback.print_exc()
                found = {"failed": repr(error)[:400]}
            print(json.dumps({"row": name, "eager": args.eager, **found}), file=out, flush=True)


if __name__ == "__main__":  # vLLM starts its engine's process anew from this file
    main()
