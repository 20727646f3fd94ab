"""BlockPool: who holds which KV block, and what a block remembers (the prefix cache).

A block is in exactly one of three places: `free` (nothing in it), `cached` (nobody holds it, its content can
still be found) or referenced (`refs > 0`; its content can be found too once it is registered).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from attrs import frozen
from rpds import HashTrieMap

from agentinfer.state.ids import I32, BlockId, seal
from agentinfer.state.log import Queue
from agentinfer.state.show import pool_html
from agentinfer.state.thaw import MapDraft

ROOT = BlockId(0)
"""The parent of a chain's first block: the sink, which is never registered itself."""

BlockHash = Callable[[int, int, str | None, tuple[int, ...]], int]
"""(seed, parent hash, salt, tokens) -> hash. Only tests inject another than `block_hash`."""


@frozen
class BlockKey:
    """What a registered block holds. A hit is confirmed on this, never on the hash alone."""

    hash: int
    parent: BlockId
    salt: str | None
    tokens: tuple[int, ...]


@frozen(eq=False)
class BlockPool:
    """The allocator's state. Read-only; change it through a PoolDraft."""

    refs: I32
    """[num_blocks + 1] sequences that hold the block."""
    free: Queue[BlockId]
    """Blocks that hold nothing, taken first."""
    cached: HashTrieMap[BlockId, int]
    """Registered blocks that nobody holds, with the ticket of their release."""
    lru: Queue[tuple[BlockId, int]]
    """(block, ticket), least recently released first; void where `cached` has another ticket or none."""
    index: HashTrieMap[int, BlockId]
    """Hash -> the one registered block with that hash."""
    keys: HashTrieMap[BlockId, BlockKey]
    """Block -> what it holds, if registered."""
    ticket: int

    @classmethod
    def empty(cls, num_blocks: int) -> BlockPool:
        """All of blocks 1 .. num_blocks free."""
        refs = np.zeros(num_blocks + 1, np.int32)
        seal(refs)
        free = Queue[BlockId].of(BlockId(b) for b in range(1, num_blocks + 1))
        return cls(refs, free, HashTrieMap(), Queue[tuple[BlockId, int]].of(), HashTrieMap(), HashTrieMap(), 0)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self.free) + len(self.cached)

    def _repr_html_(self) -> str:
        return pool_html(self)


def forgotten(pool: BlockPool) -> BlockPool:
    """*pool*, in which no content of any block can be found any more; what nobody holds is free."""
    fresh, empty = [block for block, ticket in pool.lru if pool.cached.get(block) == ticket], BlockPool.empty(0)
    free = pool.free.push_many(fresh)
    return BlockPool(pool.refs, free, empty.cached, empty.lru, empty.index, empty.keys, pool.ticket)


def block_hash(seed: int, parent: int, salt: str | None, tokens: tuple[int, ...]) -> int:
    """The 64-bit hash of a full block, chained on its parent's hash.

    BLAKE2b keyed by *seed* over a tagged, fixed-width encoding: parent, then the salt (only at the head of a
    chain, with its length), then the token ids as int32. Equal in every process with an equal seed.
    """
    head = b"none" if salt is None else _salt(salt)
    keyed = _keyed(seed).copy()
    keyed.update(struct.pack(f"<Q{len(head)}s{len(tokens)}i", parent, head, *tokens))
    return int.from_bytes(keyed.digest(), "little")


@lru_cache(maxsize=16)
def _keyed(seed: int) -> hashlib.blake2b:
    """The hash of nothing: to begin with it is half of what a short content costs."""
    return hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"), person=b"agentinfer.kv")


def _salt(salt: str) -> bytes:
    raw = salt.encode("utf-8", "surrogatepass")
    return b"salt" + len(raw).to_bytes(8, "little") + raw


class PoolDraft:
    """The pool, thawed. Mutable on purpose; local to one call."""

    def __init__(self, pool: BlockPool, seed: int, hasher: BlockHash = block_hash) -> None:
        self._pool = pool
        self._refs: I32 | None = None
        self.free, self.lru, self.ticket = pool.free, pool.lru, pool.ticket
        self.cached, self.index, self.keys = MapDraft(pool.cached), MapDraft(pool.index), MapDraft(pool.keys)
        self._seed, self._hasher = seed, hasher

    @property
    def refs(self) -> I32:
        """[num_blocks + 1], to read."""
        return self._pool.refs if self._refs is None else self._refs

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self.free) + len(self.cached)

    def _thaw(self) -> I32:
        if self._refs is None:
            self._refs = self._pool.refs.copy()
        return self._refs

    def take(self, n: int) -> tuple[BlockId, ...]:
        """Take *n* blocks: empty ones first, then the least recently used cached ones. Needs num_available >= n."""
        refs = self._thaw()
        out, self.free = self.free.pop_many(min(n, len(self.free)))
        out.extend(self._evict() for _ in range(n - len(out)))
        for block in out:
            refs[block] = 1
        return tuple(out)

    def _evict(self) -> BlockId:
        while True:
            block, ticket = self.lru.peek()
            self.lru = self.lru.pop()
            if self.cached.get(block) == ticket:
                break
        del self.cached[block]
        self._unregister(block)
        return block

    def _unregister(self, block: BlockId) -> None:
        del self.index[self.keys[block].hash]
        del self.keys[block]

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Hold one more reference to each of *blocks*, reviving those that were only cached."""
        refs = self._thaw()
        for block in blocks:
            if refs[block] == 0:
                del self.cached[block]
            refs[block] += 1

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Release *blocks* (no block twice), last first, so that a prefix outlives its continuations in the cache."""
        refs = self._thaw()
        last_first = np.fromiter(reversed(tuple(blocks)), np.int64)
        refs[last_first] -= 1
        empty: list[BlockId] = []
        findable: list[tuple[BlockId, int]] = []
        for block in map(BlockId, last_first[refs[last_first] == 0].tolist()):
            if block in self.keys:
                self.ticket += 1
                self.cached.add(block, self.ticket)
                findable.append((block, self.ticket))
            else:
                empty.append(block)
        self.free, self.lru = self.free.push_many(empty), self.lru.push_many(findable)
        if len(self.lru) > 64 + 2 * len(refs):
            self.lru = Queue[tuple[BlockId, int]].of(
                entry for entry in self.lru if self.cached.get(entry[0]) == entry[1]
            )

    def find(self, parent: BlockId, salt: str | None, tokens: tuple[int, ...]) -> tuple[BlockId | None, int]:
        """The registered block with this content after *parent*, if any, and the content's hash."""
        h = self._hash(parent, salt, tokens)
        block = self.index.get(h)
        if block is not None:
            key = self.keys[block]
            if key.parent != parent or key.tokens != tokens or key.salt != salt:
                block = None
        return block, h

    def register(self, block: BlockId, parent: BlockId, salt: str | None, tokens: tuple[int, ...], h: int) -> bool:
        """Let later sequences find *block* by its content. False if another content has the same hash."""
        if h in self.index:
            return False
        self.index.add(h, block)
        self.keys.add(block, BlockKey(h, parent, salt, tokens))
        return True

    def forget(self, heads: Iterable[BlockId]) -> None:
        """Let nobody find the registered *heads* again, nor what continues them; what nobody holds is free, in the
        order of its release. Looks through all that is registered, if there are heads.
        """
        ahead, gone = [*heads], set[BlockId]()
        after: dict[BlockId, list[BlockId]] = {}
        for block in self.keys if ahead else ():
            after.setdefault(self.keys[block].parent, []).append(block)
        while ahead:
            block = ahead.pop()
            gone.add(block)
            ahead += (child for child in after.pop(block, ()) if child not in gone)
        tickets = [(ticket, block) for block in gone if (ticket := self.cached.get(block)) is not None]
        fresh = [block for _, block in sorted(tickets)]
        for block in fresh:
            del self.cached[block]
        for block in gone:
            self._unregister(block)
        self.free = self.free.push_many(fresh)

    def _hash(self, parent: BlockId, salt: str | None, tokens: tuple[int, ...]) -> int:
        if parent == ROOT:
            return self._hasher(self._seed, 0, salt, tokens)
        return self._hasher(self._seed, self.keys[parent].hash, None, tokens)

    def freeze(self) -> BlockPool:
        """The pool as it is now, read-only. If nobody came or went and nothing was registered: the very same."""
        if self._refs is not None:
            seal(self._refs)
        elif not self.keys.changed:
            return self._pool
        return BlockPool(
            self.refs, self.free, self.cached.freeze(), self.lru, self.index.freeze(), self.keys.freeze(), self.ticket
        )
