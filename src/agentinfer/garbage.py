"""Python's garbage collector in processes that make records for every token, and no cycles unless something fails."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

SELDOM: Final = (200_000, 1_000, 1_000)
"""Thresholds of the collector: with Python's own, a third of the host's time in steps of prompts, and a fifth of the
HTTP process's, goes to looking for cycles.
"""


@contextmanager
def collected_seldom() -> Generator[None]:
    """In the block the collector looks seldom, and never at what was there before."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
