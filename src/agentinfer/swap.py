"""New weights for an engine that runs: copied over the old ones, between two steps.

The tensors stay where they are, so captured graphs stay valid. What the control plane makes of it: state/swap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import CheckpointError
from agentinfer.loop import Engine
from agentinfer.models.model import Model, load_model, model_of_tensors
from agentinfer.models.weights import tree_leaves
from agentinfer.ops.comm import Ranks
from agentinfer.steps import Machine

Source = str | Path | Mapping[str, Tensor] | Any
"""A model folder; the tensors of a checkpoint by their keys, as of transformers' `state_dict`; or weights as
Machine.weights holds them.
"""
_LINE = 2048


def swap_weights(engine: Engine, source: Source, *, recompute: bool = False) -> int:
    """Go on with the weights of *source*, of the very same model; their version, which the next tokens carry.

    What is in flight is of the old ones: it lands, and `step` gives its tokens. What runs goes on over the KV that it
    has, of the old weights, unless *recompute*: then it waits once more, and its tokens' KV is computed by the new
    ones. No later request finds KV of the old ones. A folder or tensors are read to the host whole before anything is
    written. Raises, leaving the engine as it was, CheckpointError for weights that are not of this model.

    Among several ranks all take the new weights, or none: each reads its part of a folder; for anything else each is
    asked for its own (follow_rank).
    """
    m = engine.machine
    told = str(Path(source).absolute()) if isinstance(source, str | Path) else None
    with engine.others({"weights": told}):
        why = take_over(m, lambda: source)
    if why:
        raise CheckpointError(why)
    engine.land()
    engine.swapped(recompute=recompute)
    return engine.world.state.version


def take_over(m: Machine, source: Callable[[], Source]) -> str:
    """Copy the weights of *source* over those of *m*, behind all that was launched. All ranks call this. What is wrong
    with the weights of any, and then nobody has changed anything; empty: nothing.
    """
    pairs, why = list[tuple[Tensor, Tensor]](), ""
    try:
        pairs = _matched(m.weights, _read(m, source()))
    except CheckpointError as error:
        why = str(error)
    faults = _each_says(m.ranks, why)
    if not any(faults):
        for old, new in pairs:
            old.copy_(new)
    return why or next((f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault), "")


def _each_says(ranks: Ranks, words: str) -> list[str]:
    """What each rank says, cut off at some length; of them this one says *words*."""
    if ranks.tp.size == 1:
        return [words]
    line = torch.frombuffer(bytearray(words.encode()[:_LINE].ljust(_LINE, b"\0")), dtype=torch.uint8)
    lines = ranks.tp.all_gather_last_dim(line.to(ranks.device)).cpu().view(ranks.tp.size, _LINE)
    return [line.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for line in lines]


def _read(m: Machine, source: Source) -> Any:
    """Weights as the machine's forward takes them, on the host unless they are so already."""
    if isinstance(source, type(m.weights)):
        return source
    ranks = evolve(m.ranks, device=torch.device("cpu"))
    positions = len(m.weights.cos_sin)
    if isinstance(source, Mapping):
        return model_of_tensors(m.model, cast("Mapping[str, Tensor]", source), ranks, positions)
    if not isinstance(source, str | Path):
        raise CheckpointError(f"{type(source).__name__} is no folder, no tensors by name, and no weights of this model")
    model, weights = load_model(Path(source), m.model.dtype, ranks, positions, m.model.fp8)
    _check_same(m.model, model, source)
    return weights


def _check_same(mine: Model, other: Model, source: str | Path) -> None:
    """Raises CheckpointError that names what differs in the configs."""
    if type(mine.config) is not type(other.config):
        raise CheckpointError(f"{source}: is {other.name}, the engine's model is {mine.name}")
    was, now = (_facts(model.config) for model in (mine, other))
    changed = [f"{name} is {now[name]!r}, not {was[name]!r}" for name in was if was[name] != now[name]]
    if changed:
        raise CheckpointError(f"{source}: is another model than the engine's: {'; '.join(changed)}")


def _facts(config: Any) -> dict[str, Any]:
    """What weights and forward depend on, by name."""
    found: dict[str, Any] = {}
    for name, value in attrs.asdict(config, recurse=False).items():
        if attrs.has(cast("type[Any]", type(value))):
            found |= {f"{name}.{inner}": fact for inner, fact in _facts(value).items()}
        elif name not in ("eos_ids", "dtype"):
            found[name] = value
    return found


def _matched(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of *old* with its successor. Raises CheckpointError where shape or dtype differ."""
    mine, theirs = list[Tensor](tree_leaves(old)), list[Tensor](tree_leaves(new))
    if len(mine) != len(theirs):
        raise CheckpointError(f"the weights are {len(theirs)} tensors, the engine's {len(mine)}")
    pairs = list(zip(mine, theirs, strict=True))
    for i, (before, after) in enumerate(pairs):
        if before.shape != after.shape or before.dtype != after.dtype:
            said = f"{tuple(after.shape)} {after.dtype}, the engine's is {tuple(before.shape)} {before.dtype}"
            raise CheckpointError(f"tensor {i} of the weights is {said}")
    return pairs
