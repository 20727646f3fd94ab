"""The flags of every command. Knows names, types and ranges; must not know what a command does.

Imports nothing heavy: `agentinfer --help` answers at once.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import agentinfer
from agentinfer.cli.flags_form import form_flags
from agentinfer.cli.flags_said import said_flags
from agentinfer.cli.flags_serve import bench_serve_flags, serve_flags
from agentinfer.cli.usage import Usage, line
from agentinfer.cli.values import counts, integer, number, span, token_ids, web_address

DTYPES = ("float32", "bfloat16", "float16")
FP8 = ("dequantize", "native")
MODEL = "a model folder, the id of a model on the Hugging Face hub, or 'demo'"


class _Parser(argparse.ArgumentParser):
    """Mutable, as argparse makes it. Its errors are one line, and a help that can not be written is an error."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (sys.stderr if file is None else file).write(message)

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{self.prog.removeprefix('agentinfer').strip() or 'usage'}: {line(message)} (see --help)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. Raises Usage where argparse would exit with an error."""
    top = _Parser(
        prog="agentinfer",
        description="Language model inference, with the whole engine in plain view.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"agentinfer {agentinfer.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, says: str, **more: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=says, description=says, allow_abbrev=False, **more)

    generate = command("generate", "Complete prompts, all of them together.", epilog=_GENERATE)
    generate.add_argument("model", metavar="MODEL", help=MODEL)
    _prompts(generate)
    _sampling(generate)
    form_flags(generate)
    said_flags(generate, integer)
    _engine(generate)
    generate.add_argument(
        "--record", metavar="FILE", type=Path, help="write every event and the state's digest after it, for 'replay'"
    )
    generate.add_argument("--json", action="store_true", help="print JSON only: one object a prompt, in their order")

    chat = command("chat", "Talk with a model that has a chat template.", epilog=_CHAT)
    chat.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL}; with --url, what the server calls it")
    chat.add_argument(
        "--url", metavar="URL", type=web_address, help="talk with the model of a server that has OpenAI's API"
    )
    chat.add_argument("--system", metavar="TEXT", help="what the system message says")
    _sampling(chat)
    _engine(chat)

    serve = command("serve", "Answer over HTTP, as the OpenAI API does.", epilog=_SERVE)
    serve.add_argument("model", metavar="MODEL", help=MODEL)
    serve_flags(serve)
    _engine(serve)

    plan = command("plan", "What a model needs in memory, and how long a context fits.")
    plan.add_argument("model", metavar="MODEL", help=MODEL)
    _plan(plan)

    env = command("env", "Versions, devices, providers of kernels, caches.")
    env.add_argument("--json", action="store_true", help="print one JSON object")

    replay = command(
        "replay", "Live through a recorded run again, without a model, and compare every state.", epilog=_REPLAY
    )
    replay.add_argument("file", metavar="FILE", type=Path, help="what 'generate --record' wrote")
    replay.add_argument("--json", action="store_true", help="print one JSON object")

    _bench(command("bench", "Measure an engine, driven as 'generate' drives it."))

    demo = command("demo", "A small real model answers a question, alone and in a batch of 8.")
    demo.add_argument(
        "--question", metavar="TEXT", default="Why is the sky blue?", help="what to ask (default: %(default)s)"
    )
    demo.add_argument(
        "--max-tokens", metavar="N", type=integer(1), default=96, help="length of an answer (default: %(default)s)"
    )
    return top


_GENERATE = (
    "Without --json, one prompt's text is streamed; several come as blocks. Exit status: 0; 1 if a prompt was refused "
    "or failed (alone: the others go on); 2 for wrong usage or a wrong model. A JSON object has index, prompt_ids, "
    "output_ids, text (null without a tokenizer), finish_reason (stop, length, abort, error, rejected), cached_tokens, "
    "error (null if all went well); with --logprobs logprobs and text_offsets, with --prompt-logprobs prompt_logprobs, "
    "with --n outputs."
)
_CHAT = (
    "/quit or ctrl-d ends it, /new forgets the conversation, ctrl-c ends an answer early. Reads questions from a pipe, "
    "too, one a line."
)
_SERVE = (
    "SIGTERM or ctrl-c: no new requests, those that have begun finish, exit status 0; a second one does not wait. Exit "
    "status 1 if the engine fails for good, 2 for wrong usage or a wrong model. Keys may be in the environment, too: "
    "AGENTINFER_API_KEY and AGENTINFER_ADMIN_KEY, with commas between them."
)
_REPLAY = "Exit status: 0 if all digests agree, 1 if one differs, 2 if FILE is no trace or a damaged one."


def _prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "each may be given several times; their order is kept")
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        dest="prompts",
        action="append",
        type=_text,
        help="text, completed as it stands (no chat template)",
    )
    group.add_argument("--prompt-ids", metavar="1,2,3", dest="prompts", action="append", type=_ids, help="token ids")
    group.add_argument(
        "--prompts-file", metavar="F.jsonl", dest="prompts", action="append", type=_file,
        help='lines {"prompt": TEXT} or {"prompt_ids": [...]}; - is standard input',
    )  # fmt: skip


def _text(given: str) -> tuple[str, str]:
    return "prompt", given


def _ids(given: str) -> tuple[str, tuple[int, ...]]:
    return "prompt_ids", token_ids(given)


def _file(given: str) -> tuple[str, str]:
    return "prompts_file", given


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=integer(1),
        help="tokens to generate at most (default: to the end of max-model-len)",
    )
    group.add_argument(
        "--temperature", metavar="T", type=number(0, 1e6), default=0.0,
        help="0 always takes the likeliest token, which is the default here (the library's is 1)",
    )  # fmt: skip
    group.add_argument(
        "--top-p",
        metavar="P",
        type=number(0, 1, above=True),
        default=1.0,
        help="sample from the likeliest tokens that have this much probability together (default: 1, off)",
    )
    group.add_argument(
        "--top-k", metavar="K", type=integer(-1), default=0, help="sample from the K likeliest tokens (default: 0, off)"
    )
    group.add_argument(
        "--min-p",
        metavar="P",
        type=number(0, 1),
        default=0.0,
        help="leave out tokens less likely than P times the likeliest (default: 0, off)",
    )
    group.add_argument(
        "--seed",
        metavar="S",
        type=integer(0),
        help="of every prompt's noise: the same seed and prompt give the same tokens, whatever else is in the batch",
    )
    group.add_argument(
        "--stop-token-ids",
        metavar="1,2",
        type=token_ids,
        default=(),
        help="token ids that end an output, beside the model's own",
    )
    group.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end an output before this text (may be given more than once)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's own end tokens")


def _engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=DTYPES, help="of weights and KV (default: what the checkpoint says)")
    _fp8(group)
    group.add_argument(
        "--dummy-weights", action="store_true", help="draw the weights at random: MODEL need only have a config.json"
    )
    group.add_argument("--device", metavar="D", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    group.add_argument(
        "--policy", choices=("reserve", "throughput"), default="throughput",
        help="reserve: prompts first, never preempts; throughput: mixed batches, preempts (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--block-size", metavar="N", type=integer(1), default=16, help="tokens a KV block (default: %(default)s)"
    )
    group.add_argument("--num-blocks", metavar="N", type=integer(1), help="KV blocks (default: what fits)")
    group.add_argument(
        "--max-model-len",
        metavar="N",
        type=integer(1),
        help="tokens of prompt and output together (default: the model's, or what KV has room for)",
    )
    group.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=integer(1),
        default=64,
        help="sequences that run at once (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        type=integer(1),
        default=2048,
        help="positions that one step computes at most (default: %(default)s)",
    )
    _memory(group)
    group.add_argument("--no-prefix-cache", action="store_true", help="never reuse the KV of an equal beginning")
    group.add_argument("--no-overlap", action="store_true", help="plan a step only after the one before it has landed")
    group.add_argument("--eager", action="store_true", help="capture no graphs")
    group.add_argument("--compile", action="store_true", help="compile the layers (torch.compile), once for all")
    group.add_argument(
        "--ops", metavar="NAME", default="auto", help="who computes: auto, or a provider that `env` lists"
    )
    group.add_argument(
        "--tp", metavar="N", type=integer(1), help="processes that share the model (default: 1, or torchrun's)"
    )
    group.add_argument("--ep", action="store_true", help="spread whole experts over them, instead of cutting each one")
    group.add_argument(
        "--step-timeout",
        metavar="S",
        type=number(0.1, 1e6),
        default=60.0,
        help="seconds that one of them may keep the others waiting (default: 60)",
    )


def _fp8(group: Any) -> None:
    group.add_argument(
        "--fp8", choices=FP8, default=FP8[0],
        help="weights of an fp8 checkpoint: dequantize, held in dtype; native, held in 8 bits (default: %(default)s)",
    )  # fmt: skip


def _memory(group: Any) -> None:
    group.add_argument(
        "--kv-utilization",
        metavar="F",
        type=number(0, 1, above=True),
        default=0.85,
        help="part of the free memory that KV may take (default: %(default)s)",
    )
    group.add_argument(
        "--reserve-gib",
        metavar="G",
        type=number(0, math.inf),
        default=2.0,
        help="memory to leave alone in GiB (default: %(default)s)",
    )
    group.add_argument(
        "--kv-gib",
        metavar="G",
        type=number(0, math.inf, above=True),
        help="memory for KV in GiB, instead of that rule (default on a CPU: 2)",
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-gib",
        metavar="G",
        type=number(0, math.inf, above=True),
        help="memory of one device in GiB (default: this machine's)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and KV (default: what the checkpoint says)")
    _fp8(parser)
    parser.add_argument(
        "--tp", metavar="N", type=integer(1), default=1, help="devices that share the model (default: %(default)s)"
    )
    parser.add_argument("--ep", action="store_true", help="spread whole experts over them, instead of cutting each one")
    parser.add_argument(
        "--block-size", metavar="N", type=integer(1), default=16, help="tokens a KV block (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len", metavar="N", type=integer(1), help="tokens of the longest sequence (default: the model's)"
    )
    _memory(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


_BENCH_SERVE = (
    "A key may be in the environment: AGENTINFER_API_KEY or OPENAI_API_KEY. Exit status 1 if a request failed. Times: "
    "to the first token (TTFT), a token after that (TPOT), between two events of a stream (ITL)."
)
_BENCH = (
    "--max-num-seqs is raised to the largest batch. With --json or --output: one object with device, driver, versions, "
    "settings, every step's time, peaks of memory and samples of utilisation."
)


def _bench(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)

    def kind(name: str, says: str, runs: int) -> argparse.ArgumentParser:
        new = kinds.add_parser(name, help=says, description=says, allow_abbrev=False, epilog=_BENCH)
        new.add_argument("model", metavar="MODEL", help=MODEL)
        new.add_argument(
            "--runs", metavar="N", type=integer(1), default=runs, help="measure N times (default: %(default)s)"
        )
        new.add_argument("--json", action="store_true", help="print one JSON object")
        new.add_argument("--output", metavar="FILE", type=Path, help="write the JSON object to FILE, too")
        _engine(new)
        return new

    latency = kind("latency", "Time of a decode step and of a prefill.", 3)
    latency.add_argument(
        "--batch-sizes", metavar="1,64", type=counts(1), default=(1, 8, 64), help="sequences (default: 1,8,64)"
    )
    latency.add_argument(
        "--contexts", metavar="128,1024", type=counts(1), default=(128,), help="tokens before decode (default: 128)"
    )
    latency.add_argument("--prefill", metavar="1024,8192", type=counts(1), default=(), help="prompts to time alone")
    latency.add_argument(
        "--steps", metavar="N", type=integer(1), default=224, help="decode steps to time (default: %(default)s)"
    )
    latency.add_argument(
        "--warmup",
        metavar="N",
        type=integer(1),
        default=32,
        help="steps before, not timed (default: %(default)s)",
    )
    _watched(latency)

    mixed = kind("throughput", "Serve requests of random lengths that arrive together.", 1)
    mixed.add_argument("--requests", metavar="N", type=integer(1), default=256, help="how many (default: %(default)s)")
    mixed.add_argument(
        "--prompt-tokens", metavar="A-B", type=span, default=(100, 1024), help="lengths (default: 100-1024)"
    )
    mixed.add_argument(
        "--output-tokens", metavar="A-B", type=span, default=(100, 1024), help="lengths (default: 100-1024)"
    )
    _watched(mixed)

    kind("startup", "From a new process to its first token.", 1)

    says = "Load on a server with OpenAI's API, whoever wrote it: times as a client sees them."
    bench_serve_flags(kinds.add_parser("serve", help=says, description=says, allow_abbrev=False, epilog=_BENCH_SERVE))


def _watched(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", metavar="T", type=number(0, 1e6), default=0.0, help="of sampling (default: 0)")
    parser.add_argument("--seed", metavar="S", type=integer(0), default=0, help="of lengths and ids (default: 0)")
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="write torch's profiler trace of some more steps of the last case"
    )
    parser.add_argument(
        "--sample-ms", metavar="N", type=integer(0), default=200,
        help="between two samples of a GPU's utilisation; 0: none (default: %(default)s)",
    )  # fmt: skip
