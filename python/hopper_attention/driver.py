"""What the NVIDIA driver knows of a GPU and torch does not say, asked through cuda-python."""

from __future__ import annotations

from functools import lru_cache
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


EMPTY_KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing()\n{\nret;\n}\n\0"


def most_clusters(index: int, size: int) -> int:
    """Clusters of ``size`` CTAs, each with all shared memory of an SM, that GPU ``index`` has room for at once: fewer
    than it has SMs for, as a cluster lies in one GPC. 0 without cuda-python or with one that is too old, or if the
    driver refuses, which is asked again for the next call that is not remembered. Not while a graph is captured."""
    try:
        return _most_clusters(index, size)
    except (ImportError, AttributeError, RuntimeError):
        return 0


@lru_cache(maxsize=256)
def _most_clusters(index: int, size: int) -> int:
    from cuda.bindings import driver

    return count_clusters(driver, index, size)


def count_clusters(driver: Any, index: int, size: int) -> int:
    """The same by ``cuda.bindings.driver``, in the context that torch and the runtime have too, whether or not there
    has been one before.

    Raises:
        RuntimeError: there is no driver, or it refuses.
    """
    _ask(driver.cuInit, 0)
    device, attribute = _ask(driver.cuDeviceGet, index), driver.CUdevice_attribute
    most_bytes = attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    room = _ask(driver.cuDeviceGetAttribute, most_bytes, device)
    _ask(driver.cuCtxPushCurrent, _ask(driver.cuDevicePrimaryCtxRetain, device))
    try:
        return _count_in_context(driver, size, room)
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


def _ask(function: Any, *given: Any) -> Any:
    code, *found = function(*given)
    if int(code):
        raise RuntimeError(f"{function.__name__} gives {code}")
    return found[0] if found else None


def _count_in_context(driver: Any, size: int, room: int) -> int:
    """Of CTAs with ``room`` bytes of shared memory."""
    module = _ask(driver.cuModuleLoadData, EMPTY_KERNEL)
    try:
        return _count_of_kernel(driver, _ask(driver.cuModuleGetFunction, module, b"nothing"), size, room)
    finally:
        driver.cuModuleUnload(module)


def _count_of_kernel(driver: Any, kernel: Any, size: int, room: int) -> int:
    attributes = driver.CUfunction_attribute
    any_size = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    _ask(driver.cuFuncSetAttribute, kernel, any_size, 1)
    _ask(driver.cuFuncSetAttribute, kernel, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
    sizes, cluster = driver.CUlaunchAttributeValue(), driver.CUlaunchAttribute()
    sizes.clusterDim.x, sizes.clusterDim.y, sizes.clusterDim.z = size, 1, 1
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value = sizes
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = size, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
    launch.sharedMemBytes, launch.numAttrs, launch.attrs = room, 1, [cluster]
    return int(_ask(driver.cuOccupancyMaxActiveClusters, kernel, launch))
