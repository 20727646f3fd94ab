"""Random programs against both policies, with and without overlap: the engine machine of agentinfer.testing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from agentinfer.state.policy import reserve, throughput
from agentinfer.testing import engine_machine

PROFILE = settings()
SETTINGS = settings(PROFILE, max_examples=max(PROFILE.max_examples // 4, 1), suppress_health_check=list(HealthCheck))
"""A quarter of the profile's examples each: together they are its number of programs."""

TestThroughput = engine_machine(throughput).TestCase
TestThroughputOverlapped = engine_machine(throughput, overlap=True).TestCase
TestReserve = engine_machine(reserve).TestCase
TestReserveOverlapped = engine_machine(reserve, overlap=True).TestCase
for kind in (TestThroughput, TestThroughputOverlapped, TestReserve, TestReserveOverlapped):
    kind.settings = SETTINGS
del kind  # or it would be collected once more
