"""What the NVIDIA driver knows of a GPU and torch does not say, asked through cuda-python."""

from __future__ import annotations

from typing import Any, NamedTuple


class GpuFacts(NamedTuple):
    """Of one GPU. ``clock_mhz`` is the highest of its multiprocessors, ``l2_bytes`` its L2 cache. 0: not known."""

    clock_mhz: int = 0
    l2_bytes: int = 0


UNKNOWN = GpuFacts()


def gpu_facts(index: int) -> GpuFacts:
    """The facts of GPU ``index``, as torch counts them; UNKNOWN without cuda-python or without a driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return UNKNOWN
    try:
        return read_facts(driver, index)
    except RuntimeError:
        # cuda-python finds the driver's library at the first call.
        return UNKNOWN


def read_facts(driver: Any, index: int) -> GpuFacts:
    """The facts by ``cuda.bindings.driver``; UNKNOWN if it refuses.

    Raises:
        RuntimeError: there is no driver.
    """
    attributes = driver.CUdevice_attribute
    (started,) = driver.cuInit(0)
    found, gpu = driver.cuDeviceGet(index)
    asked = (attributes.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, attributes.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
    if int(started) or int(found):
        return UNKNOWN
    answers = [driver.cuDeviceGetAttribute(attribute, gpu) for attribute in asked]
    if any(int(code) for code, _ in answers):
        return UNKNOWN
    (_, kilohertz), (_, l2_bytes) = answers
    return GpuFacts(kilohertz // 1000, l2_bytes)
