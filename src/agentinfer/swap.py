"""New weights for an engine that runs: copied over the old ones, between two steps.

The tensors stay where they are, so captured graphs stay valid. What the control plane makes of it: state/swap.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from attrs import evolve
from torch import Tensor

from agentinfer.errors import AgentInferError, CheckpointError
from agentinfer.loop import Engine
from agentinfer.models.model import Model, load_model, model_of_tensors
from agentinfer.models.weights import tree_leaves
from agentinfer.steps import Machine

Source = str | Path | Mapping[str, Tensor] | Any
"""A model folder; the tensors of a checkpoint by their keys, as of transformers' `state_dict`; or weights as
Machine.weights holds them.
"""


def swap_weights(engine: Engine, source: Source, *, recompute: bool = False) -> int:
    """Go on with the weights of *source*, of the very same model; their version, which the next tokens carry.

    What is in flight lands first, and `step` gives its tokens. What runs goes on over the KV that it has, of the old
    weights, unless *recompute*: then it waits once more, and its tokens' KV is computed by the new ones. No later
    request finds KV of the old ones. A folder or tensors are read to the host whole before anything is written.
    Raises, leaving the engine as it was: CheckpointError for weights that are not of this model, AgentInferError for an
    engine of several ranks.
    """
    m = engine.machine
    if m.ranks.tp.size > 1:
        raise AgentInferError("swap_weights: an engine of several ranks can not swap yet: the others would not know")
    pairs = _matched(m.weights, _read(m, source))
    engine.land()
    for old, new in pairs:
        old.copy_(new)
    engine.swapped(recompute=recompute)
    return engine.world.state.version


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
    model, weights = load_model(Path(source), m.model.dtype, ranks, positions)
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
