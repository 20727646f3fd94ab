"""What stands beside the numbers: the machine, versions, memory, utilisation; and a profiler's trace."""

from __future__ import annotations

import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, cast

import attrs
import torch
from attrs import frozen

import agentinfer
from agentinfer.build import Settings
from agentinfer.loop import Engine

PACKAGES: Final = ("torch", "triton", "vllm", "flash-attn", "numpy", "attrs", "rpds-py", "transformers", "tokenizers")


def surroundings(device: torch.device) -> dict[str, Any]:
    """The device, its driver, and the versions of all that could make a difference."""
    facts: dict[str, Any] = {
        "agentinfer": agentinfer.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in PACKAGES if (found := _installed(name)) is not None},
        "threads": torch.get_num_threads(),
        "device": platform.processor() or platform.machine(),
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        about = cast(Any, torch.cuda).get_device_properties(device)
        facts |= {
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "device_memory": about.total_memory,
        }
        nvml, why = find_nvml()
        facts["driver"] = why if nvml is None else nvml.nvmlSystemGetDriverVersion()
    return facts


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_nvml(name: str = "pynvml") -> tuple[Any, str]:
    """NVIDIA's management library, ready to be asked; (None, why) where it can not be."""
    try:
        nvml = import_module(name)
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    return nvml, ""


def gauges(nvml: Any, device: torch.device) -> Callable[[], dict[str, float]]:
    """What reads a GPU's gauges: utilisation of its SMs and memory, memory in use, power, SM clock, temperature."""
    uuid = str(cast(Any, torch.cuda).get_device_properties(device).uuid)
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def read() -> dict[str, float]:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return {
            "gpu_percent": rates.gpu,
            "memory_percent": rates.memory,
            "memory_used_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }

    return read


@contextmanager
def sampled(read: Callable[[], dict[str, float]], interval_s: float) -> Generator[list[dict[str, float]]]:
    """Samples of *read* while the block runs, one at its end included, from a thread; each with its second `s`.

    A gauge that fails ends the samples; the last of them then holds nothing but `s`.
    """
    samples: list[dict[str, float]] = []
    over = threading.Event()
    begin = time.perf_counter()

    def take() -> None:
        while True:
            last = over.wait(interval_s)
            sample = {"s": round(time.perf_counter() - begin, 3)}
            samples.append(sample)
            try:
                sample |= read()
            except Exception:  # noqa: BLE001 - whatever NVML says, it must not end a measurement
                return
            if last:
                return

    thread = threading.Thread(target=take, name="gauges", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


@contextmanager
def watched(device: torch.device, interval_s: float) -> Generator[dict[str, Any]]:
    """Facts about the block, complete at its end: peaks of memory, and utilisation or why there is none.

    *interval_s*: between two samples; 0: none are taken.
    """
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if device.type != "cuda" or not interval_s:
        nvml, why = None, "no samples were asked for" if device.type == "cuda" else "no GPU"
    else:
        nvml, why = find_nvml()
    if nvml is None:
        yield facts
        facts["utilisation"] = why
    else:
        with sampled(gauges(nvml, device), interval_s) as samples:
            yield facts
        facts["utilisation"] = samples
    facts["memory"] = peaks(device)


def peaks(device: torch.device) -> Mapping[str, int]:
    """The most bytes in use: by torch's allocator on a GPU, and by this process on the host."""
    unit = 1 if sys.platform == "darwin" else 1 << 10
    found = {"host_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        found["peak_allocated"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved"] = torch.cuda.max_memory_reserved(device)
    return found


@frozen
class Profile:
    """Where torch's profiler writes a trace of some steps, after what is measured. Calling it does the steps."""

    file: Path
    device: torch.device
    steps: int = 16

    def __call__(self, act: Callable[[], object], times: int | None = None) -> None:
        """Do *act* *times* times (default: `steps`) under the profiler, and write the trace."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with profile(activities=kinds) as trace:
            for _ in range(self.steps if times is None else times):
                act()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        trace.export_chrome_trace(str(self.file))


def engine_facts(engine: Engine, settings: Settings) -> Iterator[tuple[str, Any]]:
    """What the numbers are of: model, provider of kernels, settings, limits."""
    machine = engine.machine
    yield "model", machine.model.name
    yield "dtype", str(machine.model.dtype).removeprefix("torch.")
    yield "ops", machine.ops.name
    yield "settings", attrs.asdict(settings)
    yield "limits", attrs.asdict(machine.limits)
