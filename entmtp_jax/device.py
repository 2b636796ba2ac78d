"""Which device this is, for costs and thresholds that hold on one device only."""

import os
import platform

import jax


def device_name() -> str:
    """Name of the default device; of a CPU with its model and the cores this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()} ({cores} cores)"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
