"""`agentinfer generate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from agentinfer.cli.form import formed
from agentinfer.cli.interrupt import on_interrupt
from agentinfer.cli.opened import opened, params_of
from agentinfer.cli.prompts import Prompt, read_prompts
from agentinfer.cli.record import Recorder, open_recorder
from agentinfer.cli.said import as_json, told
from agentinfer.cli.usage import complain
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, Result, generate, stream
from agentinfer.state.request import SamplingParams


def run(args: argparse.Namespace) -> int:
    """0 if every prompt was completed, 1 if one was refused or failed. Raises Usage."""
    prompts, params = read_prompts(args.prompts), told(args, formed(args, params_of(args)))
    with ExitStack() as stack:
        recorder = open_recorder(args.record) if args.record is not None else None
        if recorder is not None:
            stack.callback(recorder.close)
            stack.enter_context(on_interrupt(lambda: _leave(recorder)))
        engine = stack.enter_context(opened(args))
        if recorder is not None:
            recorder.begin(engine.machine.limits, args.policy)
            engine.note = recorder
        if args.json:
            return _as_json(engine, prompts, params)
        if len(prompts) == 1:
            return _streamed(engine, prompts[0], params)
        return _as_blocks(engine, prompts, params)


def _leave(recorder: Recorder) -> NoReturn:
    """An interrupt may come in the middle of a line: none may follow it."""
    recorder.stop()
    raise KeyboardInterrupt


def _as_json(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> int:
    results = generate(engine, prompts, params)
    for result in results:
        print(json.dumps(as_json(result)))
    return _status(results)


def _as_blocks(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> int:
    results = generate(engine, prompts, params)
    for result, prompt in zip(results, prompts, strict=True):
        asked = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
        print(f"=== {result.index}: {_shortened(' '.join(asked.split()))}")
        if result.error is not None:
            complain(f"prompt {result.index}: {result.error}")
        else:
            print(" ".join(map(str, result.output_ids)) if result.text is None else result.text)
        print(
            f"--- {result.finish_reason}, {len(result.output_ids)} tokens, {result.cached_tokens} of the prompt cached"
        )
    return _status(results)


def _shortened(text: str, most: int = 72) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _streamed(engine: Engine, prompt: Prompt, params: SamplingParams) -> int:
    """The text as it comes; token ids where there is no tokenizer."""
    last, result = "", None
    try:
        for delta in stream(engine, prompt, params):
            piece = delta.text if engine.text is not None else "".join(f"{token} " for token in delta.token_ids)
            print(piece, end="", flush=True)
            last, result = piece or last, delta.result
    except InvalidRequest as error:
        complain(error)
        return 1
    if not last.endswith("\n"):
        print(flush=True)
    if result is not None and result.error is not None:
        complain(result.error)
        return 1
    return 0


def _status(results: Sequence[Result]) -> int:
    return int(any(result.error is not None for result in results))
