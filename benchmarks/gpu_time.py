"""How long a kernel takes in a captured graph over cold memory: the clock of the GPU benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[int], Any], copies: int, *, launches: int) -> float:
    """Microseconds a call, of all *copies* one after the other in a graph of about *launches*: the median of 5 sets."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, launches // copies)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for i in range(copies):
                call(i)
    found = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * begin.elapsed_time(end) / (3 * repeats * copies))
    return statistics.median(found[1:])
