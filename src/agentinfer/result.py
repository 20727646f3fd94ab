"""What becomes of a request, as text: its result, what is shown of its tokens, and the stop strings that end it.

Pure. The loop keeps a reader for each live sequence that has stop strings, and gives every output to `stopped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, compress

from attrs import evolve, field, frozen

from agentinfer.errors import InvalidRequest
from agentinfer.scan import scan, undecided
from agentinfer.state.commit import flush
from agentinfer.state.engine import EngineState
from agentinfer.state.event import Arrived, Event, Forked, Stopped
from agentinfer.state.history import fold
from agentinfer.state.ids import SeqId, ints, seal, tupled
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.plan import Output
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.sequence import Finished, Versions
from agentinfer.text import Decoder, Text, encode, feed, flush_text, lengths

Note = Callable[[Event, EngineState], None]
"""Told of each event and the state after it: a trace is what it was told."""


def silent(_event: Event, _state: EngineState) -> None:
    """Note nothing."""


@frozen
class Completion:
    """One of the answers to a prompt."""

    index: int
    """Which of the request's `n`."""
    output_ids: tuple[int, ...]
    """An end or stop token included."""
    text: str | None
    """The output without its end token; None without a tokenizer."""
    finish_reason: str
    stop_reason: int | str | None = None
    """What a finish_reason "stop" was due to: the id of an end or stop token, also of one whose text completes a stop
    string; or a stop string.
    """
    error: str | None = None
    """Why there is no more, if it was refused, failed or was aborted."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One a token of `output_ids`; None: not asked for."""
    text_offsets: tuple[int, ...] | None = None
    """Characters of the output before each token's own text, with log-probabilities and a tokenizer only."""
    versions: Versions = ()
    """Which weights sampled it: (index of the first token, version of the weights), ascending; see `swap_weights`."""


@frozen
class Result:
    """What became of one prompt. What it says of an output is of the first one: with n = 1 there is no other."""

    index: int
    """Which of the prompts."""
    prompt_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    """`n` of them."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One a token of `prompt_ids`, None for the first; None: not asked for."""

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.outputs[0].output_ids

    @property
    def text(self) -> str | None:
        """Of the first output."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str:
        """Of the first output."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Of the first output."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        """Of the first output that has one."""
        return next((one.error for one in self.outputs if one.error is not None), None)


Prompt = str | Sequence[int]


@frozen
class Reader:
    """Where the reading of one output stands: its decoder, and the stop strings looked for. As immutable as Decoder."""

    decoder: Decoder = field(factory=Decoder)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """A stop string that ends within the text of so many tokens does not count."""
    count: int = 0
    """Tokens read, where stop strings are looked for."""
    held: str = ""
    """Text that may still become a stop string."""
    found: str | None = None
    """The stop string that ended the output; what came after its last token was not read."""


Readers = Mapping[SeqId, Reader]
"""Of the live sequences that stop strings can end."""


def read(text: Text, reader: Reader, ids: Iterable[int]) -> tuple[Reader, str]:
    """As `feed`, up to the first stop string: the text that is certain to be shown, and was not given before.

    Of stop strings the one that ends first counts; of those that end together, the longest. One that is a special token
    counts even where special tokens are skipped. Nothing after it is read: `found` and `count` say where that was.
    """
    if not reader.stop:
        decoder, words = feed(text, reader.decoder, ids)
        return reader if decoder is reader.decoder else evolve(reader, decoder=decoder), words
    pieces: list[str] = []
    for token in ids:
        if reader.found is not None:
            break
        reader, words = _read_one(text, reader, token)
        pieces.append(words)
    return reader, "".join(pieces)


def read_end(text: Text, reader: Reader) -> str:
    """What is left to show at the end of an output."""
    return "" if reader.found is not None else reader.held + flush_text(text, reader.decoder)


def _read_one(text: Text, reader: Reader, token: int) -> tuple[Reader, str]:
    decoder, piece = feed(text, reader.decoder, (token,))
    count = reader.count + 1
    if count <= reader.min_tokens:
        words = reader.held + piece
        at = undecided(reader.stop, words)
        return evolve(reader, decoder=decoder, count=count, held=words[at:]), words[:at]
    name = text.tokenizer.id_to_token(token)
    if decoder.skip_special_tokens and name in text.special and name in reader.stop:
        before, mark, held = reader.held + flush_text(text, decoder), name, ""
    else:
        scanned = scan(reader.stop, reader.held, piece)
        before, mark, held = scanned.before, scanned.mark, scanned.rest
    if mark is not None:
        before, held = before + mark if reader.include_stop_str_in_output else before, ""
    return evolve(reader, decoder=decoder, count=count, held=held, found=mark), before


def token_ids(text: Text | None, prompt: Prompt) -> tuple[int, ...]:
    """The prompt as token ids. Raises InvalidRequest if it is neither, or text where there is no tokenizer."""
    if not isinstance(prompt, str):
        ids = tupled(prompt)
        if type(ids) is not tuple:
            raise InvalidRequest("prompt", f"must be text or token ids, not {prompt!r}")
        return ids
    if text is None:
        raise InvalidRequest("prompt", "is text, but the checkpoint has no tokenizer; give token ids")
    return encode(text, prompt)


def spelled(text: Text | None, request: Request) -> Request:
    """*request*, whose bad words are token sequences: those of each text, and of a space and the text unless they end
    with the same. Without a tokenizer it stays as it is. Raises InvalidRequest for a text without any token.
    """
    words = request.params.bad_words
    if text is None or not any(isinstance(word, str) for word in words):
        return request
    found: list[tuple[int, ...]] = []
    for word in words:
        found += _spellings(text, word) if isinstance(word, str) else [word]
    return evolve(request, params=evolve(request.params, bad_words=tuple(dict.fromkeys(found))))


def _spellings(text: Text, word: str) -> list[tuple[int, ...]]:
    plain, spaced = (
        encode(text, space + word.lstrip(), add_special_tokens=False, field="bad_words") for space in ("", " ")
    )
    if not word.strip() or not plain:
        raise InvalidRequest("bad_words", f"{word!r} has no tokens but of space")
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def reader_of(params: SamplingParams) -> Reader:
    """The reader of an output of *params*, at its start."""
    return Reader(
        Decoder(params.skip_special_tokens, spaces_between_special_tokens=params.spaces_between_special_tokens),
        params.stop,
        params.include_stop_str_in_output,
        params.min_tokens,
    )


def result_of(text: Text | None, ends: Sequence[Finished], index: int) -> Result:
    """The result of the prompt *index*: *ends* of all its sequences, in their order."""
    return joined(ends[0], [completion_of(text, done, i) for i, done in enumerate(ends)], index)


def joined(first: Finished, outputs: Iterable[Completion], index: int) -> Result:
    """The result of the prompt *index*, whose *first* sequence says what there is to say of the prompt."""
    return Result(index, first.request.prompt, tuple(outputs), first.cached, first.prompt_logprobs)


def sequences(first: SeqId, request: Request) -> tuple[SeqId, ...]:
    """All `n` sequences of *request*, the *first* of which `Engine.add` gave: their numbers follow each other."""
    return tuple(SeqId(first + i) for i in range(request.params.n))


def completion_of(text: Text | None, done: Finished, index: int = 0) -> Completion:
    """*done*, for the client that asked. Its text and tokens end at the first stop string, whatever ended it. If an end
    or stop token completes one, the token is why.
    """
    ids, words, reason, offsets = done.output, None, done.reason, None
    why: int | str | None = done.matched if done.matched is not None or reason != "stop" else ids[-1]
    if text is not None:
        reader, words = read(text, reader_of(done.request.params), shown(done))
        words += read_end(text, reader)
        if reader.found is not None:
            why = why if why is not None and reader.count == len(ids) else reader.found
            ids, reason = ids[: reader.count], "stop"
        if done.logprobs is not None:
            offsets = _offsets(0, lengths(text, reader_of(done.request.params).decoder, ids)[1])
    logprobs = None if done.logprobs is None else done.logprobs[: len(ids)]
    error = done.detail if reason in ("error", "rejected", "abort") else None
    return Completion(index, ids, words, reason, why, error, logprobs, offsets, _versions(done, len(ids)))


def _versions(done: Finished, count: int) -> Versions:
    """Completion.versions of the first *count* tokens of its output."""
    prompt = len(done.request.prompt)
    of_output = {max(0, at - prompt): version for at, version in done.versions}
    return tuple((at, version) for at, version in of_output.items() if at < count)


def _offsets(first: int, lengths_: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths_[:-1], initial=first)) if lengths_ else ()


def refused(index: int, prompt: tuple[int, ...], n: int, error: InvalidRequest) -> Result:
    """The result of a prompt that was never served: as many outputs as were asked for."""
    return Result(index, prompt, tuple(Completion(i, (), None, "rejected", error=str(error)) for i in range(n)))


def shown(done: Finished) -> tuple[int, ...]:
    """The tokens of *done* whose text is its text: an end or stop token's is not, unless that was asked for."""
    params = done.request.params
    by_token = done.reason == "stop" and done.matched is None
    return done.output[:-1] if by_token and not params.include_stop_str_in_output else done.output


@frozen
class Delta:
    """A piece of one stream."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None
    """On the last piece: the whole."""
    index: int = 0
    """Of which of the request's `n` completions this is a piece."""
    completion: Completion | None = None
    """On that completion's last piece: all of it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One a token of `token_ids`; None: not asked for."""
    text_offsets: tuple[int, ...] | None = None
    """Likewise, as in Completion."""


@frozen
class Tale:
    """How much of one completion has been told. As immutable as Reader."""

    index: int
    prompt: int
    """Tokens of the prompt."""
    reader: Reader
    decoder: Decoder
    """Of the tokens told, whatever text is held back: where the text of the next one begins."""
    told: int = 0
    """Tokens."""
    length: int = 0
    """Characters that `decoder` gave."""


def tale_of(request: Request, index: int) -> Tale:
    """The tale of completion *index* of *request*, at its start."""
    reader = reader_of(request.params)
    return Tale(index, len(request.prompt), reader, reader.decoder)


def tell(
    text: Text | None,
    tale: Tale,
    tokens: tuple[int, ...],
    said: tuple[TokenLogprobs, ...] | None,
    done: Finished | None,
) -> tuple[Tale, Delta]:
    """The next piece: *tokens* and what is *said* of them. *done*: they are its last ones."""
    piece, offsets, reader, decoder, length = "", None, tale.reader, tale.decoder, tale.length
    if text is not None:
        visible = tokens if done is None else shown(done)[tale.told :]
        reader, piece = read(text, reader, visible)
        piece += read_end(text, reader) if done is not None else ""
        if said is not None:
            decoder, gained = lengths(text, decoder, tokens)
            offsets, length = _offsets(length, gained), length + sum(gained)
    whole = None if done is None else completion_of(text, done, tale.index)
    after = Tale(tale.index, tale.prompt, reader, decoder, tale.told + len(tokens), length)
    return after, Delta(piece, tokens, None, tale.index, whole, said, offsets)


def heard(readers: Readers, event: Event, new: Iterable[int]) -> Readers:
    """*readers* after *event*, by which the sequences *new* came into being."""
    reader = None
    if isinstance(event, Arrived) and event.request.params.stop:
        reader = reader_of(event.request.params)
    elif isinstance(event, Forked):
        reader = readers.get(event.seq)
    return readers if reader is None else {**readers, **dict.fromkeys(map(SeqId, new), reader)}


def stopped(
    text: Text | None, readers: Readers, state: EngineState, output: Output | None, note: Note = silent
) -> tuple[EngineState, Output | None, Readers]:
    """*state* and *output* once those have ended whose text now holds a stop string, and the readers after that."""
    if output is None or text is None or not readers:
        return state, output, readers
    over = {done.seq for done in output.finished}
    moved = {seq: reader for seq, reader in readers.items() if seq not in over}
    ended, counts = set[SeqId](), list[bool]()
    for seq, token in zip(map(SeqId, ints(output.seqs)), ints(output.tokens), strict=True):
        counts.append(seq not in ended)  # drafts that were right bring several tokens: those behind the stop are none
        if seq not in moved:
            continue
        reader, _ = read(text, moved[seq], (token,))
        if reader.found is None:
            moved[seq] = reader
            continue
        del moved[seq]
        ended.add(seq)
        event = Stopped(seq, reader.count, reader.found)
        state = fold(state, (event,))
        note(event, state)
    state, told = flush(state)
    if told is not None:
        output = evolve(output, finished=(*output.finished, *told.finished))
    return state, output if all(counts) else _only(output, counts), moved


def _only(output: Output, which: Sequence[bool]) -> Output:
    """*output* with some of its tokens."""
    some = list(which)
    seqs, tokens = output.seqs[some], output.tokens[some]
    seal(seqs, tokens)
    logprobs = output.logprobs and tuple(compress(output.logprobs, which))
    return evolve(output, seqs=seqs, tokens=tokens, logprobs=logprobs)


def without(output: Output, seqs: AbstractSet[SeqId]) -> Output | None:
    """What *output* says of others than *seqs*; None: nothing."""
    named = {*ints(output.seqs), *(done.seq for done in output.finished), *(one[0] for one in output.prompt_logprobs)}
    if seqs >= named:
        return None
    return evolve(
        _only(output, [seq not in seqs for seq in ints(output.seqs)]),
        finished=tuple(done for done in output.finished if done.seq not in seqs),
        prompt_logprobs=tuple(one for one in output.prompt_logprobs if one[0] not in seqs),
    )


def caught_up(text: Text | None, state: EngineState) -> Readers:
    """The readers of those that wait in *state*, each of which has read all of its output."""
    readers: dict[SeqId, Reader] = {}
    for waiting in (*state.requeued, *state.waiting):
        if waiting.request.params.stop and text is not None:
            reader, output = reader_of(waiting.request.params), waiting.tokens[len(waiting.request.prompt) :]
            readers[waiting.seq] = read(text, reader, output)[0]
    return readers
