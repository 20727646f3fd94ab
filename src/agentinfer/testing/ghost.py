"""The ghost device: it computes nothing and notices everything.

A KV slot holds the fingerprint of the token prefix that it was computed from, the model is a hash of that, and
the device keeps its own block tables and last tokens, from what the plans say and nothing else. Whatever a
scheduler gets wrong about a block, a slot, a position or a row is then not a subtly different number but a Fault,
in words. `launch` and `land` stand where the real ones do, so a loop over the ghost is the loop itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from attrs import define, field, frozen

from agentinfer.state.engine import EngineState
from agentinfer.state.ids import SeqId, cdiv, ints
from agentinfer.state.limits import Limits
from agentinfer.state.plan import Plan, Sampled, SamplingColumns, sampled
from agentinfer.state.request import Request, edits_logits
from agentinfer.testing.oracle import Answer, choose, extend, limit, prints, root, stops

POISON = 2**31 - 1
"""The token of a sample that must not be looked at."""


class Fault(AssertionError):
    """A rule was broken; the message says which."""


@define
class Script:
    """What one sequence is to be: the ghost holds every read and write against it. Mutable on purpose."""

    seq: SeqId
    request: Request
    seed: int
    answer: Answer
    known: int
    """Tokens that the control plane knows. Whoever drives the ghost keeps it up to date."""
    prints: list[int] = field(init=False)
    """[len(answer.tokens)] fingerprint of each prefix."""

    def __attrs_post_init__(self) -> None:
        self.prints = prints(self.request.salt, self.answer.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the control plane knows."""
        return self.answer.tokens[: self.known]


@frozen
class Written:
    """What a KV slot holds."""

    print: int
    """The fingerprint of a prefix; -1: rubbish, left by a step that failed."""
    seq: SeqId
    position: int
    step: int


class GhostFlight:
    """A step under way, immutable. Its tokens can not be had before the device's `land`."""

    __slots__ = ("_sampled", "plan")

    def __init__(self, plan: Plan, result: Sampled) -> None:
        self.plan = plan
        self._sampled = result


class GhostDevice:
    """A device for *limits* on which every sequence of `scripts` is known beforehand. Mutable, as devices are."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.holds = -1
        """Step of the plan whose tables it holds; -1: of none."""
        self.kv: dict[int, Written] = {}
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, tuple[SeqId, int, int]] = {}
        """Row -> the sequence that sampled there last, that token's position, the token."""
        self.told: dict[int, tuple[Request, list[int]]] = {}
        """Row -> whose logits are edited there, and the tokens that it has been told or has sampled."""
        self.scripts: dict[SeqId, Script] = {}
        self.runs: dict[int, tuple[int, int]] = {}
        """Sequence -> the step that it runs since without a break, and the position that it has come to."""

    def launch(self, plan: Plan, witness: EngineState | None = None, *, fails: bool = False) -> GhostFlight | None:
        """Run *plan*. *witness*: the state that came with it, to check that the plan does what the state says.

        *fails*: the step dies half-way; None comes back, its slots hold rubbish, and the device still holds the
        tables it held before. Raises Fault for whatever is wrong with the plan.
        """
        check_shape(self.limits, plan)
        before = {row: list(table) for row, table in self.tables.items()} if fails else {}
        self._apply_tables(plan)
        if witness is not None:
            self._agree(plan, witness)
        self._copy(plan)
        for told in plan.told:
            self.told[told.row] = told.request, [*told.tokens]
        at = 0
        for i, count in enumerate(ints(plan.count)):
            self._run_row(plan, i, at)
            at += count
        tokens = [self._sample(plan, i) for i in range(len(plan.samples))]
        if fails:
            self.tables = before
            self.spoil(plan)
            return None
        self.holds = plan.step
        for i, token in zip(ints(plan.sample_rows), tokens, strict=True):
            self.last[int(plan.rows[i])] = (SeqId(int(plan.seqs[i])), int(plan.context[i]), token)
        for edit in plan.edits:
            self.told[edit.row][1].append(tokens[edit.sample])
        return GhostFlight(plan, sampled(plan, tokens))

    def land(self, flight: GhostFlight, bad: Iterable[int] = ()) -> Sampled:
        """The tokens of *flight*. The samples *bad* had no finite logits: their tokens and KV are rubbish."""
        result = flight._sampled  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - hidden from all others
        tokens, ok = result.tokens.copy(), result.ok.copy()
        for i in bad:
            tokens[i], ok[i] = POISON, False
            at, position = place_of(flight.plan, i)
            if flight.plan.drafts and flight.plan.drafts[at] > flight.plan.context[at] - position - 1:
                self._spoil_rows(flight.plan, {int(flight.plan.seqs[at])}, position)
            else:
                self._spoil_rows(flight.plan, {int(flight.plan.seqs[at])})
        return sampled(flight.plan, tokens, ok)

    def spoil(self, plan: Plan) -> None:
        """The step of *plan* failed: what it wrote, and what later steps computed from that, is rubbish."""
        self._spoil_rows(plan, set(ints(plan.seqs)))

    def _spoil_rows(self, plan: Plan, seqs: set[int], first: int = 0) -> None:
        seqs = {seq for seq in seqs if self.runs[seq][0] <= plan.step}
        for slot, written in self.kv.items():
            if written.seq in seqs and written.step >= plan.step and written.position >= first:
                self.kv[slot] = Written(-1, written.seq, written.position, written.step)
        for row in [row for row, (seq, _, _) in self.last.items() if seq in seqs]:
            del self.last[row]

    def _apply_tables(self, plan: Plan) -> None:
        if plan.base == -1:
            self.tables.clear()
            self.told.clear()
        elif plan.base != self.holds:
            raise Fault(
                f"step {plan.step} extends the tables of step {plan.base}; the device holds those of {self.holds}"
            )
        for row, first, blocks in plan.tables:
            table = self.tables.setdefault(row, [])
            if not 1 <= row <= self.limits.max_num_seqs:
                raise Fault(f"step {plan.step} gives blocks to row {row}")
            if first > len(table):
                raise Fault(f"row {row} has {len(table)} table entries; step {plan.step} sets those from {first} on")
            for i, block in enumerate(blocks, first):
                if not 1 <= block <= self.limits.num_blocks:
                    raise Fault(f"step {plan.step} puts block {block} into the table of row {row}")
                table[i : i + 1] = [block]

    def _agree(self, plan: Plan, witness: EngineState) -> None:
        """The device's tables are those of the state, and hold no block more than has been or is being written."""
        size = self.limits.block_size
        for run in witness.rows:
            if run is None:
                continue
            held = self.tables.get(run.row, [])[: len(run.blocks)]
            if held != list(run.blocks):
                raise Fault(f"row {run.row} has blocks {run.blocks}; the device was told {held} up to step {plan.step}")
            computed = int(witness.cols.computed[run.row])
            if len(run.blocks) != cdiv(computed, size):
                raise Fault(
                    f"sequence {run.seq} holds {len(run.blocks)} blocks for {computed} positions of {size} a block"
                )
        running = {int(run.row): run for run in witness.rows if run is not None}
        for row, seq in zip(ints(plan.rows), ints(plan.seqs), strict=True):
            if row not in running or running[row].seq != seq:
                raise Fault(f"step {plan.step} runs sequence {seq} in row {row}, which is not its row")
        holders: dict[int, list[int]] = {}
        for run in running.values():
            for block in run.blocks:
                holders.setdefault(block, []).append(run.seq)
        writes = zip((plan.slots // size).tolist(), np.repeat(plan.seqs, plan.count).tolist(), strict=True)
        for block, writer in writes:
            if block in witness.pool.keys:
                raise Fault(f"step {plan.step} writes into block {block}, which the prefix cache knows")
            if holders.get(block) != [writer]:
                raise Fault(f"sequence {writer} writes into block {block}, which sequences {holders.get(block)} hold")
        for source, target in plan.copies:
            if target in witness.pool.keys or len(holders.get(target, ())) != 1:
                raise Fault(
                    f"step {plan.step} copies block {source} over block {target}, which is not one sequence's own"
                )

    def _copy(self, plan: Plan) -> None:
        size = self.limits.block_size
        targets = [target for _, target in plan.copies]
        if len(set(targets)) != len(targets) or not set(targets) <= set(range(1, self.limits.num_blocks + 1)):
            raise Fault(f"step {plan.step} copies to blocks {targets}")
        gathered = [[self.kv.get(source * size + i) for i in range(size)] for source, _ in plan.copies]
        for target, content in zip(targets, gathered, strict=True):
            for i, written in enumerate(content):
                if written is None:
                    self.kv.pop(target * size + i, None)
                else:
                    self.kv[target * size + i] = written

    def _run_row(self, plan: Plan, i: int, at: int) -> None:
        row, seq, start, count = (int(column[i]) for column in (plan.rows, plan.seqs, plan.start, plan.count))
        script = self.scripts.get(SeqId(seq))
        if script is None:
            raise Fault(f"step {plan.step} runs sequence {seq}, which never arrived")
        size, table, end = self.limits.block_size, self.tables.get(row, []), start + count
        if end > len(table) * size:
            raise Fault(f"position {end - 1} of sequence {seq} lies beyond the {len(table)} blocks of row {row}")
        drafts = plan.drafts[i] if plan.drafts else 0
        if end > limit(self.limits, script.request) - 1 or end - drafts > len(script.prints):
            raise Fault(f"step {plan.step} computes up to position {end - 1} of sequence {seq}, beyond its end")
        if drafts and end - drafts != script.known:
            raise Fault(f"step {plan.step} guesses position {end - drafts} of sequence {seq}: {script.known} are known")
        since, come = self.runs.get(seq, (plan.step, start))
        self.runs[seq] = (since if come == start else plan.step, end)
        slots = [table[p // size] * size + p % size for p in range(end)]
        for position in range(start):
            self._read(plan, script, position, slots[position])
        at_print = script.prints[start - 1] if start else root(script.request.salt)
        for position in range(start, end):
            flat = at + position - start
            if plan.slots[flat] != slots[position]:
                raise Fault(
                    f"position {position} of sequence {seq} goes to slot {plan.slots[flat]}, its table says "
                    f"{slots[position]}"
                )
            given = int(plan.inputs[flat])
            guessed = position >= end - drafts
            at_print = extend(at_print, given if guessed else self._input(plan, script, row, position, given))
            self.kv[slots[position]] = Written(at_print, SeqId(seq), position, plan.step)
        if (end >= script.known) != bool((plan.sample_rows == i).any()):
            what = "samples a chunk that is not the last" if end < script.known else "does not sample the last chunk"
            raise Fault(f"step {plan.step} {what} of sequence {seq}: {end} positions of {script.known} tokens")

    def _read(self, plan: Plan, script: Script, position: int, slot: int) -> None:
        held = self.kv.get(slot)
        who = f"step {plan.step}: sequence {script.seq} reads position {position} from slot {slot}"
        if held is None:
            raise Fault(f"{who}, which was never written")
        if held.print != script.prints[position]:
            what = "rubbish" if held.print == -1 else "another prefix"
            raise Fault(
                f"{who}: {what}, written in step {held.step} as position {held.position} of sequence {held.seq}"
            )

    def _input(self, plan: Plan, script: Script, row: int, position: int, given: int) -> int:
        """The token at *position*, held against what it must be."""
        who = f"step {plan.step}: position {position} of sequence {script.seq}"
        if position < script.known:
            if given != script.answer.tokens[position]:
                raise Fault(f"{who} is given token {given}, it is {script.answer.tokens[position]}")
            return given
        if given != -1:
            raise Fault(f"{who} is given token {given}, which nobody can know yet")
        seq, at, token = self.last.get(row, (-1, -1, -1))
        if (seq, at) != (script.seq, position):
            raise Fault(f"{who} takes the last token of row {row}: position {at} of sequence {seq}")
        if token != script.answer.tokens[position]:
            raise Fault(f"{who} is token {token}, it is {script.answer.tokens[position]}")
        return token

    def _sample(self, plan: Plan, i: int) -> int:
        at = int(plan.sample_rows[i])
        script = self.scripts[SeqId(int(plan.seqs[at]))]
        check_sampling(self.limits, script, plan.sampling, i, place_of(plan, i)[1] + 1)
        check_edit(plan, script, i, self.told)
        banned = dict(plan.sampling.banned).get(i, ())
        seed, index = int(plan.sampling.seed[i]), int(plan.sampling.index[i])
        held = self.kv[int(plan.slots[plan.samples[i]])]
        return choose(held.print, seed, index, banned, self.limits.vocab_size)


def place_of(plan: Plan, sample: int) -> tuple[int, int]:
    """Which of the plan's rows *sample* is of, and after which position of it."""
    at = int(plan.sample_rows[sample])
    return at, int(plan.start[at] + plan.samples[sample] - plan.count[:at].sum())


def check_shape(limits: Limits, plan: Plan) -> None:
    """Raise Fault unless *plan* is well-formed and within *limits*."""
    rows, count, seqs, slots, samples = map(ints, (plan.rows, plan.count, plan.seqs, plan.slots, plan.samples))
    total, ends = sum(count), np.cumsum(plan.count) - 1
    drafts, sampling = plan.drafts or (0,) * len(rows), set(ints(plan.sample_rows))
    each_row = (plan.seqs, plan.start, plan.count, plan.context)
    each_sample = (plan.sample_rows, plan.sampling.params, plan.sampling.index)
    if not rows or any(len(column) != len(rows) for column in each_row):
        raise Fault(f"step {plan.step} runs nobody, or has columns of unequal length: {rows}")
    rules: tuple[tuple[bool, Callable[[], str]], ...] = (
        (len(set(rows)) == len(rows), lambda: f"runs a row twice: {rows}"),
        (len(set(seqs)) == len(rows), lambda: f"runs a sequence twice: {seqs}"),
        (all(1 <= row <= limits.max_num_seqs for row in rows), lambda: f"runs rows {rows} of {limits.max_num_seqs}"),
        (all(n >= 1 for n in count), lambda: f"runs a row for nothing: {count}"),
        (
            total <= limits.max_num_batched_tokens,
            lambda: f"computes {total} of {limits.max_num_batched_tokens} positions",
        ),
        (len(slots) == len(plan.inputs) == total, lambda: f"has {len(slots)} slots for {total} positions"),
        (bool((plan.context == plan.start + plan.count).all()), lambda: f"lets rows attend to {plan.context} keys"),
        (len(set(slots)) == total, lambda: f"writes a slot twice: {slots}"),
        (all(slot >= limits.block_size for slot in slots), lambda: f"writes into the sink: {slots}"),
        (samples == sorted(set(samples)), lambda: f"samples {samples}"),
        (all(len(column) == len(samples) for column in each_sample), lambda: "has sampling columns of unequal length"),
        (
            len(drafts) == len(rows) and all(0 <= drafts[i] < count[i] for i in range(len(rows))),
            lambda: f"has drafts {drafts} among {count} positions",
        ),
        (
            samples
            == [end - drafts[i] + j for i, end in enumerate(ints(ends)) if i in sampling for j in range(drafts[i] + 1)],
            lambda: f"samples positions {samples}; its rows end at {ends}, with {drafts} drafts",
        ),
        (all(i < len(samples) for i, _ in plan.sampling.banned), lambda: f"bans tokens for {plan.sampling.banned}"),
    )
    for holds, otherwise in rules:
        if not holds:
            raise Fault(f"step {plan.step} {otherwise()}")


def check_sampling(limits: Limits, script: Script, sampling: SamplingColumns, i: int, end: int) -> None:
    """Raise Fault unless sample *i* is chosen as the request asks, for the token at position *end*."""
    params = script.request.params
    index = end - len(script.request.prompt)
    who = f"sample {i}, output {index} of sequence {script.seq},"
    if index < 0:
        raise Fault(f"{who} lies inside the prompt")
    if sampling.index[i] != index:
        raise Fault(f"{who} has index {sampling.index[i]}")
    for name in ("temperature", "top_p", "min_p", "top_k"):
        if getattr(sampling, name)[i] != np.float32(getattr(params, name)):
            raise Fault(f"{who} has {name} {getattr(sampling, name)[i]}, asked was {getattr(params, name)}")
    if int(sampling.seed[i]) != script.seed:
        raise Fault(f"{who} has seed {sampling.seed[i]}, not {script.seed}")
    wanted = stops(limits, script.request) if index < params.min_tokens else frozenset[int]()
    banned = frozenset(token for at, tokens in sampling.banned if at == i for token in tokens)
    if banned != wanted:
        raise Fault(f"{who} may not choose {sorted(banned)}; it should be {sorted(wanted)}")


def check_edit(plan: Plan, script: Script, i: int, told: Mapping[int, tuple[Request, list[int]]]) -> None:
    """Raise Fault unless the logits of sample *i* are edited as the request asks, knowing all tokens before."""
    at = int(plan.sample_rows[i])
    row, end = int(plan.rows[at]), int(plan.context[at])
    who = f"step {plan.step}: sample {i}, of sequence {script.seq} in row {row},"
    asked = edits_logits(script.request.params)
    edits = [(edit.row, edit.seq, edit.request) for edit in plan.edits if edit.sample == i]
    if edits != [(row, script.seq, script.request)] * asked:
        raise Fault(f"{who} {'is' if asked else 'is not'} to be edited; the plan says {edits}")
    if asked and told.get(row) != (script.request, list(script.answer.tokens[:end])):
        raise Fault(f"{who} has tokens {script.answer.tokens[:end]}; the device knows {told.get(row)}")
