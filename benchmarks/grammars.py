"""What structured output costs on the host: reading the tokenizer, compiling, a mask a token.

The tokenizer is the demo model's, with its pairs of tokens added up to a vocabulary of 151,936, as large as Qwen3's.
Usage: python benchmarks/grammars.py [--vocab-size N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import numpy as np
from tokenizers import Tokenizer

from agentinfer.demo import default_cache, ensure_demo
from agentinfer.grammar import Grammars, allowed, compile_grammar, vocabulary_of
from agentinfer.state.limits import Limits
from agentinfer.state.structured import StructuredOutputsParams
from agentinfer.text import load_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags"],
}
MANY = {"type": "object", "properties": {f"property {i}": {"type": "string"} for i in range(300)}}
FORMS = {
    "schema, 4 properties": StructuredOutputsParams(json=PERSON),
    "schema, 300 optional properties": StructuredOutputsParams(json=MANY),
    "any JSON object": StructuredOutputsParams(json_object=True),
    "regex, a date": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"),
    "regex, 50 to 100 words": StructuredOutputsParams(regex=r"([a-z]{1,12} ){50,100}\."),
    "choice of 1,000": StructuredOutputsParams(choice=tuple(f"answer number {i}" for i in range(1000))),
    "Lark, arithmetic": StructuredOutputsParams(
        grammar='start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\nf: N | "(" e ")"\nN: /[0-9]+/'
    ),
}


def larger(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """*tokenizer* with random pairs of its tokens as tokens, up to *size*."""
    data = json.loads(tokenizer.to_str())
    vocab, rng = data["model"]["vocab"], random.Random(0)
    names = list(vocab)
    next_id = 1 + max(tokenizer.get_vocab().values())
    while next_id < size:
        pair = rng.choice(names) + rng.choice(names)
        if pair not in vocab and len(pair) < 24:
            vocab[pair] = next_id
            next_id += 1
    return Tokenizer.from_str(json.dumps(data))


def milliseconds(f, *arguments):
    begin = time.perf_counter()
    result = f(*arguments)
    return result, (time.perf_counter() - begin) * 1e3


def ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walked(g: Grammars, form: StructuredOutputsParams, end: int, most: int = 300) -> list[float]:
    """Milliseconds of each mask of some random outputs."""
    rng, times = random.Random(1), []
    for seq in range(3):
        output: tuple[int, ...] = ()
        while len(output) < most:
            mask, took = milliseconds(allowed, g, seq, form, output)
            times.append(took)
            may = [int(i) for i in ids(mask) if i != end]
            if not may:
                break
            output = (*output, rng.choice(may))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    size = parser.parse_args().vocab_size
    text = load_text(ensure_demo(default_cache(), print))
    from attrs import evolve

    text = evolve(text, tokenizer=larger(text.tokenizer, size))
    (end,) = text.end_ids
    limits = Limits(16, 64, 8, 64, 64, vocab_size=size, eos_ids=(end,))
    g = Grammars(text, limits)
    print(f"{size} tokens; tokenizer {milliseconds(vocabulary_of, g)[1]:.0f} ms, once")
    print("form: compile ms; mask median, p99, largest ms; from nothing after 100 tokens ms")
    for name, form in FORMS.items():
        compiled = milliseconds(compile_grammar, g, form)[1]
        times = walked(g, form, end)
        output = tuple(g.walks[0].read[:100])
        g.walks.clear()
        again = milliseconds(allowed, g, 9, form, output)[1]
        middle, most = statistics.median(times), np.quantile(times, 0.99)
        print(f"{name}: {compiled:.1f}; {middle:.3f}, {most:.3f}, {max(times):.3f}; {again:.2f} ({len(output)} tokens)")


main()
