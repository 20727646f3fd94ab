"""`agentinfer bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from agentinfer.bench.measure import Decode, Mix, Prefill, Throughput, Times, decode, prefill, throughput
from agentinfer.bench.start import startup
from agentinfer.bench.watch import Profile, engine_facts, surroundings, watched
from agentinfer.cli.locate import locate
from agentinfer.cli.opened import flagged, one_line, opened, settings_of
from agentinfer.cli.usage import Usage, hint, line
from agentinfer.errors import InvalidRequest, InvalidSetting
from agentinfer.loop import Engine

Row = tuple[str, str]
"""What was measured, and how it went."""


def run(args: argparse.Namespace) -> int:
    """0. Raises Usage for a wrong model, a setting, or what these settings can not run."""
    for name in ("output", "profile"):
        file = getattr(args, name, None)
        if file is not None and not file.parent.is_dir():  # said before anything is measured
            raise Usage(f"--{name}: {file.parent}: no such folder")
    measure = {"latency": _latency, "throughput": _throughput, "startup": _startup}[args.bench]
    try:
        report, rows = measure(args)
    except (InvalidSetting, InvalidRequest) as error:
        raise Usage(flagged(args, error)) from error
    words = json.dumps({"bench": args.bench, **report})
    if args.output is not None:
        try:
            args.output.write_text(words + "\n", "utf-8")
        except OSError as error:
            raise Usage(f"--output: {line(error)}") from error
    if args.json:
        print(words)
    else:
        print("\n".join(f"{name:<34}{value}" for name, value in rows))
    return 0


def _latency(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    cases = [(size, context) for context in args.contexts for size in args.batch_sizes]
    with _engine(args, max(args.batch_sizes, default=1)) as (engine, report):
        device = engine.machine.ranks.device
        decoded: list[dict[str, Any]] = []
        filled: list[dict[str, Any]] = []
        rows: list[Row] = []
        for i, length in enumerate(args.prefill):
            last = not cases and i + 1 == len(args.prefill)
            with watched(device, args.sample_ms / 1e3) as facts:
                found = prefill(engine, length, runs=args.runs, seed=args.seed, profile=_profile(args, device, last))
            filled.append({**attrs.asdict(found), **facts})
            rows.append(_prefill_row(found))
        for i, (size, context) in enumerate(cases):
            with watched(device, args.sample_ms / 1e3) as facts:
                step = decode(
                    engine,
                    size,
                    context,
                    steps=args.steps,
                    warmup=args.warmup,
                    runs=args.runs,
                    temperature=args.temperature,
                    seed=args.seed,
                    profile=_profile(args, device, i + 1 == len(cases)),
                )
            decoded.append({**attrs.asdict(step), **facts})
            rows.append(_decode_row(step))
    return {**report, "temperature": args.temperature, "prefill": filled, "decode": decoded}, rows


def _throughput(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    mix = Mix(args.requests, args.prompt_tokens, args.output_tokens, args.temperature, args.seed)
    with _engine(args, min(args.requests, 256)) as (engine, report):
        prompts, outputs = (
            sum(span) * args.requests * args.runs // 2 for span in (mix.prompt_tokens, mix.output_tokens)
        )
        hint(f"about {prompts:,} prompt tokens and {outputs:,} output tokens to come")
        device = engine.machine.ranks.device
        with watched(device, args.sample_ms / 1e3) as facts:
            served = throughput(engine, mix, runs=args.runs, profile=_profile(args, device, last=True))
    report |= {"mix": attrs.asdict(mix), "served": [attrs.asdict(one) for one in served], **facts}
    return report, [row for one in served for row in _throughput_rows(one)]


def _startup(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    if args.tp not in (None, 1):
        raise Usage("--tp: the start of one rank is all that startup measures")
    settings, folder = settings_of(args), locate(args.model, weights=not args.dummy_weights)
    with one_line(args):
        starts = startup(folder, settings, runs=args.runs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {**surroundings(device), "settings": attrs.asdict(settings), "starts_s": starts}
    return report, [(name, f"{seconds:.2f} s") for start in starts for name, seconds in start.items()]


@contextmanager
def _engine(args: argparse.Namespace, num_seqs: int) -> Generator[tuple[Engine, dict[str, Any]]]:
    """The engine, for at least *num_seqs* sequences at once, and what its numbers are of."""
    args.max_num_seqs = max(args.max_num_seqs, num_seqs)
    with opened(args) as engine:
        yield engine, {**surroundings(engine.machine.ranks.device), **dict(engine_facts(engine, settings_of(args)))}


def _profile(args: argparse.Namespace, device: torch.device, last: bool) -> Profile | None:
    return Profile(args.profile, device) if last and args.profile is not None else None


def _decode_row(step: Decode) -> Row:
    name = f"decode, batch {step.batch_size}, context {step.mean_context:.0f}"
    return name, f"{step.ms_per_step:.3f} ms, {step.tokens_per_s:,.0f} tok/s; a step {_spread(step.steps)}"


def _prefill_row(found: Prefill) -> Row:
    times = found.times
    return f"prefill, {found.prompt_tokens} tokens", f"{found.tokens_per_s:,.0f} tok/s; {_spread(times)}"


def _throughput_rows(one: Throughput) -> Iterable[Row]:
    yield "output", f"{one.tokens_per_s:,.0f} tok/s: {one.output_tokens:,} tokens in {one.total_s:.2f} s"
    yield "steps", f"{one.num_steps:,}, {one.ms_per_step:.3f} ms each; {_spread(one.steps)}"
    yield "first token", _spread(one.first_token)


def _spread(times: Times) -> str:
    return f"median {times.median:.3f} ms (p10 {times.p10:.3f}, p90 {times.p90:.3f})"
