"""Who may come in, and who leaves early: validate, arrive, abort, stop, fork, fail; the one admission rule. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from attrs import evolve, frozen

from agentinfer.errors import InvalidRequest
from agentinfer.state.blocks import ROOT, PoolDraft
from agentinfer.state.columns import ColumnsDraft
from agentinfer.state.engine import EngineState, find_running, find_waiting, known_tokens
from agentinfer.state.ids import BlockId, SeqId, cdiv, ints, seal, tupled
from agentinfer.state.limits import Limits
from agentinfer.state.log import Queue
from agentinfer.state.request import Request, SamplingParams, bad_tokens, check_seeds
from agentinfer.state.sequence import Finished, FinishReason, Running, Waiting


def limit_of(limits: Limits, request: Request) -> int:
    """The length in tokens at which *request* ends."""
    max_tokens = request.params.max_tokens
    return limits.max_model_len if max_tokens is None else len(request.prompt) + max_tokens


def stop_ids(limits: Limits, params: SamplingParams) -> set[int]:
    """The token ids that end a sequence of *params*."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_ids)}


def validate(limits: Limits, request: Request) -> None:
    """Refuse what can never be served. Raises InvalidRequest naming the field and both numbers."""
    prompt, params = len(request.prompt), request.params
    if prompt == 0:
        raise InvalidRequest("prompt", "has no tokens")
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        most = min(limits.max_logprobs, limits.vocab_size)
        if asked is not None and asked > most:
            raise InvalidRequest(name, f"asks for {asked} tokens, more than max_logprobs {most}")
    for name, ids in (("prompt", request.prompt), ("stop_token_ids", params.stop_token_ids)):
        if ids and max(ids) >= limits.vocab_size:
            raise InvalidRequest(name, f"token id {max(ids)} is outside the vocabulary of {limits.vocab_size}")
    if prompt >= limits.max_model_len:
        raise InvalidRequest(
            "prompt", f"has {prompt} tokens; max_model_len {limits.max_model_len} leaves no room for output"
        )
    limit = limit_of(limits, request)
    if limit > limits.max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"prompt {prompt} + max_tokens {params.max_tokens} is more than max_model_len {limits.max_model_len}",
        )
    if prompt + params.min_tokens > limit:
        raise InvalidRequest("min_tokens", f"prompt {prompt} + min_tokens {params.min_tokens} is more than {limit}")
    _check_logits(limits, params)
    pool = limits.num_blocks * limits.block_size
    if limit - 1 > pool:
        raise InvalidRequest(
            "max_tokens", f"prompt {prompt} up to length {limit} needs {limit - 1} KV slots; the pool has {pool}"
        )


def _check_logits(limits: Limits, params: SamplingParams) -> None:
    """Refuse token ids that no logit has, and what leaves nothing to choose. Raises InvalidRequest naming the field."""
    words = bad_tokens(params)
    if len(words) < len(params.bad_words):
        text = next(given for given in params.bad_words if isinstance(given, str))
        raise InvalidRequest("bad_words", f"{text!r} is text, but there is no tokenizer here; give token ids")
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token for tokens in words for token in tokens]),
    ):
        if ids and max(ids) >= limits.vocab_size:
            raise InvalidRequest(name, f"token id {max(ids)} is outside the vocabulary of {limits.vocab_size}")
    never = {tokens[0] for tokens in words if len(tokens) == 1}
    if _num_left(limits, params, never) == 0:
        raise InvalidRequest(
            "bad_words", "are all of the vocabulary, or all of allowed_token_ids: none could be chosen"
        )
    if params.min_tokens and _num_left(limits, params, never | stop_ids(limits, params)) == 0:
        raise InvalidRequest(
            "min_tokens",
            f"{params.min_tokens} tokens can not come first: each that may be chosen, of a vocabulary of "
            f"{limits.vocab_size}, would end it",
        )


def _num_left(limits: Limits, params: SamplingParams, without: set[int]) -> int:
    """How many token ids *params* allow that are not in *without*."""
    allowed = params.allowed_token_ids
    return limits.vocab_size - len(without) if allowed is None else len(set(allowed) - without)


def seed_of(limits: Limits, request: Request, seq: SeqId) -> int:
    """The request's seed, or one drawn from the engine's seed and the sequence's number. In [0, 2**63)."""
    if request.params.seed is not None:
        return request.params.seed
    drawn = hashlib.blake2b(f"{limits.seed} {seq}".encode(), digest_size=8, person=b"agentinfer.seed")
    return int.from_bytes(drawn.digest(), "little") >> 1


def child_seed(seed: int, j: int) -> int:
    """The seed of completion *j* of a request with *seed*: that very seed for the first one, for the others the first
    63 bits of BLAKE2b of both numbers. In [0, 2**63).
    """
    if j == 0:
        return seed
    drawn = hashlib.blake2b(f"{seed} {j}".encode(), digest_size=8, person=b"agentinfer.child")
    return int.from_bytes(drawn.digest(), "little") >> 1


def child_of(request: Request, seed: int | None = None) -> Request:
    """What a sequence that continues another one of *request* is asked: itself alone, and nothing about the prompt."""
    params = request.params
    return evolve(request, params=evolve(params, n=1, prompt_logprobs=None, seed=params.seed if seed is None else seed))


def arrive(state: EngineState, request: Request) -> tuple[EngineState, SeqId]:
    """Queue *request*: its `n` sequences, whose numbers follow each other; the first of them. The others are forks of
    that one before it has begun. Total: what can never fit ends at once as Finished("rejected").
    """
    first, count = SeqId(state.next_seq), request.params.n
    seqs = [SeqId(first + j) for j in range(count)]
    try:
        validate(state.limits, request)
    except InvalidRequest as error:
        rejected = (Finished(seq, request, request.prompt, "rejected", str(error)) for seq in seqs)
        return evolve(state, next_seq=first + count, ended=(*state.ended, *rejected)), first
    seed = seed_of(state.limits, request, first)
    versions = ((0, state.version),)
    waiting = state.waiting.push(Waiting(first, request, seed, request.prompt, first, versions=versions))
    for j, seq in enumerate(seqs[1:], 1):
        derived = child_seed(seed, j)
        asked = child_of(request, derived)
        waiting = waiting.push(Waiting(seq, asked, derived, request.prompt, first, versions=versions))
    return evolve(state, next_seq=first + count, waiting=waiting), first


def abort(state: EngineState, seq: SeqId, reason: str = "") -> EngineState:
    """End *seq*, wherever it is. An id that is not live is ignored: the client may be late."""
    return end(state, (seq,), "abort", reason)


def stop(state: EngineState, seq: SeqId, count: int, text: str) -> EngineState:
    """End *seq* after its first *count* generated tokens, whose text holds the stop string *text*; what came later is
    dropped. An id that is not live is ignored.
    """
    after = end(state, (seq,), "stop", text)
    if after is state:
        return state
    done = after.ended[-1]
    kept = done.tokens[: len(done.request.prompt) + count]
    return evolve(after, ended=(*state.ended, evolve(done, tokens=kept, matched=text)))


def fail(state: EngineState, seqs: Collection[SeqId], reason: str) -> EngineState:
    """End *seqs* with an error: their step raised. Their blocks return; nothing new enters the prefix cache."""
    return end(state, seqs, "error", reason)


def end(state: EngineState, seqs: Collection[SeqId], reason: FinishReason, detail: str) -> EngineState:
    """End those of *seqs* that are live, each once; the loop finds them in `ended`."""
    seqs = tuple(dict.fromkeys(seqs))
    running = [run for seq in seqs if (run := find_running(state, seq)) is not None]
    waiting = [w for seq in seqs if (w := find_waiting(state, seq)) is not None]
    if not running and not waiting:
        return state
    ended = [
        Finished(w.seq, w.request, w.tokens, reason, detail, max(w.cached, 0), versions=w.versions) for w in waiting
    ]
    for run in running:
        tokens = known_tokens(run, int(state.cols.known[run.row]), state.cols.tail)
        cached = int(state.cols.cached[run.row])
        ended.append(Finished(run.seq, run.request, tokens, reason, detail, cached, versions=run.versions))
    state = _unqueue(state, {w.seq for w in waiting}) if waiting else state
    state = release(state, running) if running else state
    return evolve(state, ended=(*state.ended, *ended))


def release(state: EngineState, running: Sequence[Running]) -> EngineState:
    """Take rows and blocks away from *running*."""
    cols, pool = ColumnsDraft(state.cols), PoolDraft(state.pool, state.limits.seed)
    rows = list(state.rows)
    for run in running:
        pool.drop(run.blocks)
        rows[run.row] = None
    cols.clear([run.row for run in running])
    order = state.order[cols.seq[state.order] >= 0]
    seal(order)
    return evolve(state, rows=tuple(rows), order=order, cols=cols.freeze(), pool=pool.freeze())


def _unqueue(state: EngineState, seqs: set[SeqId]) -> EngineState:
    requeued = tuple(w for w in state.requeued if w.seq not in seqs)
    if len(state.requeued) - len(requeued) == len(seqs):
        return evolve(state, requeued=requeued)
    return evolve(state, requeued=requeued, waiting=Queue[Waiting].of(w for w in state.waiting if w.seq not in seqs))


def fork(
    state: EngineState, seq: SeqId, n: int = 1, seeds: Sequence[int | None] | None = None
) -> tuple[EngineState, tuple[SeqId, ...]]:
    """Continue *seq* in *n* more ways, from its known tokens (never one in flight).

    The children wait at the front and share the parent's landed blocks copy-on-write when `schedule` admits
    them; should the parent have left by then, the prefix cache serves them. *seeds*: one a child; None: the
    parent's. Raises KeyError if *seq* is not live, ValueError if *seeds* has not *n* items, InvalidRequest if one is
    no seed.
    """
    chosen = (None,) * n if seeds is None else tupled(seeds)
    check_seeds(chosen)
    run, waiting = find_running(state, seq), find_waiting(state, seq)
    if run is not None:
        request, seed, parent, versions = run.request, run.seed, seq, run.versions
        tokens = known_tokens(run, int(state.cols.known[run.row]), state.cols.tail)
    elif waiting is not None:
        request, seed, parent, tokens = waiting.request, waiting.seed, waiting.parent, waiting.tokens
        versions = waiting.versions
    else:
        raise KeyError(seq)
    if len(chosen) != n:
        raise ValueError(f"{len(chosen)} seeds for {n} children")
    asked = child_of(request) if request.params.n > 1 or request.params.prompt_logprobs is not None else request
    children = tuple(
        Waiting(SeqId(state.next_seq + i), asked, seed if s is None else s, tokens, parent, versions=versions)
        for i, s in enumerate(chosen)
    )
    state = evolve(state, next_seq=state.next_seq + n, requeued=(*state.requeued, *children))
    return state, tuple(child.seq for child in children)


@frozen
class Claim:
    """What admitting a sequence would share and take."""

    shared: tuple[BlockId, ...]
    """Blocks to hold, from its first position on."""
    hashes: tuple[int, ...]
    """Of the leading ones of `shared` that are registered."""
    source: BlockId
    """A block whose first positions are to be copied to its first own block; ROOT: none."""
    computed: int
    """Positions whose KV it gets that way."""


def claim(limits: Limits, pool: PoolDraft, waiting: Waiting, parent: Running | None, written: int) -> Claim:
    """The most KV that *waiting* can have without computing: from the prefix cache, or from its running parent.

    *written*: the parent's landed positions. The last known token is always left to compute, and a block that
    will be written is never shared. Whose prompt is to be judged computes all of it.
    """
    size, tokens = limits.block_size, waiting.tokens
    full = (len(tokens) - 1) // size
    shared: list[BlockId] = []
    hashes: list[int] = []
    if limits.prefix_cache and waiting.request.params.prompt_logprobs is None:
        above = ROOT
        for i in range(full):
            block, h = pool.find(above, waiting.request.salt, tokens[i * size : (i + 1) * size])
            if block is None:
                break
            shared.append(block)
            hashes.append(h)
            above = block
    if parent is not None:
        usable = min(written, len(tokens) - 1)
        if usable > len(shared) * size:
            whole = usable // size
            blocks = (*shared, *parent.blocks[len(shared) : whole])
            source = parent.blocks[whole] if usable % size else ROOT
            return Claim(blocks, tuple(hashes), source, usable)
    return Claim(tuple(shared), tuple(hashes), ROOT, len(shared) * size)


def blocks_wanted(limits: Limits, waiting: Waiting, *, reserve: bool) -> int:
    """Blocks that must be obtainable before *waiting* is admitted, shared ones included.

    reserve: all that it can ever need, and that the others of its request need beside the blocks of the prompt, which
    they share; or all blocks, if that is more: then some of them wait for others to end. Otherwise: its known tokens
    and one position more.
    """
    slots, size = limit_of(limits, waiting.request) - 1, limits.block_size
    if not reserve:
        return cdiv(min(slots, len(waiting.tokens) + 1), size)
    others = waiting.request.params.n - 1 if waiting.cached < 0 else 0
    each = cdiv(slots, size)
    return min(each + others * (each - (len(waiting.request.prompt) - 1) // size), max(each, limits.num_blocks))


def promised(state: EngineState, cols: ColumnsDraft, rows: list[int]) -> int:
    """Blocks that the running *rows* may still take before they end. *cols* count this step's positions."""
    size = state.limits.block_size
    held = -(-cols.computed[rows] // size)
    return int((-(-(cols.limit[rows] - 1) // size) - held).sum())


def affordable(pool: PoolDraft, wanted: Claim, blocks: int, spoken_for: int) -> bool:
    """The one admission rule: *blocks* in all, of which the claim's shared ones need not be taken.

    *spoken_for*: blocks promised to others.
    """
    revived = sum(1 for block in wanted.shared if pool.refs[block] == 0)
    return pool.num_available - revived - spoken_for >= blocks - len(wanted.shared)


def fits(state: EngineState, waiting: Waiting, *, reserve: bool) -> bool:
    """Whether `schedule` could admit *waiting* now: a row is free, blocks enough, and its parent has computed what they
    share.
    """
    if len(state.order) >= state.limits.max_num_seqs or early(state, waiting):
        return False
    pool, cols = PoolDraft(state.pool, state.limits.seed), ColumnsDraft(state.cols)
    wanted = claim(state.limits, pool, waiting, *parent_of(state, waiting))
    spoken_for = promised(state, cols, ints(state.order)) if reserve else 0
    return affordable(pool, wanted, blocks_wanted(state.limits, waiting, reserve=reserve), spoken_for)


def early(state: EngineState, waiting: Waiting) -> bool:
    """Whether *waiting* is a fork whose parent is still to compute what both have in common: it is admitted later, and
    shares that.
    """
    if waiting.parent == waiting.seq:
        return False
    parent, written = parent_of(state, waiting)
    return written < len(waiting.tokens) - 1 if parent is not None else find_waiting(state, waiting.parent) is not None


def parent_of(state: EngineState, waiting: Waiting) -> tuple[Running | None, int]:
    """The running parent of *waiting*, if it can share its KV, and how many of its positions have landed."""
    parent = find_running(state, waiting.parent) if waiting.parent != waiting.seq else None
    parent = None if parent is not None and parent.stale else parent
    return parent, 0 if parent is None else int(state.cols.written[parent.row])
