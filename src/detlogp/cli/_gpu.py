"""Which GPUs a call could run on, with which code of this build, and what is missing for it."""

import ctypes
import os
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A visible CUDA device."""

    name: str
    capability: tuple[int, int]


class GpuSetup(NamedTuple):
    """What decides whether a call can run on a GPU."""

    build_cuda: str | None  # toolkit that the library was built with, such as "13.0.88"
    build_architectures: str  # as CMake has them, such as "80-real 90-real 90-virtual"
    torch_version: str
    torch_cuda: str | None  # CUDA that torch was built with, such as "13.0"
    driver_cuda: tuple[int, int] | None  # the newest CUDA that the driver knows
    devices: list[Device]


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver knows; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def read_setup(build: dict[str, str]) -> GpuSetup:
    """The setup of this process; `build` is what build_info() says."""
    indices = range(torch.cuda.device_count()) if torch.version.cuda is not None else ()
    devices = [
        Device(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in indices
    ]
    return GpuSetup(
        build.get("cuda"),
        build.get("cuda_architectures", ""),
        torch.__version__,
        torch.version.cuda,
        driver_cuda_version(),
        devices,
    )


def _parse_architecture(text: str) -> tuple[tuple[int, int], str, str] | None:
    """'90a-real' is ((9, 0), 'a', 'real'); None for a word such as 'native'."""
    number, _, kind = text.partition("-")
    digits = number.rstrip("af")
    if not digits.isdigit() or len(digits) < 2:
        return None
    return (int(digits[:-1]), int(digits[-1])), number[len(digits) :], kind


def code_for(capability: tuple[int, int], architectures: str) -> str | None:
    """Which code of the build a device of this capability runs; None if it has none.

    Machine code runs on a device of the same major number and an equal or larger minor one; PTX is
    compiled by the driver for any capability from its own up. Code for 9.0a runs on 9.0 alone, and
    code for the family 10.0f within its major number.
    """
    machine_code: list[tuple[int, int]] = []
    ptx: list[tuple[int, int]] = []
    for text in architectures.split():
        parsed = _parse_architecture(text)
        if parsed is None:
            return f"unknown, the build's architectures are {architectures!r}"
        target, suffix, kind = parsed
        same_major = target[0] == capability[0]
        at_least = capability == target if suffix == "a" else capability >= target
        if kind != "virtual" and same_major and at_least:
            machine_code.append(target)
        if kind != "real" and at_least and (same_major or not suffix):
            ptx.append(target)
    if machine_code:
        return "machine code for {}.{}".format(*max(machine_code))
    if ptx:
        return "PTX for {}.{}, compiled by the driver at the first call".format(*max(ptx))
    return None


def missing_for_gpu(setup: GpuSetup) -> list[str]:
    """What stands between a call and the GPU, one sentence each; empty when nothing does."""
    missing = []
    if setup.build_cuda is None:
        missing.append(
            "this build has no CUDA kernels: nvcc was not found when it was built, "
            "or DETLOGP_CUDA was OFF"
        )
    if setup.torch_cuda is None:
        missing.append(f"torch {setup.torch_version} is not a CUDA build")
    if setup.driver_cuda is None:
        missing.append("no GPU visible: the NVIDIA driver's libcuda.so.1 could not be loaded")
    elif setup.torch_cuda is not None and not setup.devices:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        missing.append(f"no GPU visible to torch (CUDA_VISIBLE_DEVICES is {hidden!r})")
    if setup.build_cuda is not None and setup.driver_cuda is not None:
        known = "{}.{}".format(*setup.driver_cuda)
        if setup.driver_cuda[0] < int(setup.build_cuda.partition(".")[0]):
            missing.append(
                f"the driver knows CUDA up to {known}, this build needs {setup.build_cuda}"
            )
    for index, device in enumerate(setup.devices):
        if setup.build_cuda and code_for(device.capability, setup.build_architectures) is None:
            capability = "{}.{}".format(*device.capability)
            missing.append(f"this build has no code for cuda:{index} (capability {capability})")
    return missing
