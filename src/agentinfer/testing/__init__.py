"""Test a scheduler, or a policy of your own, without a device: see `check_policy` and docs/testing-a-scheduler.md.

Needs Hypothesis, and nothing of the package but `state`.
"""

from __future__ import annotations

from agentinfer.testing.books import Promises
from agentinfer.testing.drive import Drive
from agentinfer.testing.ghost import Fault, GhostDevice, GhostFlight, Script
from agentinfer.testing.machine import RESERVE, THROUGHPUT, EngineMachine, check_policy, engine_machine
from agentinfer.testing.oracle import Answer, answer
from agentinfer.testing.strategies import limits, policies, requests

__all__ = [
    "RESERVE",
    "THROUGHPUT",
    "Answer",
    "Drive",
    "EngineMachine",
    "Fault",
    "GhostDevice",
    "GhostFlight",
    "Promises",
    "Script",
    "answer",
    "check_policy",
    "engine_machine",
    "limits",
    "policies",
    "requests",
]
