"""What stands beside the numbers: facts, peaks of memory, samples of a GPU's gauges."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

import agentinfer
from agentinfer.bench import watch
from agentinfer.bench.watch import find_nvml, gauges, peaks, sampled, surroundings, watched

CPU = torch.device("cpu")


class NVMLError(Exception):
    pass


def fake_nvml(*, broken: bool = False) -> ModuleType:
    """A pynvml of one GPU."""

    def init() -> None:
        if broken:
            raise NVMLError("Driver Not Loaded")

    def handle(uuid: str) -> str:
        assert uuid == "GPU-abc"
        return "handle"

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=init,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=97, memory=60),
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=123),
        nvmlDeviceGetPowerUsage=lambda h: 654_321,
        nvmlDeviceGetClockInfo=lambda h, kind: 1980,
        nvmlDeviceGetTemperature=lambda h, kind: 55,
    )


def test_surroundings_of_a_cpu() -> None:
    """The versions of what runs are there, as JSON data; packages that are not installed are not."""
    facts = json.loads(json.dumps(surroundings(CPU)))
    assert facts["agentinfer"] == agentinfer.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert "vllm" not in facts["versions"]
    assert facts["threads"] == torch.get_num_threads()


def test_peaks_of_a_cpu() -> None:
    """The peak of this process's memory is in bytes."""
    assert 50e6 < peaks(CPU)["host_peak_rss"] < 1e12


def test_watched_without_a_gpu() -> None:
    """Where there is no GPU, that is said in the place of the samples."""
    with watched(CPU, 0.2) as facts:
        assert facts == {}
    assert facts["utilisation"] == "no GPU"
    assert facts["memory"]["host_peak_rss"] > 0


def test_nvml_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, and a package without a driver, are told apart in words."""
    assert find_nvml("no_such_package") == (None, "nvidia-ml-py is not installed")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(broken=True))
    assert find_nvml() == (None, "NVML: Driver Not Loaded")
    nvml = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_nvml() == (nvml, "")


@pytest.mark.parametrize("uuid", ["abc", "GPU-abc"])
def test_gauges(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """The gauges are those of the GPU that torch calls by this index, in plain units."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    assert gauges(fake_nvml(), torch.device("cuda", 0))() == {
        "gpu_percent": 97,
        "memory_percent": 60,
        "memory_used_bytes": 123,
        "power_w": 654.3,
        "sm_mhz": 1980,
        "celsius": 55,
    }


def test_samples() -> None:
    """Samples are taken while the block runs and once at its end, and the thread is gone after it."""
    threads = threading.active_count()
    with sampled(lambda: {"x": 1.0}, 0.01) as samples:
        time.sleep(0.15)
    assert len(samples) >= 3
    assert all(sample["x"] == 1.0 for sample in samples)
    seconds = [sample["s"] for sample in samples]
    assert seconds == sorted(seconds)
    assert threading.active_count() == threads
    with sampled(lambda: {"x": 1.0}, 60) as samples:
        pass
    assert len(samples) == 1, "a short block has the sample of its end"


def test_a_gauge_that_fails_ends_the_samples_alone() -> None:
    """What a gauge raises does not reach the measurement."""
    reads = iter([{"x": 1.0}])
    with sampled(lambda: next(reads), 0.005) as samples:
        time.sleep(0.1)
    assert [set(sample) for sample in samples] == [{"s", "x"}, {"s"}]


def test_watched_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the peaks start anew and the samples are those of its gauges; without an interval there are none."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 8)
    monkeypatch.setattr(watch, "find_nvml", lambda: (object(), ""))
    monkeypatch.setattr(watch, "gauges", lambda nvml, device: lambda: {"gpu_percent": 50.0})
    with watched(torch.device("cuda", 0), 30) as facts:
        assert calls == ["reset"]
    assert [sample["gpu_percent"] for sample in facts["utilisation"]] == [50.0]
    assert (facts["memory"]["peak_allocated"], facts["memory"]["peak_reserved"]) == (7, 8)
    with watched(torch.device("cuda", 0), 0) as facts:
        pass
    assert facts["utilisation"] == "no samples were asked for"
    monkeypatch.setattr(watch, "find_nvml", lambda: (None, "nvidia-ml-py is not installed"))
    with watched(torch.device("cuda", 0), 30) as facts:
        pass
    assert facts["utilisation"] == "nvidia-ml-py is not installed"
