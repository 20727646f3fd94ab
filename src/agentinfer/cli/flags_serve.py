"""The flags of `serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentinfer.cli.values import integer, number, span, web_address

PARSERS = ("auto", "none", "hermes", "qwen3", "deepseek_v3", "deepseek_r1")


def serve_flags(parser: argparse.ArgumentParser) -> None:
    """Address, keys, limits, life."""
    _address(parser)
    _limits(parser)
    _life(parser)


def _address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    group.add_argument(
        "--port", metavar="N", type=integer(0, 65535), default=8000, help="0: any that is free (default: %(default)s)"
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="what clients may call the model (default: MODEL; may be given more than once)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="who has none of these gets nothing but /health (may be given more than once; default: all may come)",
    )
    group.add_argument(
        "--admin-key", metavar="KEY", action="append", default=[], help="opens /admin (default: nobody administers)"
    )
    group.add_argument(
        "--parser",
        choices=PARSERS,
        default="auto",
        help="how the model writes reasoning and tool calls (default: what its chat template looks like)",
    )
    group.add_argument(
        "--http-process",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answer over HTTP in a process of its own, or in the engine's",
    )
    group.add_argument("--no-ui", action="store_true", help="no status page at /")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        type=web_address,
        help="send an OpenTelemetry span of each request there, by OTLP over HTTP: http://HOST:4318/v1/traces",
    )
    group.add_argument(
        "--record", metavar="FILE", type=Path, help="write every event and the state's digest after it, for 'replay'"
    )


def _seconds(group: Any, name: str, default: float, words: str, *, zero: bool = False) -> None:
    """A time that is more than 0, or not less where *zero*."""
    group.add_argument(name, metavar="S", type=number(0, 1e9, above=not zero), default=default, help=words)


def _limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits of one request")
    group.add_argument("--max-output-tokens", metavar="N", type=integer(1), help="default: to the end of max-model-len")
    group.add_argument(
        "--max-body", metavar="BYTES", type=integer(1), default=8 << 20, help="of a request (default: 8 MiB)"
    )
    group.add_argument("--max-n", metavar="N", type=integer(1), default=128, help="choices (default: %(default)s)")
    group.add_argument(
        "--max-logprobs", metavar="N", type=integer(0), default=20, help="alternatives a token (default: %(default)s)"
    )
    group.add_argument(
        "--max-stop", metavar="N", type=integer(0), default=16, help="stop strings (default: %(default)s)"
    )
    _seconds(
        group, "--request-timeout", 3600.0, "seconds from the end of a request to the end of its answer (default: 3600)"
    )
    _seconds(group, "--header-timeout", 10.0, "seconds for the head of a request to come (default: 10)")
    _seconds(group, "--body-timeout", 30.0, "seconds for its body (default: 30)")


def _life(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load and life")
    group.add_argument(
        "--max-queued",
        metavar="N",
        type=integer(1),
        help="sequences that may wait for their first token; the rest gets 503 (default: 4 times --max-num-seqs)",
    )
    group.add_argument(
        "--max-queued-tokens", metavar="N", type=integer(1), help="of these together (default: 4 times what KV holds)"
    )
    _seconds(group, "--idle-timeout", 75.0, "seconds that a connection may be kept without a request (default: 75)")
    _seconds(
        group,
        "--shutdown-timeout",
        30.0,
        "seconds for those to finish that have begun when SIGTERM comes (default: 30)",
        zero=True,
    )


def bench_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Which server, and what is asked of it."""
    parser.add_argument(
        "--url", metavar="URL", type=web_address, default="http://127.0.0.1:8000", help="default: %(default)s"
    )
    parser.add_argument("--model", metavar="NAME", help="what the server calls its model (default: it is asked)")
    parser.add_argument("--requests", metavar="N", type=integer(1), default=256, help="how many (default: %(default)s)")
    parser.add_argument(
        "--warmup", metavar="N", type=integer(0), default=0, help="requests before, not counted (default: 0)"
    )
    parser.add_argument(
        "--rate",
        metavar="R",
        type=number(0, 1e6, above=True),
        help="requests a second (default: as --concurrency lets)",
    )
    parser.add_argument(
        "--arrivals", choices=("poisson", "fixed"), default="poisson", help="of --rate (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=integer(1), default=256, help="requests at once (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths", choices=("uniform", "sharegpt"), default="uniform",
        help="sharegpt: about those of its conversations (default: the two ranges below)",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", metavar="A-B", type=span, default=(100, 1024), help="default: 100-1024")
    parser.add_argument("--output-tokens", metavar="A-B", type=span, default=(100, 1024), help="default: 100-1024")
    parser.add_argument(
        "--token-ids", metavar="A-B", type=span, default=(1000, 30000), help="ids in prompts (default: 1000-30000)"
    )
    parser.add_argument("--temperature", metavar="T", type=number(0, 1e6), default=0.0, help="default: 0")
    parser.add_argument("--seed", metavar="S", type=integer(0), default=0, help="of lengths, ids, times (default: 0)")
    parser.add_argument(
        "--processes", metavar="N", type=integer(1), default=1, help="share the clients among N (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the JSON object to FILE, too")
