"""Which backend serves a problem, and why: one rule, read by the launcher, ``explain`` and ``info``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from hopper_attention import _kernels
from hopper_attention.notices import warn_once

HOPPER_CAPABILITY = (9, 0)
"""wgmma exists on sm_90a alone: neither older nor newer GPUs run these kernels."""

MOST_MULTIPROCESSORS: dict[tuple[int, ...], int] = {
    (8, 0): 108,
    (8, 6): 84,
    (8, 7): 16,
    (8, 9): 142,
    (9, 0): 132,
    (12, 0): 188,
    (12, 1): 48,
}
"""Of the largest GPU of each compute capability that has kernels."""

KERNELS = {"hopper": "Hopper kernel", "ampere": "kernel without WGMMA"}
"""What the kernels of a backend are called. The backends that are not here run on any torch device."""

WITHOUT_KERNEL = {
    "torch": "torch's fused attention",
    "reference": "the tiled reference, which is slow",
}
"""What the other backends are called."""

USE_FLEX = "torch.nn.attention.flex_attention, compiled, may be faster there"


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it.

    ``advice`` says how to get a faster one; empty where this is the best that the device can do.
    """

    backend: str
    reason: str
    advice: str = ""

    def advise(self, what: str) -> None:
        """Warn once how ``what`` would be faster, if it can be."""
        if self.advice:
            warn_once(f"{what} on {WITHOUT_KERNEL[self.backend]}: {self.reason}; {self.advice}")


@dataclass(frozen=True)
class Target:
    """Where a problem would run. ``capability`` is empty for anything but a GPU of NVIDIA.

    ``assume_installed`` answers for a machine that is not here, and has whatever packages it takes.
    """

    name: str
    capability: tuple[int, ...] = ()
    assume_installed: bool = False

    @property
    def is_gpu(self) -> bool:
        return bool(self.capability)


def target_of(device: torch.device) -> Target:
    """The device as the rule sees it. ROCm's GPUs are cuda devices to torch, but none of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return Target(str(device))
    return Target(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def choose_backend(
    target: Target, dtype: torch.dtype, requested: str | None = None, unserved: str = ""
) -> Choice:
    """The backend of 16 bits for tensors of ``dtype`` on ``target``; ``fp8_rules`` has the rule for FP8.

    ``unserved`` is what keeps torch's fused attention from a problem (``torch_rules.why_not_torch``); empty if nothing
    does.

    Raises:
        ValueError: the requested backend cannot run there.
        NotImplementedError: "torch" is requested for a problem that it does not serve.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    if requested == "torch":
        return asked_for_torch(target, unserved)
    blocked = {"hopper": why_not_hopper(target), "ampere": why_not_ampere(target)}
    if requested is not None and blocked[requested]:
        others = (blocked | {"torch": unserved}).items()
        allowed = "".join(f"{name!r}, " for name, reason in others if not reason)
        raise ValueError(
            f"backend is {requested!r}, but {blocked[requested]}; allowed here: {allowed}'reference' or None"
        )
    chosen = requested or next((name for name, reason in blocked.items() if not reason), "")
    if not chosen:
        return without_kernel(target, blocked["ampere"], unserved)
    major, minor = target.capability
    dtype_name = str(dtype).removeprefix("torch.")
    reason = f"{target.name} has compute capability {major}.{minor} and q has dtype {dtype_name}"
    return Choice(chosen, f"asked for with backend='ampere'; {reason}" if requested == "ampere" else reason)


def asked_for_torch(target: Target, unserved: str) -> Choice:
    """The answer to backend="torch".

    Raises:
        NotImplementedError: something keeps torch from the problem.
    """
    if unserved:
        raise NotImplementedError(f"backend is 'torch', but {unserved}; use backend='reference' or None")
    return Choice("torch", f"asked for with backend='torch'{_where_it_ran(target)}")


def without_kernel(target: Target, reason: str, unserved: str) -> Choice:
    """What serves where no kernel does: torch's fused attention, or the tiled reference if that cannot.

    ``reason`` is what keeps the kernels from it.
    """
    if unserved:
        advice = how_to_go_faster(target)
        return Choice("reference", f"{reason}, and {unserved}", advice)
    is_installable = target.capability in ARCH_OF_CAPABILITY
    return Choice(
        "torch", f"{reason}{_where_it_ran(target)}", how_to_go_faster(target) if is_installable else ""
    )


def _where_it_ran(target: Target) -> str:
    """A remark on devices that torch's attention was never tried on by this project."""
    is_tried = target.name == "cpu" or target.capability in ARCH_OF_CAPABILITY
    return "" if is_tried else "; this project has never run on such a device"


def why_not_hopper(target: Target) -> str:
    """What keeps the Hopper kernels from running on ``target``; empty if nothing does."""
    if not target.is_gpu:
        return f"{target.name} is not an NVIDIA GPU"
    if target.capability != HOPPER_CAPABILITY:
        major, minor = target.capability
        return f"{target.name} has compute capability {major}.{minor} and the Hopper kernels need 9.0 exactly"
    if _kernels.missing_packages() and not target.assume_installed:
        return f"the Hopper kernels need {' and '.join(_kernels.missing_packages())}, not installed here"
    return ""


def why_not_ampere(target: Target) -> str:
    """What keeps the kernels without WGMMA from running on ``target``; empty if nothing does."""
    if not target.is_gpu:
        return f"{target.name} is not an NVIDIA GPU"
    if target.capability not in ARCH_OF_CAPABILITY:
        major, minor = target.capability
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        return f"{target.name} has compute capability {major}.{minor} and the kernels are for {known}"
    if _kernels.missing_packages() and not target.assume_installed:
        return f"the kernels need {' and '.join(_kernels.missing_packages())}, not installed here"
    return ""


def how_to_go_faster(target: Target) -> str:
    """Advice for a GPU that runs the reference; empty for devices that have nothing faster."""
    if not target.is_gpu:
        return ""
    if target.capability not in ARCH_OF_CAPABILITY:
        return USE_FLEX
    return f"install them with: {_kernels.INSTALL_DSL}"
