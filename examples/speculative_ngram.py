"""Speculative decoding without a second model: what comes next is looked up in the text so far.

    python examples/speculative_ngram.py [MODEL] [PROMPT]

MODEL: a folder, a hub id, or "demo". The answer is the same, token for token; what changes is the number of steps.
"""

from __future__ import annotations

import sys
import time

import agentinfer as ai
from agentinfer import speculative

PROMPT = "one two three one two three one two three one two three one"


def main(model: str = "demo", prompt: str = PROMPT) -> None:
    """Complete *prompt* plainly, then with guesses."""
    tally = speculative.Tally()
    engine = ai.open_engine(ai.find_model(model), ai.Settings(max_model_len=256), note=tally)
    params = ai.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)

    begin = time.perf_counter()
    (plain,) = ai.generate(engine, [prompt], params, progress=False)
    print(f"plain:  {tally.steps} steps, {time.perf_counter() - begin:.2f} s")

    tally.steps = 0
    begin = time.perf_counter()
    (fast,) = speculative.generate(engine, [prompt], params, propose=speculative.ngram(n=3, k=5), progress=False)
    print(f"ngram:  {tally.steps} steps, {time.perf_counter() - begin:.2f} s")
    print(f"{tally.accepted} of {tally.drafts} guesses were right")
    print("the same tokens" if fast.output_ids == plain.output_ids else "OTHER TOKENS")
    print(fast.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
