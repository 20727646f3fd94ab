"""The yardstick for the scheduler: a plain mutable one, as small engines write it. Objects in lists, changed in place.

One step of steady decode is: grow block tables, build the step's input lists, commit one token a sequence and
register the blocks that became full.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque


class Seq:
    """One request."""

    def __init__(self, tokens: list[int], max_tokens: int) -> None:
        self.tokens, self.num_prompt, self.max_tokens = list(tokens), len(tokens), max_tokens
        self.table: list[int] = []
        self.num_computed, self.hashes = 0, []


class Scheduler:
    """Everything in place."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, eos: int) -> None:
        self.bs, self.max_num_seqs, self.eos = block_size, max_num_seqs, eos
        self.free, self.refs = deque(range(num_blocks)), [0] * num_blocks
        self.by_hash, self.hash_of = {}, [None] * num_blocks
        self.waiting, self.running = deque(), []

    def take(self, seq: Seq) -> None:
        """One more block for *seq*."""
        block = self.free.popleft()
        if self.hash_of[block] is not None:
            self.by_hash.pop(self.hash_of[block], None)
            self.hash_of[block] = None
        self.refs[block] = 1
        seq.table.append(block)

    def release(self, seq: Seq) -> None:
        """Give the blocks of *seq* back."""
        for block in reversed(seq.table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
        seq.table = []

    def schedule(self) -> list[Seq]:
        """Who runs."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting.popleft()
            while len(seq.table) * self.bs < len(seq.tokens):
                self.take(seq)
            seq.num_computed = len(seq.tokens) - 1
            self.running.append(seq)
        batch = []
        for seq in self.running:
            if (len(seq.tokens) - 1) // self.bs >= len(seq.table):
                if not self.free:
                    continue
                self.take(seq)
            batch.append(seq)
        return batch

    def inputs(self, batch: list[Seq]) -> tuple[list, list, list, list, list]:
        """The lists that a forward pass is made of."""
        ids, positions, slots, lens = [], [], [], []
        for seq in batch:
            n = len(seq.tokens)
            ids.append(seq.tokens[-1])
            positions.append(n - 1)
            lens.append(n)
            slots.append(seq.table[(n - 1) // self.bs] * self.bs + (n - 1) % self.bs)
        width = max(len(s.table) for s in batch)
        tables = [s.table + [-1] * (width - len(s.table)) for s in batch]
        return ids, positions, slots, lens, tables

    def commit(self, batch: list[Seq], sampled: list[int]) -> None:
        """Append the tokens, register full blocks, drop who is done."""
        done = []
        for seq, token in zip(batch, sampled, strict=True):
            seq.num_computed = len(seq.tokens)
            full = seq.num_computed // self.bs
            while len(seq.hashes) < full:
                i = len(seq.hashes)
                content = tuple(seq.tokens[i * self.bs : (i + 1) * self.bs])
                h = hash((seq.hashes[-1] if seq.hashes else 0, content))
                seq.hashes.append(h)
                if h not in self.by_hash:
                    self.by_hash[h], self.hash_of[seq.table[i]] = seq.table[i], h
            seq.tokens.append(token)
            if token == self.eos or len(seq.tokens) - seq.num_prompt >= seq.max_tokens:
                done.append(seq)
        for seq in done:
            self.running.remove(seq)
            self.release(seq)


def ready(n: int, block_size: int, num_blocks: int) -> Scheduler:
    """*n* sequences in steady decode, prompts of 512 to 575 tokens."""
    rng = random.Random(0)
    s = Scheduler(num_blocks, block_size, n, eos=1)
    for i in range(n):
        s.waiting.append(Seq([rng.randrange(2, 1000) for _ in range(512 + i % 64)], 2000))
    s.commit(s.schedule(), [7] * n)
    return s


def one_step(s: Scheduler) -> float:
    """Microseconds of one step."""
    begin = time.perf_counter_ns()
    batch = s.schedule()
    s.inputs(batch)
    s.commit(batch, [7] * len(batch))
    return (time.perf_counter_ns() - begin) / 1e3


def measure(n: int, steps: int = 200, block_size: int = 64, num_blocks: int = 24_576) -> float:
    """Microseconds a step, the median."""
    s = ready(n, block_size, num_blocks)
    return statistics.median(one_step(s) for _ in range(steps))
