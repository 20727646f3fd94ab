"""`agentinfer bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from agentinfer.bench.load import Load, measure, summary
from agentinfer.cli.usage import Usage, complain, line
from agentinfer.sse import Refused, Remote, get

Row = tuple[str, str]


def run(args: argparse.Namespace) -> int:
    """0, or 1 if a request failed. Raises Usage if there is no server, or the file can not be written."""
    if args.output is not None and not args.output.parent.is_dir():
        raise Usage(f"--output: {args.output.parent}: no such folder")
    remote = remote_of(args.url, os.environ)
    model = args.model or model_of(remote)
    load = Load(
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        lengths=args.lengths,
        token_ids=args.token_ids,
        rate=args.rate,
        arrivals=args.arrivals,
        concurrency=args.concurrency,
        temperature=args.temperature,
        warmup=args.warmup,
        seed=args.seed,
        processes=args.processes,
    )
    found: dict[str, Any] = {
        "bench": "serve",
        "url": args.url,
        "model": model,
        **summary(load, measure(remote, model, load)),
    }
    words = json.dumps(found)
    if args.output is not None:
        try:
            args.output.write_text(words + "\n", "utf-8")
        except OSError as error:
            raise Usage(f"--output: {line(error)}") from error
    print(words if args.json else "\n".join(f"{name:<24}{value}" for name, value in rows(found)))
    for said, count in found["errors"].items():
        complain(f"{count} times: {said}")
    return int(found["failed"] > 0)


def remote_of(url: str, environ: Mapping[str, str]) -> Remote:
    """The server at *url*, with the key that *environ* has for it."""
    return Remote(url, environ.get("AGENTINFER_API_KEY") or environ.get("OPENAI_API_KEY"))


def model_of(remote: Remote) -> str:
    """What *remote* calls its first model. Raises Usage if it does not answer."""
    try:
        return str(asyncio.run(get(remote, "/v1/models"))["data"][0]["id"])
    except (Refused, OSError, ValueError, LookupError, TypeError) as error:
        raise Usage(f"--url: {remote.url}: {line(error)}") from error


def rows(found: Mapping[str, Any]) -> Iterable[Row]:
    """What a person reads."""
    yield "requests", f"{found['completed']:,} done, {found['failed']:,} failed, in {found['duration_s']:.2f} s"
    yield "output", f"{found['output_tokens_per_s']:,.1f} tok/s; {found['output_tokens']:,} tokens"
    yield "all tokens", f"{found['total_tokens_per_s']:,.1f} tok/s; {found['prompt_tokens']:,} of prompts"
    yield "requests a second", f"{found['requests_per_s']:,.2f}"
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("whole request", "e2e_ms")):
        times = found[key]
        yield name, f"mean {times['mean']:.2f} ms, p50 {times['p50']:.2f}, p99 {times['p99']:.2f}"
