"""From a model folder and settings to a machine and its memory; and how much of what would fit where."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from attrs import Attribute, evolve, field, frozen

from agentinfer.errors import InvalidSetting
from agentinfer.graphs import bucket_sizes, capture, replaying
from agentinfer.judging import MODES, RAW
from agentinfer.models.checkpoint import open_checkpoint
from agentinfer.models.fp8 import DEQUANTIZE, FP8, NATIVE
from agentinfer.models.model import Model, dummy_model, held, kv_layout, load_model, read_config, stored_dtype
from agentinfer.ops.choose import choose, choose_traced
from agentinfer.ops.comm import Ranks, alone
from agentinfer.ops.compiled import compiled_layer
from agentinfer.ops.edit import no_tables
from agentinfer.ops.kv import Donated, KvLayout, allocate, bytes_per_token, num_blocks_that_fit
from agentinfer.ops.provide import Ops
from agentinfer.state.ids import cdiv
from agentinfer.state.limits import Limits, instance, integer
from agentinfer.state.policy import POLICIES, Policy
from agentinfer.steps import Device, Machine, new_last
from agentinfer.trial import trial_steps, try_step, warmed

_log = logging.getLogger(__name__)

GIB: Final = 1 << 30
CPU_KV_GIB: Final = 2.0
"""KV memory on a CPU, unless told: nobody can say how much of its memory is free for us."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def _one_of(*names: str | None) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: object) -> None:
        if value not in names:
            raise InvalidSetting(attribute.name, f"{value!r} is none of {', '.join(filter(None, names))}")

    return check


def _between(low: float, high: float, *, open_low: bool) -> Any:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (open_low and value == low):
            raise InvalidSetting(
                attribute.name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], not {value!r}"
            )

    return check


@frozen
class Settings:
    """What a user can choose about an engine. Raises InvalidSetting naming the field."""

    dtype: str | None = field(default=None, validator=_one_of(None, *DTYPES))
    """Of weights and KV; None: the checkpoint's."""
    device: str = field(default="auto", validator=instance(str))
    """"auto": cuda if there is one, else cpu."""
    policy: str = field(default="throughput", validator=_one_of(*POLICIES))
    block_size: int = field(default=16, validator=integer(1))
    num_blocks: int | None = field(default=None, validator=integer(1, optional=True))
    """KV blocks; None: as many as fit."""
    max_model_len: int | None = field(default=None, validator=integer(1, optional=True))
    """Tokens of the longest sequence; None: the model's longest, or what KV has room for, which a warning says."""
    max_num_seqs: int = field(default=64, validator=integer(1))
    max_num_batched_tokens: int = field(default=2048, validator=integer(1))
    kv_utilization: float = field(default=0.85, validator=_between(0, 1, open_low=True))
    """Share of the free memory, less the reserve, that KV takes on a GPU."""
    reserve_gib: float = field(default=2.0, validator=_between(0, 1e6, open_low=False))
    """GiB that are left alone on a GPU, for activations."""
    kv_gib: float | None = field(default=None, validator=_between(0, 1e6, open_low=True))
    """GiB of KV, instead of the rule."""
    prefix_cache: bool = field(default=True, validator=instance(bool))
    overlap: bool = field(default=True, validator=instance(bool))
    ops: str = field(default="auto", validator=instance(str))
    """Who computes: the name of a provider (agentinfer env lists them); "auto": the best one that is there."""
    eager: bool = field(default=False, validator=instance(bool))
    """No captured graphs."""
    compile: bool = field(default=False, validator=instance(bool))
    """Layers are one function that torch.compile made, in captured graphs and out of them."""
    dummy_weights: bool = field(default=False, validator=instance(bool))
    """Weights drawn at random, of a folder that need hold nothing but config.json."""
    fp8: str = field(default=DEQUANTIZE, validator=_one_of(*FP8))
    """How the matrices of an fp8 checkpoint are held: "dequantize", in `dtype`; "native", in 8 bits with their scales,
    half the memory. Then activations are rounded to 8 bits, too, in products of many rows (docs/design/gpu.md).
    """
    ep: bool = field(default=False, validator=instance(bool))
    """Experts are spread over the ranks, each whole on one of them, instead of each being cut by width."""
    max_logprobs: int = field(default=20, validator=integer(0))
    """Likeliest tokens that a request may be told of beside each of its own."""
    logprobs_mode: str = field(default=RAW, validator=_one_of(*MODES))
    """Log-probabilities of what: "raw_logprobs", the model's own distribution; "processed_logprobs", the one that a
    token was drawn from, after all that its request asks for.
    """
    seed: int | None = field(default=None, validator=integer(0, 2**63 - 1, optional=True))
    """The engine's seed (Limits.seed); None: a fresh one."""


def build(
    folder: Path,
    settings: Settings,
    eos_ids: tuple[int, ...],
    policy: Policy | None = None,
    ops: Ops | None = None,
    ranks: Ranks | None = None,
) -> tuple[Machine, Device]:
    """Load the model in *folder* and allocate its KV memory: this rank's part of *ranks*, all of which call this.

    *eos_ids*: the tokens that end a sequence, besides the model's own. *policy*: a function instead of a name.
    *ranks*: None is one rank, on the device of the settings.
    Raises CheckpointError for the folder, InvalidSetting for the settings.
    """
    ranks = alone(device_of(settings.device), ep=settings.ep) if ranks is None else ranks
    device = ranks.device
    try:
        return _build(folder, settings, eos_ids, policy, ops, ranks)
    except torch.OutOfMemoryError as error:
        raise InvalidSetting(
            "kv_utilization",
            f"{device} ran out of memory at start ({str(error).split('.', 1)[0]}). Lower kv_utilization, "
            "max_num_batched_tokens, max_num_seqs or max_model_len, or raise reserve_gib",
        ) from error


def _build(
    folder: Path, settings: Settings, eos_ids: tuple[int, ...], policy: Policy | None, ops: Ops | None, ranks: Ranks
) -> tuple[Machine, Device]:
    device = ranks.device
    chosen = held(evolve(read_config(folder), dtype=dtype_of(folder, settings)), settings.fp8)
    if not settings.dummy_weights:
        open_checkpoint(folder)  # what is wrong with the weights is said before what is wrong with sizes
    layouts = _layouts(chosen, settings, ranks)
    limits = _limits(chosen, settings, eos_ids, layouts, _memory(settings, device))
    if ops is None:
        heads = chosen.shape_on(ranks.tp.size, ep=ranks.ep)
        site = (settings.ops, device, layouts[0].dtype, heads, settings.block_size)
        scaled = settings.fp8 == NATIVE
        ops = choose_traced(*site, scaled=scaled) if settings.compile else choose(*site, scaled=scaled)[0]
    load = dummy_model if settings.dummy_weights else load_model
    model, weights = load(folder, chosen.dtype, ranks, limits.max_model_len, settings.fp8)
    machine = Machine(
        model=model,
        weights=weights,
        ops=ops,
        ranks=ranks,
        limits=limits,
        policy=POLICIES[settings.policy] if policy is None else policy,
        overlap=settings.overlap,
        logprobs_mode=settings.logprobs_mode,
    )
    _done("weights", device)
    if settings.compile:
        machine = compiled(machine, layouts)
        _done("compile", device)
    capturing = device.type == "cuda" and not settings.eager and ops.sample_rows is not None
    if device.type == "cuda":  # now it shows what is left
        taken = working_memory(machine, layouts, graphs=capturing)
        memory = _memory(settings, device, taken)
        machine = evolve(machine, limits=_limits(model, settings, eos_ids, layouts, memory))
    machine = evolve(machine, limits=_agreed(machine.limits, ranks))
    if ranks.tp.rank == 0:
        _tell_length(machine.limits.max_model_len, model, settings)
    placed = new_device(machine.limits, layouts, device)
    _done("kv", device)
    if capturing:
        graphs, placed = capture(machine, placed, bucket_sizes(machine.limits.max_num_seqs))
        machine = replaying(machine, graphs)
    _done("capture", device)
    if device.type == "cuda":
        placed = warmed(machine, placed)
    return machine, placed


def _agreed(limits: Limits, ranks: Ranks) -> Limits:
    """The *limits* of all ranks: the blocks and the length that each of them has room for, and rank 0's seed."""
    if ranks.tp.size == 1:
        return limits
    own = torch.tensor([limits.num_blocks, limits.max_model_len, limits.seed], dtype=torch.int64, device=ranks.device)
    each = cast(list[int], ranks.tp.all_gather_last_dim(own).tolist())
    return evolve(limits, num_blocks=min(each[::3]), max_model_len=min(each[1::3]), seed=each[2])


def _done(phase: str, device: torch.device) -> None:
    """Tell who times the start that *phase* is over."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _log.info("%s: done", phase, extra={"phase": phase})


def compiled(m: Machine, layouts: tuple[KvLayout, ...], backend: Any = "inductor") -> Machine:
    """*m*, whose layers are one function compiled by *backend* (of torch.compile): for one position and for several, so
    that no step compiles anything later.

    Raises InvalidSetting if it can not be compiled, or not run.
    """
    if m.ops.traced is None:
        raise InvalidSetting("compile", f"{m.ops.name}: torch.compile can not trace these ops whole")
    heads = m.model.shape_on(m.ranks.tp.size, ep=m.ranks.ep)
    wrap = partial(compiled_layer, traced=m.ops.traced, shape=heads, backend=backend)
    m = evolve(m, model=evolve(m.model, forward=m.model.forward_through(wrap)))
    placed = new_device(evolve(m.limits, num_blocks=2, max_num_seqs=2), layouts, m.ranks.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's of itself
            warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)  # float32 is float32 here
            for rows in (2, 1):
                placed = try_step(m, placed, 0, [1] * rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = shorten(f"{type(error).__name__}: {error}", 400)
        raise InvalidSetting("compile", f"torch.compile failed: {why}") from error
    return m


def new_device(limits: Limits, layouts: tuple[KvLayout, ...], device: torch.device) -> Device:
    """KV memory, block tables and last tokens of a device that has not stepped yet."""
    columns = cdiv(limits.max_model_len, limits.block_size)
    kv = allocate(layouts, limits.num_blocks, limits.max_num_seqs, columns, device)
    return Device(kv, new_last(limits, device), no_tables(limits.vocab_size, device))


def working_memory(m: Machine, layouts: tuple[KvLayout, ...], *, graphs: bool) -> int:
    """Bytes of the device that steps need beside weights and KV, measured: the worst prefill, with sampling, and the
    captured graphs. What is compiled on first use is compiled after it.
    """
    device, limits = m.ranks.device, m.limits
    blocks = cdiv(limits.max_num_batched_tokens, limits.block_size) + 2 * limits.max_num_seqs
    m = evolve(m, limits=evolve(limits, num_blocks=blocks))
    placed = new_device(m.limits, layouts, device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for start, counts in trial_steps(limits):
        placed = try_step(m, placed, start, counts)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    if graphs:
        more, placed = _graph_memory(m, placed)
        taken += more
    del placed
    torch.cuda.empty_cache()
    return taken


def _graph_memory(m: Machine, placed: Donated[Device]) -> tuple[int, Device]:
    """Bytes of all graphs: of the largest, measured, and of the logits that each of the others keeps."""
    sizes = bucket_sizes(m.limits.max_num_seqs)
    before = torch.cuda.memory_reserved(m.ranks.device)
    graphs, placed = capture(m, placed, sizes[-1:])
    largest = torch.cuda.memory_reserved(m.ranks.device) - before
    logits = graphs[sizes[-1]].logits_RV
    return largest + sum(sizes[:-1]) * logits.shape[1] * logits.itemsize, placed


def device_of(name: str) -> torch.device:
    """The device of Settings.device. Raises InvalidSetting."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSetting("device", f"{name!r} is no device: cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidSetting("device", f"{name!r} is not supported: cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting("device", f"{name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def dtype_of(folder: Path, settings: Settings) -> torch.dtype:
    """The dtype that was asked for, else config.json's, else that of the stored weights. Raises InvalidSetting."""
    name = settings.dtype
    if name is None:
        known = read_config(folder).dtype
        if known is None and settings.dummy_weights:
            raise InvalidSetting("dtype", f"{folder} names none, so it must be given with dummy weights")
        return known or stored_dtype(folder)
    if name not in DTYPES:
        raise InvalidSetting("dtype", f"{name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def _layouts(model: Model, settings: Settings, ranks: Ranks) -> tuple[KvLayout, ...]:
    return kv_layout(model, ranks.tp.size, settings.block_size)


def _limits(
    model: Model,
    settings: Settings,
    eos_ids: tuple[int, ...],
    layouts: tuple[KvLayout, ...],
    memory: tuple[int, int, float, str],
) -> Limits:
    """The sizes of the engine. *memory*: what `_memory` gives."""
    most = model.config.max_positions
    length = most if settings.max_model_len is None else settings.max_model_len
    if length > most:
        raise InvalidSetting("max_model_len", f"{length!r}; the model is made for 1 to {most} tokens")
    blocks = settings.num_blocks
    if blocks is None:
        blocks, length = _fitting(settings, layouts, memory, length)
    seed = secrets.randbits(62) if settings.seed is None else settings.seed
    return Limits(
        block_size=settings.block_size,
        num_blocks=blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=length,
        vocab_size=model.config.vocab_size,
        eos_ids=tuple(sorted({*model.config.eos_ids, *eos_ids})),
        prefix_cache=settings.prefix_cache,
        max_logprobs=settings.max_logprobs,
        seed=seed,
    )


def _fitting(
    settings: Settings, layouts: tuple[KvLayout, ...], memory: tuple[int, int, float, str], longest: int
) -> tuple[int, int]:
    """KV blocks, and tokens of the longest sequence: *longest*, or what the blocks hold if nobody set it."""
    free, reserve, share, setting = memory
    size, of_block = settings.block_size, bytes_per_token(layouts) * settings.block_size
    fit = partial(
        num_blocks_that_fit, free=free, reserve=reserve, utilization=share, bytes_per_block=of_block, setting=setting
    )
    if settings.max_model_len is None:
        longest = min(longest, fit() * size)
    per_request = cdiv(longest, size)
    most = None if settings.prefix_cache else settings.max_num_seqs * per_request
    return fit(blocks_per_request=per_request, most=most), longest


def _tell_length(length: int, model: Model, settings: Settings) -> None:
    """Warn that sequences can not be as long as the model is made for, unless they were asked to be shorter."""
    if settings.max_model_len is None and length < model.config.max_positions:
        words = "max_model_len is %d, all that KV has room for; the model is made for %d (more memory for KV: kv_gib)"
        _log.warning(words, length, model.config.max_positions)


def _memory(settings: Settings, device: torch.device, taken: int | None = None) -> tuple[int, int, float, str]:
    """(bytes free, bytes to leave, share of the rest) for KV, and the setting that decides.

    *taken*: what steps need; None: the weights are still to come.
    """
    if settings.kv_gib is not None:
        return int(settings.kv_gib * GIB), 0, 1.0, "kv_gib"
    if device.type == "cpu":
        return int(CPU_KV_GIB * GIB), 0, 1.0, "kv_gib"
    free, total = torch.cuda.mem_get_info(device)
    reserve = int(settings.reserve_gib * GIB)
    left = total if taken is None else max(0, free - taken)
    return left, reserve, settings.kv_utilization, "kv_utilization"
