"""Launching a kernel at little cost to the host: in eager steps of small models the launches are what takes time.

Triton's own launch binds the arguments, specializes each by its value, makes a key of all that, and looks up the
compiled kernel (about 10 microseconds on a fast core; cProfile of `JITFunction.run` in Triton 3.6); then its launcher
asks the driver about every pointer. What a kernel of ours is compiled for follows from less: its constants, the dtypes,
and that all pointers are multiples of 16. So after a first ordinary launch, `Direct` calls what Triton compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

VERIFIED = ("3.6.",)
"""Versions of Triton whose compiled kernels are called here; with others every launch is the ordinary one."""
ALIGNED = 16
"""Triton compiles for pointers that are multiples of it, or for any."""


def launches_dependents(device: torch.device) -> bool:
    """Whether kernels on *device* can be launched programmatically: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


class Direct:
    """A kernel whose parameters are tensors, then numbers, then constants. Mutable: remembers what was compiled.

    Integers among the numbers must be `do_not_specialize`, else every launch is the ordinary one, as it is in Triton's
    interpreter, where a pointer is not aligned, and while a profiler has hooks in Triton.
    """

    __slots__ = ("_able", "_kernel", "_known")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._able = isinstance(kernel, JITFunction) and triton.__version__.startswith(VERIFIED)

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        *,
        warps: int,
        stages: int | None = None,
        registers: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on the current stream of the current device, where all *tensors* must be.

        *stages*: of pipelined loops; None: Triton's default. *registers*: most a thread; 0: no limit. *pdl*:
        programmatic dependent launch.
        """
        if not self._able:
            self._ordinary(grid, tensors, numbers, constants, warps, stages, registers, pdl)
            return
        active = driver.active
        device = active.get_current_device()
        key = (device, warps, stages, registers, pdl, constants, *[x.dtype for x in tensors], *map(type, numbers))
        places = [x.data_ptr() for x in tensors]
        together = 0
        for place in places:
            together |= place
        known = self._known.get(key)
        if known is None or together % ALIGNED or knobs.runtime.launch_enter_hook.calls:
            compiled = self._ordinary(grid, tensors, numbers, constants, warps, stages, registers, pdl)
            if together % ALIGNED == 0 and self._general(len(tensors), numbers):
                self._known[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = known
        stream = active.get_current_stream(device)
        try:
            run(*grid, stream, function, metadata, None, None, None, *places, *numbers, *constants)
        except OverflowError:  # before anything is launched: an integer that needs more bits than the first one
            self._ordinary(grid, tensors, numbers, constants, warps, stages, registers, pdl)

    def _general(self, first: int, numbers: tuple[float, ...]) -> bool:
        """Whether what was compiled for these *numbers* (parameters *first* and on) serves others of their types."""
        params = self._kernel.params[first:]
        return all(isinstance(x, float) or param.do_not_specialize for x, param in zip(numbers, params, strict=False))

    def _ordinary(
        self, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: tuple[float, ...],
        constants: tuple[Any, ...], warps: int, stages: int | None, registers: int, pdl: bool,
    ) -> Any:  # fmt: skip
        """Triton's own launch; the kernel that it compiled or knew."""
        options = {"num_stages": stages} if stages is not None else {}
        options |= {"maxnreg": registers} if registers else {}
        return self._kernel[grid](*tensors, *numbers, *constants, num_warps=warps, launch_pdl=pdl, **options)
