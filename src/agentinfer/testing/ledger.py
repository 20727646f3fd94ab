"""A second opinion on the prefix cache: what must be in it, and who must leave it first.

Block by block it notes when a cached block was last let go, and content by content what has been computed and
landed. It reads the pool only to see what happened, never to learn what should have.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import define, field

from agentinfer.state.blocks import ROOT, BlockPool
from agentinfer.state.engine import EngineState
from agentinfer.state.ids import BlockId
from agentinfer.state.limits import Limits
from agentinfer.testing.ghost import Fault

Content = tuple[str | None, tuple[int, ...]]
"""Salt, and all tokens from the start of the sequence to the end of the block."""


def contents(pool: BlockPool) -> dict[BlockId, Content]:
    """What each registered block holds, read along its chain of parents. Raises Fault where the chain breaks."""
    found: dict[BlockId, Content] = {}
    for block in pool.keys:
        chain = [block]
        while (parent := pool.keys[chain[-1]].parent) != ROOT and parent not in found:
            if parent not in pool.keys or parent in chain:
                raise Fault(f"block {chain[-1]} is registered after block {parent}, which is not in the cache")
            chain.append(parent)
        for link in reversed(chain):
            key = pool.keys[link]
            salt, above = (key.salt, ()) if key.parent == ROOT else found[key.parent]
            found[link] = (salt, (*above, *key.tokens))
    return found


def reusable(limits: Limits, known: Collection[Content], salt: str | None, tokens: tuple[int, ...]) -> int:
    """Leading positions of *tokens* that need not be computed if *known* is cached; the last always needs to."""
    size, blocks = limits.block_size, 0
    while blocks < (len(tokens) - 1) // size and (salt, tokens[: (blocks + 1) * size]) in known:
        blocks += 1
    return blocks * size


def _continues(content: Content, heads: Collection[Content]) -> bool:
    """Whether *content* is one of *heads*, or goes on after it."""
    return any(content[0] == salt and content[1][: len(tokens)] == tokens for salt, tokens in heads)


@define
class Ledger:
    """What the cache of one engine did so far. Call `observe` after every transition. Mutable on purpose."""

    limits: Limits
    exact: bool
    """Hashes do not collide, so all that has landed can be found."""
    now: int = 0
    released: dict[BlockId, int] = field(factory=dict[BlockId, int])
    """Cached block -> the transition in which its last holder let go of it."""
    known: dict[BlockId, Content] = field(factory=dict[BlockId, Content])
    """Registered block -> its content."""
    held: frozenset[BlockId] = frozenset()

    def observe(
        self,
        state: EngineState,
        learned: Collection[Content] = (),
        broken: Collection[Content] = (),
        *,
        scheduled: bool = False,
        preempted: bool = False,
        drafted: bool = False,
    ) -> None:
        """Compare *state* with the one before it.

        *learned*: contents that landed in between. *broken*: salt and known tokens of sequences whose logits were not
        finite. *scheduled*: blocks may have been taken. *preempted*: and given back. *drafted*: tokens landed one
        after the other. Raises Fault for anything that no cache should do.
        """
        self.now += 1
        known = contents(state.pool)
        held = frozenset(block for run in state.rows if run is not None for block in run.blocks)
        free = frozenset(state.pool.free)
        self._partition(state, known, held, free)
        gone = {block for block in self.known if known.get(block) != self.known[block]}
        heads = self._heads(broken, {known[block] for block in held if block in known}, drafted=drafted)
        evicted = {block for block in gone if not _continues(self.known[block], heads)}
        if not drafted and (found := {block for block in known if _continues(known[block], heads)}):
            raise Fault(f"blocks {sorted(found)} can be found, though who computed or read them had no finite logits")
        if evicted and not scheduled:
            raise Fault(f"the prefix cache lost blocks {sorted(evicted)} although no block was taken")
        kept = {block: when for block, when in self.released.items() if block not in gone and block not in held}
        self._order(evicted, kept, preempted=preempted)
        if evicted and free and not preempted:
            raise Fault(f"blocks {sorted(evicted)} were taken from the cache while {sorted(free)} were free")
        self._learned(known, gone, set(learned), heads)
        # whoever computed again what was cached has used it, if only in its last step
        used = {block for block in known if block not in held and (block not in kept or known[block] in learned)}
        fresh = dict.fromkeys(used, self.now)
        self.released, self.known, self.held = {**kept, **fresh}, known, held

    def _heads(self, broken: Collection[Content], held: set[Content], *, drafted: bool) -> set[Content]:
        """Of each of *broken* the first content that nobody holds: it must go, and all that continues it.

        Where tokens landed one after the other, who held what when is not told: then it may go, from the first on.
        """
        size, heads = self.limits.block_size, set[Content]()
        for salt, tokens in broken:
            chain = ((salt, tokens[:upto]) for upto in range(size, len(tokens) + 1, size))
            head = next((content for content in chain if drafted or content not in held), None)
            heads |= {head} if head is not None else set()
        return heads

    def _partition(
        self, state: EngineState, known: dict[BlockId, Content], held: frozenset[BlockId], free: frozenset[BlockId]
    ) -> None:
        cached = frozenset(known) - held
        parts = len(held) + len(cached) + len(free)
        if held & free or cached & free or parts != self.limits.num_blocks or len(state.pool.free) != len(free):
            raise Fault(
                f"held {sorted(held)}, cached {sorted(cached)}, free {sorted(free)}: not {self.limits.num_blocks}"
            )
        lengths = sum(len(run.blocks) for run in state.rows if run is not None)
        if int(state.pool.refs.sum()) != lengths:
            raise Fault(f"{state.pool.refs.sum()} references, the tables have {lengths} entries")
        if known and not self.limits.prefix_cache:
            raise Fault("the prefix cache is off and knows blocks")
        if len(set(known.values())) != len(known):
            raise Fault(f"a content is registered twice: {known}")

    def _order(self, evicted: set[BlockId], kept: dict[BlockId, int], *, preempted: bool) -> None:
        for block in evicted:
            if block in self.held and not preempted:
                raise Fault(f"block {block} was taken from the cache while a sequence held it")
            when = self.released.get(block, self.now)
            for other, earlier in kept.items():
                if earlier < when:
                    raise Fault(
                        f"block {block}, released in transition {when}, was evicted before block {other}, "
                        f"released in {earlier}"
                    )

    def _learned(
        self, known: dict[BlockId, Content], gone: set[BlockId], learned: set[Content], heads: set[Content]
    ) -> None:
        have, had = set(known.values()), {content for block, content in self.known.items() if block not in gone}
        if early := have - had - learned:
            raise Fault(f"registered, though its KV has not landed: {sorted(early, key=repr)}")
        missing = {content for content in (had | learned) - have if not _continues(content, heads)}
        if self.exact and self.limits.prefix_cache and missing:
            raise Fault(f"landed and full, but not to be found: {sorted(missing, key=repr)}")
