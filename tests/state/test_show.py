"""States, pools and plans as tables in a notebook."""

from __future__ import annotations

from agentinfer.state.engine import initial
from engines import Hand, limits, request


def test_a_notebook_shows_what_is_there() -> None:
    """A state shows its rows and blocks, a pool each of its blocks, a plan its ranges of positions."""
    hand = Hand.of(limits(num_blocks=9), request(9, 9), request(3, 1))
    plan = hand.plan()
    state, pool, step = (x._repr_html_() for x in (hand.state, hand.state.pool, plan))
    assert "2 running, 0 waiting" in state
    assert "1 2 3" in state
    assert "5 free, 0 cached, 4 referenced" in pool
    assert all(f"block {block}:" in pool for block in range(1, 10))
    assert "12 positions, 2 samples" in step
    assert "[0, 9)" in step
    assert "0 running, 0 waiting" in initial(limits())._repr_html_()
