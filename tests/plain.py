"""Sampling as its rules say it, one token at a time: what the engine's own is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentinfer.state.request import Request


def edited_plainly(
    raw_V: Tensor,
    request: Request,
    tokens: Sequence[int],
    held: Sequence[int] = (),
    mask: npt.NDArray[np.bool_] | None = None,
    processors: Mapping[str, Callable[[Any, Tensor], Tensor]] | None = None,
) -> npt.NDArray[np.float32]:
    """The logits of the token after *tokens*, edited as *request* asks. *held*: end tokens that may not come yet."""
    p, out = request.params, tuple(tokens[len(request.prompt) :])
    bias, left = dict(p.logit_bias), list[Any]()
    for i, logit in enumerate(raw_V.numpy()):
        x = logit + np.float32(bias.get(i, 0))
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            x = -np.inf
        if any(w[-1] == i and (*out, i)[-len(w) :] == w for w in p.bad_words):
            x = -np.inf
        if i in held or (mask is not None and not mask[i]):
            x = -np.inf
        if i in tokens:
            x = x / np.float32(p.repetition_penalty) if x > 0 else x * np.float32(p.repetition_penalty)
        left.append(x - (np.float32(p.frequency_penalty) * out.count(i) + np.float32(p.presence_penalty) * (i in out)))
    found = torch.tensor(np.array(left, np.float32))
    for name in p.logits_processors:
        found = (processors or {})[name](tokens, found)
    return found.numpy()
