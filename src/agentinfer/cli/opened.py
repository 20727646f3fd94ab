"""An engine for a command: found, opened, put away. Turns every error of that into one line."""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import re
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentinfer.cli.launch import launched
from agentinfer.cli.locate import locate
from agentinfer.cli.usage import Usage, complain, flag, hint, line
from agentinfer.errors import AgentInferError, InvalidRequest, InvalidSetting
from agentinfer.garbage import collected_seldom
from agentinfer.state.request import SamplingParams

if TYPE_CHECKING:
    from agentinfer.build import Settings
    from agentinfer.loop import Engine

_FIELD: Final = re.compile(r"(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/.-])")


@contextmanager
def opened(args: argparse.Namespace) -> Generator[Engine]:
    """The engine that *args* ask for, its model loaded. Raises Usage for a wrong model or setting."""
    with ExitStack() as stack:
        with one_line(args):
            folder = locate(args.model, weights=not args.dummy_weights)
            hint(f"opening {args.model}")
            engine = stack.enter_context(launched(args, folder, settings_of(args)))
        stack.enter_context(collected_seldom())
        yield engine


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the flags. Raises InvalidSetting."""
    from agentinfer.build import Settings

    return Settings(
        dtype=args.dtype,
        device=args.device,
        policy=args.policy,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_utilization=args.kv_utilization,
        reserve_gib=args.reserve_gib,
        kv_gib=args.kv_gib,
        prefix_cache=not args.no_prefix_cache,
        overlap=not args.no_overlap,
        ops=args.ops,
        eager=args.eager,
        compile=args.compile,
        dummy_weights=args.dummy_weights,
        fp8=args.fp8,
        ep=args.ep,
        **{name: vars(args)[name] for name in ("max_logprobs", "logprobs_mode") if hasattr(args, name)},
    )


def params_of(args: argparse.Namespace) -> SamplingParams:
    """How the flags say to sample. Raises Usage."""
    try:
        return SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed,
            stop_token_ids=args.stop_token_ids,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
        )
    except InvalidRequest as error:
        raise Usage(flagged(args, error)) from error


def flagged(args: argparse.Namespace, error: InvalidRequest | InvalidSetting) -> str:
    """What *error* says, with flags instead of fields where there are any."""
    said = str(error)
    if hasattr(args, error.field):
        said = flag(error.field) + said.removeprefix(error.field)
    return with_flags(args, said)


def with_flags(args: argparse.Namespace, words: str) -> str:
    """*words*, with the flags of *args* instead of fields of several words, such as max_model_len."""
    return _FIELD.sub(lambda name: flag(name[0]) if hasattr(args, name[0]) else name[0], words)


@contextmanager
def one_line(args: argparse.Namespace) -> Generator[None]:
    """What goes wrong with a model in this block is Usage, and the only line: warnings wait until all went well."""
    held = logging.handlers.MemoryHandler(capacity=1 << 20, flushLevel=logging.CRITICAL + 1)
    logger = logging.getLogger("agentinfer")
    logger.addHandler(held)
    try:
        with warnings.catch_warnings(record=True) as warned:
            yield
    except InvalidSetting as error:
        raise Usage(flagged(args, error)) from error
    except (AgentInferError, OSError, MemoryError, RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        kind = "" if isinstance(error, AgentInferError) else f"{type(error).__name__}: "
        said = f"{kind}{line(error)}"
        named = said.startswith((args.model, str(Path(args.model))))
        raise Usage(said if named else f"{args.model}: {said}") from error
    finally:
        logger.removeHandler(held)
    said = [record.getMessage() for record in held.buffer if record.levelno >= logging.WARNING]
    said += [f"{warning.category.__name__}: {warning.message}" for warning in warned]
    for words in dict.fromkeys(said):  # a config is read more than once
        complain(with_flags(args, words))
