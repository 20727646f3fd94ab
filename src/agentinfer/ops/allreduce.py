"""Sums of small messages between GPUs of one host without NCCL: chosen by size, tried at the start, left out if
anything is wrong with them.

========================= ==================================================================================
a message                 goes
========================= ==================================================================================
of at most `push_most`    by our kernel, which writes into the memory of the other ranks
of at most STAGING bytes  by torch's two-shot sum over symmetric memory (float32 and bfloat16)
larger, odd, unaligned    by NCCL
========================= ==================================================================================

No multicast is used. Knows messages and ranks; what they mean it does not.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Collection
from typing import Final, Literal, cast

import torch
from attrs import frozen
from torch import Tensor

from agentinfer.ops.comm import Processes
from agentinfer.ops.kernels import all_reduce as push
from agentinfer.ops.kernels.launch import launches_dependents
from agentinfer.ops.shared_memory import Shared, share_memory

_log = logging.getLogger(__name__)

STAGING: Final = 8 << 20
"""Bytes of the largest message that torch's sum is given."""
MOST_RANKS: Final = 8
_PATIENCE: Final = 1 << 22
"""How often the trial looks for what another rank sends: some seconds."""
_PUSHED: Final = (torch.float32, torch.bfloat16, torch.float16)
_STAGED: Final = (torch.float32, torch.bfloat16)

Path = Literal["push", "two_shot", "plain"]


@frozen(eq=False)
class Fast:
    """What a rank needs to sum without NCCL; a `comm.Peers`."""

    rank: int
    size: int
    lent: Shared
    """Memory that the others write."""
    staging: Shared
    counters: Tensor
    """[RANGES, PIECES] int32: calls of each program of our kernel."""
    pdl: bool = False
    """Programmatic dependent launch."""

    def sum(self, x: Tensor) -> Tensor | None:
        """See Peers."""
        return fast_sum(self, x)

    def norms(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """See Peers."""
        small = rows * width * dtype.itemsize <= push_most(self.size)
        return small and dtype in _PUSHED and push.rows_fit(rows, width, dtype)

    def add_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """See Peers."""
        return fast_add_norm(self, parts_PTD, residual_TD, weight_D, eps, dtype)


def push_most(size: int) -> int:
    """Bytes of the largest message that *size* ranks write to each other: everybody's to everybody. A rule, measured
    for two: with more ranks a two-shot sum, which moves less, pays earlier.
    """
    return push.MOST // max(1, size * (size - 1) // 2) // 16 * 16


def fits_peer_buffer(x: Tensor, buffer_bytes: int, dtypes: Collection[torch.dtype]) -> bool:
    """Whether a peer-to-peer all-reduce with staging buffers of *buffer_bytes* can take *x*: contiguous, of a listed
    dtype, not empty, of whole 16-byte units from an address that is one, no larger than the buffer.

    What does not fit goes the plain way.
    """
    size = x.numel() * x.element_size()
    whole = size % 16 == 0 and x.data_ptr() % 16 == 0
    return x.dtype in dtypes and x.is_contiguous() and whole and 0 < size <= buffer_bytes


def path_of(x: Tensor, size: int) -> Path:
    """How *size* ranks sum *x*; all have the same shape, dtype and alignment."""
    if fits_peer_buffer(x, push_most(size), _PUSHED):
        return "push"
    return "two_shot" if fits_peer_buffer(x, STAGING, _STAGED) else "plain"


def fast_sum(fast: Fast, x: Tensor, *, patience: int = 0) -> Tensor | None:
    """The sum of *x* over the ranks, a new tensor; None: it goes the plain way. Waits for nothing on the host."""
    path = path_of(x, fast.size)
    if path == "push":
        return push.all_reduce(x, fast.lent.pointers, fast.counters, fast.rank, patience=patience, pdl=fast.pdl)
    return two_shot_sum(fast.staging, x) if path == "two_shot" else None


def fast_add_norm(
    fast: Fast, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, *,
    patience: int = 0,
) -> Tensor:  # fmt: skip
    """See `kernels.all_reduce.all_reduce_norm`. Waits for nothing on the host."""
    return push.all_reduce_norm(
        parts_PTD, residual_TD, weight_D, eps, dtype, fast.lent.pointers, fast.counters, fast.rank, patience=patience,
        pdl=fast.pdl,
    )  # fmt: skip


def two_shot_sum(staging: Shared, x: Tensor) -> Tensor:
    """The sum of *x* over the ranks of *staging*, which it fits into, by torch: each rank adds a part and sends it."""
    there = staging.memory[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
    there.copy_(x)
    torch.ops.symm_mem.two_shot_all_reduce_(there, "sum", staging.group)
    return there.clone()


def start_fast(comm: Processes, rank: int, store: object, name: str, device: torch.device) -> Fast | None:
    """What lets the ranks of *comm* sum without NCCL, tried out and found right on all of them; None, and one warning,
    if it is not. All ranks call this. *store*, *name*: where they meet, and as what.
    """
    try:
        why = "" if comm.size <= MOST_RANKS else f"{comm.size} ranks are more than {MOST_RANKS}"
        why = why or _peers_missing(comm, rank, device)
    except Exception as error:  # noqa: BLE001 - whatever it is, NCCL sums
        why = f"{type(error).__name__}: {error}"
    if not _all_agree(comm, rank, device, good=not why):
        return _none(rank, why or "another rank can not")
    fast = None
    try:
        fast = _open(comm, rank, store, name, device)
    except Exception as error:  # noqa: BLE001 - the same
        why = f"{type(error).__name__}: {error}"
    if not _all_agree(comm, rank, device, good=fast is not None) or fast is None:
        return _none(rank, why or "another rank can not")
    try:
        why = _trial(fast, comm, device)
    except Exception as error:  # noqa: BLE001 - the same
        why = f"{type(error).__name__}: {error}"
    if not _all_agree(comm, rank, device, good=not why):
        return _none(rank, why or "the trial of another rank failed")
    return fast


def _none(rank: int, why: str) -> None:
    level = logging.WARNING if rank == 0 else logging.INFO
    _log.log(level, "small messages go through NCCL, which is slower: %s", why.split("\n", 1)[0])


def _all_agree(comm: Processes, rank: int, device: torch.device, *, good: bool) -> bool:
    own = torch.tensor([int(good)], dtype=torch.int64, device=device)
    return bool(comm.all_gather_last_dim(own, rank).min().item())


def _peers_missing(comm: Processes, rank: int, device: torch.device) -> str:
    """Which other rank's memory this one can not reach, in words."""
    host = zlib.crc32(socket.gethostname().encode())
    own = torch.tensor([host, device.index or 0], dtype=torch.int64, device=device)
    each = cast("list[list[int]]", comm.all_gather_last_dim(own, rank).view(-1, 2).tolist())
    for other, (where, index) in enumerate(each):
        if where != host:
            return f"rank {other} is on another host"
        if other != rank and not torch.cuda.can_device_access_peer(device, index):
            return f"GPU {device.index} can not reach GPU {index}"
    return ""


def _open(comm: Processes, rank: int, store: object, name: str, device: torch.device) -> Fast:
    counts = (push.buffer_bytes(comm.size), STAGING)
    lent, staging = share_memory(store, name, rank, comm.size, counts, device)
    counters = torch.zeros(len(push.RANGES), push.PIECES, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return Fast(rank, comm.size, lent, staging, counters, launches_dependents(device))


def _trial(fast: Fast, comm: Processes, device: torch.device) -> str:
    """What is wrong with sums of all sizes, compared with NCCL's; empty: nothing. Numbers are small and whole, so sums
    are exact.
    """
    most, small = push_most(fast.size), push.PIECES * push.RANGES[0]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for size in (16, 8 << 10, min(small, most), most, 16, most, 8 << 10, most + 16, STAGING):
        for dtype in _STAGED:
            x = torch.arange(size // dtype.itemsize, device=device) % 15 + fast.rank
            got = fast_sum(fast, x.to(dtype), patience=_PATIENCE)
            want = comm.plain_sum(x.to(dtype))
            wrong += want.numel() if got is None else (got != want).sum()
    rows = torch.arange(8 * 64, device=device).view(8, 64) % 15 + fast.rank
    total, ones = torch.zeros(8, 64, device=device), torch.ones(64, device=device)
    fast_add_norm(fast, rows[None].float(), total, ones, 1e-6, torch.float32, patience=_PATIENCE)
    wrong += (total != comm.plain_sum(rows.float())).sum()
    found = int(wrong.item())
    return f"{found} numbers of a trial were wrong" if found else ""
