"""Memory of GPUs of one host that they lend each other: torch's symmetric memory, without a default group of torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Shared:
    """Memory of one GPU that the other ranks' GPUs can read and write."""

    memory: Tensor
    """[bytes] uint8, zeros at first: this rank's."""
    pointers: Tensor
    """[ranks] int64: where each rank's lies, as this one's GPU sees it."""
    group: str
    held: tuple[Any, ...]
    """Keeps the others' memory mapped, and the group known by its name."""


def share_memory(
    store: Any, name: str, rank: int, size: int, counts: Sequence[int], device: torch.device
) -> list[Shared]:  # fmt: skip
    """Pieces of so many bytes on *device* that the *size* ranks of *name* lend each other (torch's symmetric memory).

    All ranks call this, once for a *name*. No multicast is asked for, but torch prepares for some unless the
    environment says TORCH_SYMM_MEM_DISABLE_MULTICAST=1, as commands do. Raises what torch does where it can not.
    """
    symmetric = import_module("torch.distributed._symmetric_memory")
    held = name_group(store, name, rank, size)
    lent: list[Shared] = []
    for count in counts:
        memory = symmetric.empty(count, dtype=torch.uint8, device=device)
        handle = symmetric._SymmetricMemory.rendezvous(memory, name)  # noqa: SLF001
        memory.zero_()
        pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        lent.append(Shared(memory, pointers, name, (handle, *held)))
    return lent


def name_group(store: Any, name: str, rank: int, size: int) -> tuple[Any, Any]:
    """A group that torch's C++ finds by *name* for as long as it is held, and its store, over which symmetric memory
    meets. The public ways, to this and to a rendezvous, want a default group.
    """
    distributed, c10d = import_module("torch.distributed"), import_module("torch._C._distributed_c10d")
    own = renumbered(distributed.PrefixStore(f"{name}/memory", store))
    group = distributed.ProcessGroup(own, rank, size)
    group._set_group_name(name)  # noqa: SLF001
    c10d._register_process_group(name, group)  # noqa: SLF001
    c10d._SymmetricMemory.set_group_info(name, rank, size, own)  # noqa: SLF001
    return group, own


def renumbered(store: Any) -> Any:
    """*store* as a rendezvous of symmetric memory needs it: its keys are "what/number/rank", where the number counts
    all that this process has ever exchanged, in whatever group. A process that has had groups before would wait for
    keys that no other writes, so the numbers are counted anew, from 0, for this store.
    """
    known: dict[str, int] = {}

    def renamed(key: str) -> str:
        what, *numbers = key.rsplit("/", 2)
        if len(numbers) != 2 or not all(x.isdecimal() for x in numbers):
            return key
        number, rank = numbers
        return f"{what}/{known.setdefault(f'{what}/{number}', len(known))}/{rank}"

    class Renumbered(import_module("torch.distributed").Store):
        """Called by C++, which knows nothing of keywords."""

        def set(self, key: str, value: bytes) -> None:
            store.set(renamed(key), value)

        def get(self, key: str) -> bytes:
            return store.get(renamed(key))

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            names = [renamed(key) for key in keys]
            store.wait(names) if timeout is None else store.wait(names, timeout)

        def check(self, keys: Sequence[str]) -> bool:
            return store.check([renamed(key) for key in keys])

        def add(self, key: str, amount: int) -> int:
            return store.add(renamed(key), amount)

        def delete_key(self, key: str) -> bool:
            return store.delete_key(renamed(key))

        def set_timeout(self, timeout: timedelta) -> None:
            store.set_timeout(timeout)

    return Renumbered()
