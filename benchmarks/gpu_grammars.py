"""What structured output costs a decode step on a GPU: rows with a form among rows without, in milliseconds a step.

Needs a folder with a config.json (Qwen3-0.6B's is in configs/); weights are drawn at random, and the tokenizer is made
up: bytes, and random pairs of tokens up to the vocabulary. Usage: python benchmarks/gpu_grammars.py CONFIG.json
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentinfer.build import Settings
from agentinfer.loop import Engine, generate, open_engine
from agentinfer.state.request import SamplingParams

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOKENS, ROWS = 128, 64
FREE = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
FORMS = {
    "schema": {"json": {"type": "array", "items": ITEM, "minItems": 100}},
    "regex": {"regex": "[a-z ]{4000}"},
}


def write_folder(folder: Path, config: dict[str, object]) -> None:
    """A checkpoint without weights, whose tokenizer has as many tokens as *config* says."""
    rng, size = random.Random(0), int(str(config["vocab_size"]))
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate(names)}
    while len(vocab) < size - 1:
        vocab.setdefault(rng.choice(names) + rng.choice(names) + rng.choice(names), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": size - 1, "bos_token_id": size - 1}))


def step_ms(engine: Engine, each: list[SamplingParams]) -> float:
    """Milliseconds a step while all of *each* decode."""
    prompts = [[1000 + i] * 8 for i in range(len(each))]
    begin, step = time.perf_counter(), engine.world.state.step
    results = generate(engine, prompts, each, progress=False)
    took = time.perf_counter() - begin
    assert all(len(one.output_ids) == TOKENS for one in results), [one.error for one in results]
    return took / (engine.world.state.step - step) * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        write_folder(Path(place), json.loads(Path(sys.argv[1]).read_text()))
        engine = open_engine(place, Settings(dummy_weights=True, max_num_seqs=ROWS, max_model_len=1024, seed=0))
        for name, form in FORMS.items():
            bound = SamplingParams(max_tokens=TOKENS, temperature=0.0, structured_outputs=form)
            begin = time.perf_counter()
            generate(engine, [[1]], SamplingParams(max_tokens=2, structured_outputs=form), progress=False)
            print(f"{name}: first request {time.perf_counter() - begin:.2f} s")
            for rows in (1, 8, ROWS):
                for count in dict.fromkeys((0, 1, rows)):
                    each = [bound] * count + [FREE] * (rows - count)
                    step_ms(engine, each)
                    print(f"  {rows} rows, {count} of them with a {name}: {step_ms(engine, each):.2f} ms a step")


main()
