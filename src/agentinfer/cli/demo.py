"""`agentinfer demo`: one answer as it comes, then the same question eight times in one batch, with what it took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter

from attrs import define
from tqdm import tqdm

from agentinfer.cli.locate import demo_folder
from agentinfer.cli.opened import one_line
from agentinfer.cli.usage import Broken
from agentinfer.loop import Engine, Result, generate, open_engine, stream
from agentinfer.state.engine import EngineState
from agentinfer.state.event import Event, Landed
from agentinfer.state.ids import ints
from agentinfer.state.request import SamplingParams
from agentinfer.text import chat

BATCH = 8
TEMPERATURE = 0.7


def run(args: argparse.Namespace) -> int:
    """0. Raises Usage if the demo model can not be had, Broken if it fails."""
    args.model = "demo"
    with one_line(args):
        folder = demo_folder(quiet=False)
        began = perf_counter()
        engine = open_engine(folder)
    text, limits, model = engine.text, engine.machine.limits, engine.machine.model
    if text is None:
        raise Broken(f"{folder}: has no tokenizer")
    prompt = chat(text, [{"role": "user", "content": args.question}])
    placed = f"{str(model.dtype).removeprefix('torch.')} on {engine.machine.ranks.device}"
    print(f"{folder.name}: {model.name}, {placed}, opened in {perf_counter() - began:.1f} s")
    print(f"{limits.num_blocks:,} KV blocks of {limits.block_size} tokens, policy {engine.machine.policy.__name__}\n")
    alone(engine, args.question, prompt, args.max_tokens)
    together(engine, prompt, args.max_tokens)
    return 0


@define
class Watch:
    """Mutable: told of each event, it counts what the scheduler did."""

    tokens: Callable[[int], object] = lambda _: None
    """Told how many each step gave."""
    steps: int = 0
    most_blocks: int = 0
    most_shared: int = 0

    def __call__(self, event: Event, state: EngineState) -> None:
        """Look at *state* once a step."""
        if isinstance(event, Landed):
            refs = ints(state.pool.refs)
            self.steps += 1
            self.tokens(len(event.tokens))
            self.most_blocks = max(self.most_blocks, sum(count > 0 for count in refs))
            self.most_shared = max(self.most_shared, sum(count > 1 for count in refs))


@contextmanager
def watched(engine: Engine, tokens: Callable[[int], object] = lambda _: None) -> Generator[Watch]:
    """*engine*, with somebody who counts, and tells *tokens* how many came."""
    before, engine.note = engine.note, (watch := Watch(tokens))
    try:
        yield watch
    finally:
        engine.note = before


def alone(engine: Engine, question: str, prompt: tuple[int, ...], max_tokens: int) -> None:
    """One answer, piece by piece, the likeliest token each time."""
    print(f"> {question}\n")
    began, first, result = perf_counter(), None, None
    with watched(engine) as watch:
        for delta in stream(engine, prompt, SamplingParams(max_tokens=max_tokens, temperature=0)):
            first = perf_counter() if first is None else first
            print(delta.text, end="", flush=True)
            result = delta.result
    ended = perf_counter()
    done = _checked(result)
    first = ended if first is None else first
    rate = (len(done.output_ids) - 1) / max(ended - first, 1e-9)
    print(f"\n\n{len(prompt)} prompt tokens, the first token after {first - began:.2f} s")
    print(
        f"{len(done.output_ids)} tokens in {watch.steps} steps, {rate:.1f} tokens/s; it ended by {done.finish_reason}\n"
    )


def together(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> None:
    """The same prompt in one batch, each with a seed of its own."""
    print(f"The same question {BATCH} times in one batch, temperature {TEMPERATURE}, seeds 1 to {BATCH}:")
    print(f"{BATCH * max_tokens:,} tokens at most\n", flush=True)
    params = [SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed + 1) for seed in range(BATCH)]
    began = perf_counter()
    bar = tqdm(total=BATCH * max_tokens, unit="token", leave=False, disable=not sys.stderr.isatty())
    with bar, watched(engine, bar.update) as watch:
        results = generate(engine, [prompt] * BATCH, params, progress=False)
    seconds = perf_counter() - began
    for result in results:
        words = " ".join((_checked(result).text or "").split())
        print(f"  {result.index + 1}  {words if len(words) <= 100 else words[:97] + '...'}")
    tokens, cached = sum(len(r.output_ids) for r in results), sum(r.cached_tokens for r in results)
    asked, pool = len(prompt) * BATCH, engine.machine.limits.num_blocks
    print(f"\n{tokens} tokens in {watch.steps} steps and {seconds:.1f} s: {tokens / seconds:.1f} tokens/s together")
    print(
        f"blocks: {watch.most_blocks} of {pool:,} in use at most, {watch.most_shared} of them shared by several answers"
    )
    print(f"prefix hits: {cached} of {asked} prompt tokens were not computed again ({100 * cached / asked:.0f} %)")


def _checked(result: Result | None) -> Result:
    """*result*, which must have gone well. Raises Broken."""
    if result is None or result.error is not None:
        raise Broken("the demo model failed: " + ("no result" if result is None else str(result.error)))
    return result
