"""Speculative decoding with a second model that guesses, and a loop of your own that lets it.

    python examples/speculative_draft.py [MODEL] [DRAFT]

MODEL, DRAFT: folders, hub ids, or "demo"; of one vocabulary. Without DRAFT the model guesses for itself: every guess is
right, which shows that all is in step, and nothing is gained.
"""

from __future__ import annotations

import sys

import agentinfer as ai
from agentinfer import speculative
from agentinfer.speculative import advance_speculative, draft_model

PROMPT = "Once upon a time"
SIZES = ai.Settings(max_model_len=256, max_num_seqs=4, num_blocks=64)
"""Of both engines: the draft model's KV lies in blocks of the same numbers."""


def main(model: str = "demo", draft: str | None = None) -> None:
    """Sample two continuations of PROMPT, and say what each step brings."""
    print(f"model {model}, guesses by {draft or model}: {PROMPT!r}", flush=True)
    engine = ai.open_engine(ai.find_model(model), SIZES)
    propose = draft_model(ai.open_engine(ai.find_model(draft or model), SIZES), k=4)
    text = engine.text
    if text is None:
        sys.exit(f"{model} has no tokenizer")
    ids = tuple(ai.encode(text, PROMPT))
    asked = [ai.Request(ids, ai.SamplingParams(max_tokens=48, temperature=0.8, seed=seed)) for seed in (1, 2)]

    # The loop itself: advance_speculative stands where advance does.
    tally, world, ends = speculative.Tally(), engine.world, []
    events: list[ai.Event] = [ai.Arrived(request) for request in asked]
    while events or ai.has_work(world.state) or world.flight is not None:
        world, output = advance_speculative(engine.machine, world, propose, events, note=tally)
        events = []
        if output is None:
            continue
        ends += output.finished
        for seq in sorted({*output.seqs.tolist()}):
            new = output.tokens[output.seqs == seq].tolist()
            print(f"{seq}: {len(new)} tokens {ai.decode(text, new)!r}", flush=True)
    for done in sorted(ends, key=lambda done: done.seq):
        print(repr(ai.decode(text, done.tokens)))
    print(f"{tally.tokens} tokens in {tally.steps} steps, {tally.accepted} of {tally.drafts} guesses right")


if __name__ == "__main__":
    main(*sys.argv[1:])
