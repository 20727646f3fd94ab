"""Several answers, and what is said of their tokens: from flags to parameters, from results to JSON."""

from __future__ import annotations

import argparse
import math
from typing import Any

from attrs import evolve

from agentinfer.cli.opened import flagged
from agentinfer.cli.usage import Usage
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Completion, Result, TokenLogprobs
from agentinfer.state.request import SamplingParams


def told(args: argparse.Namespace, params: SamplingParams) -> SamplingParams:
    """*params*, with the answers of the flags. Raises Usage, also where they would not be shown."""
    for name in ("n", "logprobs", "prompt_logprobs"):
        if getattr(args, name) not in (None, 1 if name == "n" else None) and not args.json:
            raise Usage(f"--{name.replace('_', '-')}: is shown with --json only")
    try:
        return evolve(params, n=args.n, logprobs=args.logprobs, prompt_logprobs=args.prompt_logprobs)
    except InvalidRequest as error:
        raise Usage(flagged(args, error)) from error


def as_json(result: Result) -> dict[str, Any]:
    """*result* as JSON data, its keys in the documented order; the last ones where they were asked for."""
    first, outputs = result.outputs[0], result.outputs
    data: dict[str, Any] = {
        "index": result.index,
        "prompt_ids": list(result.prompt_ids),
        "output_ids": list(first.output_ids),
        "text": first.text,
        "finish_reason": first.finish_reason,
        "cached_tokens": result.cached_tokens,
        "error": result.error,
        **_said(first),
    }
    if result.prompt_logprobs is not None:
        data["prompt_logprobs"] = [None if one is None else _likely(one) for one in result.prompt_logprobs]
    if len(outputs) > 1:
        data["outputs"] = [_output(one) for one in outputs]
    return data


def _output(one: Completion) -> dict[str, Any]:
    return {
        "index": one.index,
        "output_ids": list(one.output_ids),
        "text": one.text,
        "finish_reason": one.finish_reason,
        "error": one.error,
        **_said(one),
    }


def _said(one: Completion) -> dict[str, Any]:
    if one.logprobs is None:
        return {}
    offsets = None if one.text_offsets is None else list(one.text_offsets)
    return {"logprobs": [_likely(said) for said in one.logprobs], "text_offsets": offsets}


def _likely(said: TokenLogprobs) -> dict[str, Any]:
    """NaN and infinity, which JSON has not, become null."""
    top = [[token, _finite(value)] for token, value in zip(said.top_ids, said.top_logprobs, strict=True)]
    return {"token_id": said.token_id, "logprob": _finite(said.logprob), "rank": said.rank, "top": top}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
