"""A whole decode step of one row in one kernel: `kernels/persistent`, compiled for the model at hand by NVRTC.

Everything else (several rows, prefill, sampling) is Triton's. The launch is cooperative, because each multiprocessor
must run a block at the same time; a graph can capture it. A step in which a block waits longer than a second for
another gives NaN for logits, so that it fails as one whose logits are not finite does; `where_late` says where.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from attrs import evolve, frozen
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops.attention import HeadShape
from agentinfer.ops.comm import Group
from agentinfer.ops.inputs import Inputs
from agentinfer.ops.kv import LayerKv
from agentinfer.ops.provide import Ops

SHARED_BYTES: Final = 232448
"""Of a block on compute capability 9.0: all that there is."""
THREADS: Final = 288
"""Of a block: a warp that feeds, eight that multiply."""
SECOND: Final = 1_000_000_000
LAST: Final = (1 << 31) - 1
MOST_WIDTH: Final = 20480
"""Of a vector: what is wider does not fit the registers of a block."""
MOST_HEADS: Final = 64
"""Numbers of all query heads that a block gathers at most."""
WEIGHTS: Final = (
    "attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "ffn_norm", "gate_up", "gate_up_bias", "down",
    "down_bias",
)  # fmt: skip
"""Of a layer, in the kernel's order; its keys and values follow."""
PHASES: Final = ("", "qkv", "parts of heads", "heads", "attention's output", "activation", "down")
"""What blocks send each other in a layer, by the kernel's numbers."""


@frozen(eq=False)
class Mailbox:
    """The memory by which the blocks of a step know of each other. Of one stream at a time."""

    boxes: Tensor
    """[packets] int64."""
    control: Tensor
    """[4] int32: number of the step, blocks that are done with it, where a wait first took too long, unused."""
    ticks: Tensor
    """[blocks, layers, 12] int64: with TICKS, the cycle at which each phase of a layer began; else nothing."""


@frozen(eq=False)
class Program:
    """The kernel for one model's weights."""

    weights: Any
    macros: Mapping[str, int]
    function: Any
    """As the driver names it."""
    mailbox: Mailbox
    params: ctypes.Structure
    """The kernel's parameters; a call sets those that are its own."""


def share_of(width: int) -> int:
    """How many of the eight warps share a row of *width* weights."""
    chunks = -(-width // 256)
    return 8 if chunks >= 16 else 4 if chunks > 12 else 2 if chunks >= 8 else 1


def widths_of(w: Any, heads: HeadShape) -> tuple[int, int, int]:
    """Numbers of the residual, of an activation, and of all query heads of the weights *w* of a dense decoder."""
    return w.embed.shape[1], w.layers[0].down.shape[1], heads.num_heads * heads.head_dim


def unfit(w: Any, heads: HeadShape, windows: Sequence[int | None], ranks: int, grid: int) -> str | None:
    """Why *grid* multiprocessors have no program for the weights *w* of a dense decoder; None if they have."""
    hidden, inter, rows = widths_of(w, heads)
    for name, width in (("hidden_size", hidden), ("intermediate_size", inter)):
        if width % 8 or not 64 <= width <= MOST_WIDTH:
            return f"{name} {width} is no multiple of 8 from 64 to {MOST_WIDTH}"
    if ranks > 1:
        return f"one rank only, not {ranks}"
    if rows > MOST_HEADS * grid or heads.num_kv_heads > grid:
        return f"{heads.num_heads} heads of {heads.head_dim} are too many for {grid} multiprocessors"
    if any(window is not None for window in windows):
        return "no sliding windows yet"
    return None


def macros(
    w: Any, heads: HeadShape, grid: int, shared: int = SHARED_BYTES, changes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """What the kernel is compiled for on *grid* multiprocessors, with *shared* bytes of shared memory a block.

    A slot of the ring has 32 KB, or the longest row where two do not fit that. *changes*: to measure others.
    """
    hidden, inter, rows = widths_of(w, heads)
    qkv = rows + 2 * heads.num_kv_heads * heads.head_dim
    longest = 2 * max(hidden, inter, rows)
    slot = -(-longest // 512) * 512 if longest > 16384 else 32768

    def most(n: int) -> int:
        return 2 * -(-n // (2 * grid))

    head = 256 if share_of(hidden) < 8 else 128
    parts = max(
        share_of(hidden) * max(head, most(qkv), 2 * most(inter)),
        max(share_of(rows), share_of(inter)) * most(hidden),
    )
    return {
        "HIDDEN": hidden, "INTER": inter, "HEADS": heads.num_heads, "KV_HEADS": heads.num_kv_heads,
        "DIM": heads.head_dim, "VOCAB": len(w.head), "LAYERS": len(w.layers), "GRID": grid,
        "SPLITS": grid // heads.num_kv_heads, "SLOT": slot, "PARTS": parts, "SHARED": shared,
        "FIRST": 1, "TICKS": 0, **changes,
    }  # fmt: skip


def num_boxes(m: Mapping[str, int]) -> int:
    """Packets of all vectors, in whole chunks where eight warps may share one, and of the splits of heads."""
    heads, splits = m["HEADS"] * m["DIM"], m["SPLITS"]
    vectors = sum(-(-n // 256) * 128 for n in (heads, m["HIDDEN"], m["INTER"], m["HIDDEN"]))
    return (heads + 2 * m["KV_HEADS"] * m["DIM"]) // 2 + vectors + splits * (heads + m["HEADS"])


@cache
def params_type(layers: int) -> type[ctypes.Structure]:
    """`Params` of the kernel, for so many layers."""
    words = (
        "embed", "norm", "head", "cos_sin", "ids", "slots", "rows", "context", "table", "logits", "boxes", "control",
        "ticks", "limit_ns",
    )  # fmt: skip

    class Params(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_uint64) for name in words),
            ("columns", ctypes.c_int64),
            ("block", ctypes.c_int64),
            ("eps", ctypes.c_float),
            ("scale", ctypes.c_float),
            ("lose", ctypes.c_uint32),
            ("unused", ctypes.c_uint32),
            ("layers", ctypes.c_uint64 * ((len(WEIGHTS) + 2) * layers)),
        )

    return Params


def new_params(w: Any, mailbox: Mailbox, eps: float, scale: float, limit_ns: int, lose: int) -> Any:
    """The kernel's parameters as far as the weights *w* and the mailbox say."""
    params: Any = params_type(len(w.layers))()
    for name in ("embed", "norm", "head", "cos_sin"):
        setattr(params, name, getattr(w, name).data_ptr())
    params.boxes, params.control = mailbox.boxes.data_ptr(), mailbox.control.data_ptr()
    params.ticks = mailbox.ticks.data_ptr()
    params.limit_ns, params.eps, params.scale, params.lose = limit_ns, eps, scale, lose
    each = len(WEIGHTS) + 2
    for i, layer in enumerate(w.layers):
        for j, name in enumerate(WEIGHTS):
            weight = getattr(layer, name)
            params.layers[i * each + j] = 0 if weight is None else weight.data_ptr()
    return params


def fill(params: Any, kv: Sequence[LayerKv], x: Inputs, logits_1V: Tensor) -> None:
    """The rest: one step's own."""
    for name in ("ids", "slots", "rows", "context", "table"):
        setattr(params, name, getattr(x, name).data_ptr())
    params.logits, params.columns, params.block = logits_1V.data_ptr(), x.table.stride(0), kv[0].layout.block_size
    each = len(WEIGHTS) + 2
    for i, layer in enumerate(kv):
        params.layers[i * each + each - 2] = layer.k.data_ptr()
        params.layers[i * each + each - 1] = 0 if layer.v is None else layer.v.data_ptr()


def sources() -> dict[str, str]:
    """The kernel's files; `step.cu` includes the others."""
    folder = files("agentinfer.ops").joinpath("kernels", "persistent")
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}


def _bindings(name: str) -> Any:
    """A module of cuda-bindings, which torch brings with it where it has CUDA."""
    return import_module(f"cuda.bindings.{name}")


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA bindings gives after its status. Raises RuntimeError."""
    status, *rest = result
    if int(status):
        raise RuntimeError(f"{what}: {status.name}")
    return rest[0] if rest else None


def compiled(texts: Mapping[str, str], values: Mapping[str, int]) -> bytes:
    """Machine code for compute capability 9.0. Raises RuntimeError with the compiler's words."""
    nvrtc = _bindings("nvrtc")
    names = [name.encode() for name in texts]
    bodies = [text.encode() for text in texts.values()]
    created = nvrtc.nvrtcCreateProgram(texts["step.cu"].encode(), b"step.cu", len(names), bodies, names)
    made = _checked("nvrtcCreateProgram", created)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--use_fast_math"]
    options += [f"-D{name}={value}".encode() for name, value in values.items()]
    (status,) = nvrtc.nvrtcCompileProgram(made, len(options), options)
    if int(status):
        size = _checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(made))
        words = b" " * size
        _checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(made, words))
        raise RuntimeError(f"the persistent kernel does not compile: {words.decode(errors='replace')}")
    size = _checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(made))
    code = b" " * size
    _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(made, code))
    _checked("nvrtcDestroyProgram", nvrtc.nvrtcDestroyProgram(made))
    return code


def loaded(code: bytes) -> Any:
    """The kernel in *code*, on the current device; with all the shared memory that a block can have."""
    driver = _bindings("driver")
    module = _checked("cuModuleLoadData", driver.cuModuleLoadData(code))
    function = _checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, b"decode_step"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, SHARED_BYTES))
    fitting = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, THREADS, SHARED_BYTES)
    if _checked("cuOccupancyMaxActiveBlocksPerMultiprocessor", fitting) < 1:
        raise InvalidSetting("ops", "persistent: a block of its kernel does not fit a multiprocessor of this device")
    return function


def new_mailbox(values: Mapping[str, int], device: torch.device) -> Mailbox:
    """An empty one."""
    boxes = torch.zeros(num_boxes(values), dtype=torch.int64, device=device)
    control = torch.zeros(4, dtype=torch.int32, device=device)
    shape = (values["GRID"] * values["TICKS"], values["LAYERS"], 12)
    return Mailbox(boxes, control, torch.zeros(shape, dtype=torch.int64, device=device))


class RowKernel:
    """Ops.row_step by the persistent kernel. Mutable: remembers the programs that it has compiled."""

    __slots__ = ("_changes", "_grid", "_limit_ns", "_lose", "programs")

    def __init__(self, grid: int, limit_ns: int, lose: int, changes: Mapping[str, int]) -> None:
        self._grid, self._limit_ns, self._lose, self._changes = grid, limit_ns, lose, changes
        self.programs: dict[int, Program] = {}

    def __call__(
        self, w: Any, heads: HeadShape, windows: Sequence[int | None], eps: float, scale: float, tp: Group,
        kv: Sequence[LayerKv], x: Inputs,
    ) -> Tensor:  # fmt: skip
        """As Ops.row_step. The first call for some weights compiles; it must not be captured."""
        program = self.programs.get(id(w))
        if program is None:
            problem = unfit(w, heads, windows, tp.size, self._grid)
            if problem is not None:
                raise InvalidSetting("ops", f"persistent: {problem}")
            program = self._program(w, macros(w, heads, self._grid, changes=self._changes), eps, scale)
            self.programs[id(w)] = program
        logits = torch.empty((1, program.macros["VOCAB"]), dtype=torch.float32, device=x.ids.device)
        fill(program.params, kv, x, logits)
        launch(program, torch.cuda.current_stream(x.ids.device).cuda_stream)
        return logits

    def _program(self, w: Any, values: Mapping[str, int], eps: float, scale: float) -> Program:
        mailbox = new_mailbox(values, w.embed.device)
        params = new_params(w, mailbox, eps, scale, self._limit_ns, self._lose)
        function = loaded(compiled(sources(), values))
        torch.cuda.synchronize(w.embed.device)  # the mailbox is empty, whatever stream a step comes on
        return Program(w, MappingProxyType(dict(values)), function, mailbox, params)


def launch(program: Program, stream: int) -> None:
    """Run *program* on a CUDA stream, all blocks at once or none. Raises RuntimeError."""
    driver = _bindings("driver")
    params = ((program.params,), (None,))
    grid = program.macros["GRID"]
    result = driver.cuLaunchCooperativeKernel(
        program.function, grid, 1, 1, THREADS, 1, 1, SHARED_BYTES, driver.CUstream(stream), params
    )
    _checked("cuLaunchCooperativeKernel", result)


def where_late(mailbox: Mailbox) -> str | None:
    """The layer and what was awaited in it when a wait first took too long; None: none has. Waits for the device."""
    found = int(mailbox.control[2])
    layer, phase = divmod(LAST - found, 256)
    return f"layer {layer}: {PHASES[phase]}" if found else None


def persistent_ops(
    ops: Ops,
    device: torch.device,
    *,
    limit_ns: int = SECOND,
    lose: int = 0,
    changes: Mapping[str, int] = MappingProxyType({}),
) -> Ops:
    """*ops*, with steps of one row done by the persistent kernel on all multiprocessors of *device*.

    *limit_ns*: how long a step may wait for its blocks. *lose*: which of PHASES loses a packet, to see what happens.
    *changes*: as in `macros`.
    """
    grid: int = cast(Any, torch.cuda).get_device_properties(device).multi_processor_count
    return evolve(ops, name="persistent", row_step=RowKernel(grid, limit_ns, lose, changes))
