"""Structured output: which tokens may come next, so that an output has the form its request asks for.

By llguidance (the extra `structured`), which is imported when the first request asks. `allowed` is a function of the
grammar and the tokens of the output so far, and of nothing else: what Grammars holds only saves work, so a sequence may
be preempted, forked, rewound or replayed without a word to this module. Knows tokenizers and requests; must not know
tensors, steps or the engine's state.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, field, frozen

from agentinfer.errors import AgentInferError, InvalidRequest
from agentinfer.state.ids import I32, SeqId, cdiv
from agentinfer.state.limits import Limits
from agentinfer.state.request import Request
from agentinfer.state.structured import FIELD, StructuredOutputsParams
from agentinfer.text import Text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_BYTES: Final = 128 << 10
"""Of a schema, a regular expression, a grammar or all choices together."""
TRIED_BYTES: Final = 4 << 10
"""What is larger, but for choices, is compiled in a process of its own first: it could overflow the stack, or take
seconds."""
TRIAL_CPU_S: Final = 2
"""Seconds of computing that such a process may take."""
TRIAL_WALL_S: Final = 20.0
"""Seconds until it is given up, on a machine however busy."""
TRIAL_BYTES: Final = 2 << 30
"""Memory that it may take."""
TRIAL_STACK_BYTES: Final = 2 << 20
"""Its stack: a quarter of what a thread has here."""
LEXER_FUEL: Final = 400_000
"""llguidance's limit on what the terminals of one grammar are compiled to."""
LEXER_STATES: Final = 50_000
"""Its limit on what the lexer may remember, 1 to 2 kB a state."""
STEP_FUEL: Final = 200_000
"""Its limits on the work for one mask: on the lexer's, about 14 ms, .."""
STEP_ITEMS: Final = 50_000
""".. and on the parser's, about 3 ms, .."""
ROW_ITEMS: Final = 10_000
""".. at one place. An object has about four for each property that may come next."""
KEPT_GRAMMARS: Final = 64
"""Compiled grammars that are remembered: the least recently used is forgotten first."""


class GrammarFailed(AgentInferError, RuntimeError):
    """No mask can be made: the output does not fit its grammar, or the next mask is too much work."""


@define(eq=False)
class Walk:
    """A matcher, and what it has read. Mutable."""

    asked: StructuredOutputsParams
    read: tuple[int, ...]
    matcher: LLMatcher


@frozen(eq=False)
class Vocabulary:
    """The tokens that a grammar is about, as llguidance knows them."""

    tokenizer: LLTokenizer
    eos_words: tuple[I32, I32]
    """(words of a mask, bits of them) that stand for the end tokens."""


@define(eq=False)
class Grammars:
    """What compiles grammars for one engine, and what it remembers. Mutable, and a cache only."""

    text: Text | None
    limits: Limits
    vocabulary: Vocabulary | None = None
    """None: nobody has asked yet."""
    compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = field(
        factory=OrderedDict[StructuredOutputsParams, "LLMatcher"]
    )
    walks: OrderedDict[int, Walk] = field(factory=OrderedDict[int, Walk])
    """Of as many sequences as can run at once."""


def check_form(grammars: Grammars, request: Request) -> None:
    """Refuse a *request* whose form can not be had, compiling it. Raises InvalidRequest as compile_grammar does."""
    if request.params.structured_outputs is not None:
        compile_grammar(grammars, request.params.structured_outputs)


def mask_of(grammars: Grammars, seq: SeqId, request: Request, tokens: tuple[int, ...]) -> I32 | None:
    """Which tokens *request* allows after *tokens*, prompt and output of the sequence *seq*; None: any. As `allowed`,
    but GrammarFailed is also raised for an output that is complete before it has `min_tokens`, and where
    `allowed_token_ids` leaves nothing.
    """
    params = request.params
    if params.structured_outputs is None:
        return None
    output = tokens[len(request.prompt) :]
    mask = allowed(grammars, seq, params.structured_outputs, output)
    if len(output) < params.min_tokens and not _without_end(grammars, mask).any():
        raise GrammarFailed(f"{FIELD}: complete after {len(output)} tokens, and min_tokens is {params.min_tokens}")
    if params.allowed_token_ids is not None:
        ids = np.array(params.allowed_token_ids)
        if not (mask[ids >> 5] >> (ids & 31) & 1).any():
            raise GrammarFailed(f"{FIELD}: allowed_token_ids has none that may come after {len(output)} tokens")
    return mask


def _without_end(grammars: Grammars, mask: I32) -> I32:
    where, bits = vocabulary_of(grammars).eos_words
    rest = mask.copy()
    rest[where] &= ~bits
    return rest


def vocabulary_of(grammars: Grammars) -> Vocabulary:
    """The vocabulary, made when it is first asked for: about a second for 150,000 tokens.

    Raises InvalidRequest for what is missing: llguidance, a tokenizer that it can read, an end token.
    """
    if grammars.vocabulary is None:
        grammars.vocabulary = _vocabulary(grammars.text, grammars.limits)
    return grammars.vocabulary


def _vocabulary(text: Text | None, limits: Limits) -> Vocabulary:
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise InvalidRequest(FIELD, 'needs llguidance: pip install "agentinfer[structured]"') from error
    if text is None:
        raise InvalidRequest(FIELD, "is about text, but the checkpoint has no tokenizer")
    if not limits.eos_ids:
        raise InvalidRequest(FIELD, "needs an end token, and the model names none")
    known = 1 + max(text.tokenizer.get_vocab().values())
    try:
        tokenizer = LLTokenizer(
            text.tokenizer.to_str(), n_vocab=max(known, limits.vocab_size), eos_token=list(limits.eos_ids)
        )
    except Exception as error:  # it raises ValueError, and what its own tokenizer reader raises
        raise InvalidRequest(FIELD, f"llguidance can not read the tokenizer in {text.folder}: {error}") from error
    ends = np.zeros(cdiv(limits.vocab_size, 32) * 32, np.uint8)
    ends[list(limits.eos_ids)] = 1
    bits = np.packbits(ends, bitorder="little").view(np.int32)
    where = np.flatnonzero(bits).astype(np.int32)
    return Vocabulary(tokenizer, (where, bits[where]))


def compile_grammar(grammars: Grammars, asked: StructuredOutputsParams) -> LLMatcher:
    """The matcher of *asked* at the start of an output, remembered: to be copied, never advanced.

    Raises InvalidRequest naming the kind of grammar and what is wrong with it: its syntax, its size, the time that it
    takes, that no output at all has this form.
    """
    found = grammars.compiled.pop(asked, None)
    if found is not None:
        grammars.compiled[asked] = found  # it is the last one used; at every moment, whatever another thread compiles
        return found
    tokenizer = vocabulary_of(grammars).tokenizer
    name, source = written(asked)
    size = len(source.encode())
    if size > MAX_BYTES:
        raise InvalidRequest(name, f"has {size} bytes, at most {MAX_BYTES}")
    if size > TRIED_BYTES and asked.choice is None:
        try_apart(name, source)
    matcher = _matcher(tokenizer, source)
    if not matcher.is_error():
        matcher.compute_bitmask()  # is slower the first time, and shows a grammar that nothing fits
    if matcher.is_error():
        raise InvalidRequest(name, _reason(matcher))
    grammars.compiled[asked] = matcher
    if len(grammars.compiled) > KEPT_GRAMMARS:
        grammars.compiled.popitem(last=False)
    return matcher


def allowed(grammars: Grammars, seq: int, asked: StructuredOutputsParams, output: tuple[int, ...]) -> I32:
    """Which tokens may follow *output*, an output of the form *asked*: bit i % 32 of word i // 32 is set for token i.
    [ceil(V / 32)] int32.

    An end token may come exactly where the output may end; where nothing else may come, it must. *seq*: whose output
    this is, by which what is remembered is found. Raises GrammarFailed, InvalidRequest.
    """
    walk = grammars.walks.pop(seq, None)
    if walk is None or walk.asked is not asked or not _brought(walk, output):
        walk = Walk(asked, (), compile_grammar(grammars, asked).deep_copy())
        if not _brought(walk, output):
            raise GrammarFailed(f"{FIELD}: after {len(output)} tokens: {_reason(walk.matcher)}")
    mask = np.frombuffer(walk.matcher.compute_bitmask(), np.int32)[: cdiv(grammars.limits.vocab_size, 32)]
    if walk.matcher.is_error():
        raise GrammarFailed(f"{FIELD}: after {len(output)} tokens: {_reason(walk.matcher)}")
    if not walk.matcher.is_accepting():  # a tokenizer may have text for its end token
        mask = _without_end(grammars, mask)
    grammars.walks[seq] = walk
    if len(grammars.walks) > grammars.limits.max_num_seqs:
        grammars.walks.popitem(last=False)
    return mask


def _brought(walk: Walk, output: tuple[int, ...]) -> bool:
    """Bring *walk* to the end of *output*; False, and it is of no use any more: it can not be."""
    common = len(walk.read) if output[: len(walk.read)] == walk.read else _common(walk.read, output)
    if common < len(walk.read) and not walk.matcher.rollback(len(walk.read) - common):
        return False
    if common < len(output) and not walk.matcher.consume_tokens(list(output[common:])):
        return False
    walk.read = output
    return True


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- compiling -----------------------------------------------------------------------------------------------------


def written(asked: StructuredOutputsParams) -> tuple[str, str]:
    """(the field that says it, *asked* in llguidance's own words). Raises InvalidRequest: a schema is no JSON."""
    from llguidance import LLMatcher

    if asked.json is not None or asked.json_object:
        options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}  # without any, it reads no JSON here
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        schema = '{"type": "object"}' if asked.json is None else asked.json
        name = f"{FIELD}.{'json_object' if asked.json is None else 'json'}"
        try:
            return name, LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise InvalidRequest(name, f"is no JSON schema: {error}") from error
    if asked.regex is not None:
        return f"{FIELD}.regex", LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return f"{FIELD}.choice", LLMatcher.grammar_from_regex("|".join(map(_literally, asked.choice)))
    return f"{FIELD}.grammar", LLMatcher.grammar_from_lark(asked.grammar or "")


def _literally(words: str) -> str:
    """A regular expression of *words* themselves."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):x}}}", words)


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, source, log_level=0, limits=_limits())


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        max_lexer_states=LEXER_STATES,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_items_in_row=ROW_ITEMS,
        verbose_errors=False,
    )


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, in one line."""
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return "no output has this form" if said == "NoExtensionBias" else said


def try_apart(name: str, source: str) -> None:
    """See in a process of its own whether *source* can be compiled within the limits of time, memory and stack.

    Raises InvalidRequest(*name*) if not. What is wrong with its words is not said here.
    """
    command = [sys.executable, "-c", "from agentinfer.grammar import trial; trial()"]
    try:
        done = subprocess.run(  # noqa: S603 - this Python
            command, input=source.encode(), capture_output=True, timeout=TRIAL_WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(name, f"takes longer than {TRIAL_WALL_S:g} s to compile") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidRequest(
            name,
            f"is too large or too deep: compiling it took more than {TRIAL_CPU_S} s, {TRIAL_BYTES >> 30} GiB or "
            f"{TRIAL_STACK_BYTES >> 20} MiB of stack ({said or f'status {done.returncode}'})",
        )


def trial() -> None:
    """The main function of the process that `try_apart` starts: compile what stands in its standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    source = sys.stdin.buffer.read().decode()
    threading.stack_size(TRIAL_STACK_BYTES)
    thread = threading.Thread(target=_compile_bytes, args=(source,))
    thread.start()
    thread.join()


class _Bytes:
    """A tokenizer of the 256 bytes and an end token, in llguidance's shape: what is compiled hardly depends on it."""

    __slots__ = ()
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((b,)) for b in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


def _compile_bytes(source: str) -> None:
    from llguidance import LLTokenizer, TokenizerWrapper

    matcher = _matcher(LLTokenizer(TokenizerWrapper(_Bytes())), source)
    if not matcher.is_error():
        matcher.compute_bitmask()
