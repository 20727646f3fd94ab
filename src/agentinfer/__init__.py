"""Language model inference as a library: explicit state, pure transitions, honest mutation of tensors.

The public names. Each is imported when it is first asked for, so `import agentinfer` imports nothing else, and what
needs no torch (requests, states, policies, `schedule`, `commit`, `replay`) never waits for it.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agentinfer.build import Settings
    from agentinfer.errors import (
        AgentInferError,
        CheckpointError,
        GraphBinding,
        InvalidRequest,
        InvalidSetting,
        StaleHandle,
    )
    from agentinfer.find import find_model
    from agentinfer.loop import Engine, generate, open_engine, run, start, stream
    from agentinfer.memory import MemoryPlan, memory_plan
    from agentinfer.models.model import Model, load_model, read_config
    from agentinfer.ops.comm import RankLost, Ranks, alone
    from agentinfer.ops.inputs import Inputs, stage
    from agentinfer.ops.kv import KvCache
    from agentinfer.ops.provide import Ops, reference
    from agentinfer.ops.sample import sample
    from agentinfer.ranks import open_ranks
    from agentinfer.result import Completion, Delta, Result
    from agentinfer.scoring import Score, score
    from agentinfer.state.admit import abort, arrive, fits, fork, validate
    from agentinfer.state.blocks import BlockPool
    from agentinfer.state.check import violations
    from agentinfer.state.columns import Columns
    from agentinfer.state.commit import commit, flush
    from agentinfer.state.engine import EngineState, digest, has_work, initial, status, tokens_of
    from agentinfer.state.event import (
        Aborted,
        Arrived,
        Event,
        Failed,
        Forked,
        Landed,
        Raised,
        Stepped,
        Stopped,
        Swapped,
    )
    from agentinfer.state.history import Forecast, Moment, diff, ended, explain, fold, forecast, replay, rewind, step
    from agentinfer.state.ids import BlockId, Row, SeqId
    from agentinfer.state.limits import Limits
    from agentinfer.state.logprobs import TokenLogprobs
    from agentinfer.state.plan import Output, Plan, Sampled, SamplingColumns, sampled
    from agentinfer.state.policy import POLICIES, Policy, Turn, reserve, throughput
    from agentinfer.state.request import Request, SamplingParams
    from agentinfer.state.schedule import full_tables, rebase, schedule
    from agentinfer.state.sequence import Finished, Running, Waiting
    from agentinfer.state.structured import StructuredOutputsParams
    from agentinfer.state.trace import Trace, encode_event, encode_header, read_trace, verify
    from agentinfer.steps import Device, Flight, Machine, decode_step, finish, land, launch, prefill_step
    from agentinfer.swap import swap_weights
    from agentinfer.text import Text, chat, decode, encode, load_text
    from agentinfer.turn import World, advance

__version__: Final = "0.1.0"

_NAMES: Final = MappingProxyType(
    {
        "errors": "AgentInferError CheckpointError GraphBinding InvalidRequest InvalidSetting StaleHandle",
        "state.ids": "BlockId Row SeqId",
        "state.limits": "Limits",
        "state.request": "Request SamplingParams",
        "state.structured": "StructuredOutputsParams",
        "state.sequence": "Finished Running Waiting",
        "state.columns": "Columns",
        "state.blocks": "BlockPool",
        "state.logprobs": "TokenLogprobs",
        "state.plan": "Output Plan Sampled SamplingColumns sampled",
        "state.event": "Aborted Arrived Event Failed Forked Landed Raised Stepped Stopped Swapped",
        "state.engine": "EngineState digest has_work initial status tokens_of",
        "state.admit": "abort arrive fits fork validate",
        "state.policy": "POLICIES Policy Turn reserve throughput",
        "state.schedule": "full_tables rebase schedule",
        "state.commit": "commit flush",
        "state.history": "Forecast Moment diff ended explain fold forecast replay rewind step",
        "state.trace": "Trace encode_event encode_header read_trace verify",
        "state.check": "violations",
        "ops.comm": "RankLost Ranks alone",
        "ops.kv": "KvCache",
        "ops.inputs": "Inputs stage",
        "ops.provide": "Ops reference",
        "ops.sample": "sample",
        "models.model": "Model load_model read_config",
        "steps": "Device Flight Machine decode_step finish land launch prefill_step",
        "build": "Settings",
        "memory": "MemoryPlan memory_plan",
        "find": "find_model",
        "text": "Text chat decode encode load_text",
        "result": "Completion Delta Result",
        "ranks": "open_ranks",
        "scoring": "Score score",
        "turn": "World advance",
        "swap": "swap_weights",
        "loop": "Engine generate open_engine run start stream",
    }
)
"""The module of each public name, below this package."""

__all__ = [
    "POLICIES",
    "Aborted",
    "AgentInferError",
    "Arrived",
    "BlockId",
    "BlockPool",
    "CheckpointError",
    "Columns",
    "Completion",
    "Delta",
    "Device",
    "Engine",
    "EngineState",
    "Event",
    "Failed",
    "Finished",
    "Flight",
    "Forecast",
    "Forked",
    "GraphBinding",
    "Inputs",
    "InvalidRequest",
    "InvalidSetting",
    "KvCache",
    "Landed",
    "Limits",
    "Machine",
    "MemoryPlan",
    "Model",
    "Moment",
    "Ops",
    "Output",
    "Plan",
    "Policy",
    "Raised",
    "RankLost",
    "Ranks",
    "Request",
    "Result",
    "Row",
    "Running",
    "Sampled",
    "SamplingColumns",
    "SamplingParams",
    "Score",
    "SeqId",
    "Settings",
    "StaleHandle",
    "Stepped",
    "Stopped",
    "StructuredOutputsParams",
    "Swapped",
    "Text",
    "TokenLogprobs",
    "Trace",
    "Turn",
    "Waiting",
    "World",
    "__version__",
    "abort",
    "advance",
    "alone",
    "arrive",
    "chat",
    "commit",
    "decode",
    "decode_step",
    "diff",
    "digest",
    "encode",
    "encode_event",
    "encode_header",
    "ended",
    "explain",
    "find_model",
    "finish",
    "fits",
    "flush",
    "fold",
    "forecast",
    "fork",
    "full_tables",
    "generate",
    "has_work",
    "initial",
    "land",
    "launch",
    "load_model",
    "load_text",
    "memory_plan",
    "open_engine",
    "open_ranks",
    "prefill_step",
    "read_config",
    "read_trace",
    "rebase",
    "reference",
    "replay",
    "reserve",
    "rewind",
    "run",
    "sample",
    "sampled",
    "schedule",
    "score",
    "stage",
    "start",
    "status",
    "step",
    "stream",
    "swap_weights",
    "throughput",
    "tokens_of",
    "validate",
    "verify",
    "violations",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"agentinfer.{module}"), name)
    raise AttributeError(f"module 'agentinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
