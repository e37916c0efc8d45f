"""Numerics class of a process: all settings that determine the bits of a result, set in one place and hashed.

`configure` must run before torch is imported for the environment variables to be read in time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING

from anabranch.config import ComputeSection

if TYPE_CHECKING:
    import torch


def set_environment(threads: int) -> None:
    """Set the environment variables that torch and its libraries read when loaded. Imports no torch."""
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        MKL_CBWR="AUTO,STRICT",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )


def configure(threads: int) -> None:
    """Make this process reproducible: environment, thread count, deterministic kernels, full precision. It
    imports torch, so it must be called before anything else does. threads: of torch's operations."""
    set_environment(threads)
    import torch

    torch.set_num_threads(threads)
    # Equivalent to use_deterministic_algorithms(True), which would import torch's compiler: a second or more.
    torch.set_deterministic_debug_mode("error")
    # Results never depend on uninitialised memory here; filling it would cost a pass per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def device_of(compute: ComputeSection) -> torch.device:
    """Torch device that `compute.device` means on this machine; the first one, if it names several. "auto":
    cuda if there is one, else cpu. A named device is not looked for: it may be missing."""
    return devices_of(compute)[0]


def devices_of(compute: ComputeSection) -> tuple[torch.device, ...]:
    """Torch devices that `compute.device` means on this machine, in the order in which a stage's blocks are
    laid over them."""
    import torch

    if compute.device == "auto":
        return (torch.device("cuda" if torch.cuda.is_available() else "cpu"),)
    return tuple(map(torch.device, compute.device.split(",")))


def size_of(device: torch.device) -> int:
    """Memory of an accelerator (GiB, at least 1), by which a stage's blocks are shared out: all that it has,
    whatever is free at the moment. 1 for the CPU."""
    import torch

    if device.type == "cpu":
        return 1
    return max(1, torch.cuda.get_device_properties(device).total_memory >> 30)


def numerics_class(compute: ComputeSection, rows: int, sequence: int) -> tuple[str, dict[str, str]]:
    """(hash, description) of this process's numerics for microbatches of rows × sequence tokens.

    Several devices that are alike are of the class of one: each operation is done on one of them, with the
    same shapes. Devices that differ are of a class of their own, with their sizes, by which blocks are shared
    out.

    Two processes of one class are taken to compute the same bits from the same inputs. Besides the known
    settings the description holds a probe, the hash of a short computation's bits. It tells many machines
    apart that only look alike, but not all: the bits may differ in shapes that it does not have.
    """
    found = [_description(device, compute, rows, sequence) for device in devices_of(compute)]
    description = found[0]
    if any(one != description for one in found):
        sizes = [f"{size_of(device)} GiB" for device in devices_of(compute)]
        description = {"devices": json.dumps(list(zip(sizes, found, strict=True)))}
    canonical = json.dumps(description, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16], description


def _description(device: torch.device, compute: ComputeSection, rows: int, sequence: int) -> dict[str, str]:
    """Everything that the class is a hash of, by name, for one device: settings of torch, kind of device,
    shape of a microbatch, and the probe."""
    import torch

    description = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "machine": platform.machine(),
        "device": str(device.type),
        "dtype": compute.dtype,
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "microbatch": f"{rows}x{sequence}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["accelerator"] = f"{properties.name} {properties.multi_processor_count} units"
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        description["cuda"] = f"{torch.version.cuda} cudnn {cudnn}"
        description["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    else:
        description["capability"] = torch.backends.cpu.get_cpu_capability()
        description["processor"] = _maker()
        description["mkl"] = f"{torch._C.has_mkl} {os.environ.get('MKL_CBWR', '')}"
    description["probe"] = _probe(device, compute.dtype)
    return description


def _maker() -> str:
    """Maker of the processor: the `vendor_id` of /proc/cpuinfo; where there is none (ARM, other systems than
    Linux) the end of `platform.processor()`, which may be "". MKL has other kernels for AMD's than for
    Intel's of the same instruction sets, whose bits differ in some shapes only, so that a short probe cannot
    tell them apart."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("vendor_id"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor().rpartition(",")[2].strip()


def _probe(device: torch.device, dtype: str) -> str:
    """Hash of the bits of products, a softmax, a norm, an activation and their gradients."""
    import torch
    import torch.nn.functional as F

    kind = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[dtype]
    # Fixed inputs without any generator or transcendental function: fractions of small integers.
    ramp = (torch.arange(192 * 160) * 2_654_435_761 % 4093).view(192, 160)
    x = (ramp.double() / 2048 - 1).to(kind).to(device).requires_grad_()
    w = (ramp[:160, :].double().t() / 4096 - 0.5).to(kind).to(device).requires_grad_()
    y = F.layer_norm(F.silu(x @ w), (160,)) * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    loss = F.cross_entropy(torch.softmax(y, -1) @ w.t(), ramp[:, 0].to(device) % 160)
    gradients = torch.autograd.grad(loss, [x, w])
    bits = hashlib.sha256()
    for tensor in (y.detach(), loss.detach(), *gradients):
        bits.update(tensor.double().cpu().numpy().tobytes())
    return bits.hexdigest()[:16]
