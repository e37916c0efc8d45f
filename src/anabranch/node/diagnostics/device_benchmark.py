"""Benchmark of this machine's compute and memory rates, as a device profile (`sim.cluster.device_model`)."""

from __future__ import annotations

import re
import time
import timeit
from collections.abc import Callable

from anabranch.errors import UserError

#: Rows of the multiplied square matrices, and bytes copied, by type of device: work of about 0.1 s.
SIDES = {"cpu": 1024, "cuda": 8192}
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
#: Repetitions, of which the fastest counts: other programs can only slow one down.
TRIES = 5


def measure_device(device_name: str) -> dict[str, float | str]:
    """Device profile of this machine: FLOP/s of matrix products in fp32 and fp16 (on a CPU bfloat16), free
    memory in bytes, bytes per second that a copy reads and writes, and the source in words. device_name:
    "auto", "cpu", "cuda", "cuda:1". Takes seconds.

    Rates are those that matrix products and copies reach, not those of a data sheet, so a scenario sets
    `fleet.achieved = 1.0`. Raises UserError if there is no such device.
    """
    import torch

    from anabranch.config import ComputeSection
    from anabranch.operating_system import free_memory_bytes
    from anabranch.train.numerics.numerics_class import device_of

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device_name):
        raise UserError(f"--device {device_name}: must be auto, cpu, cuda or cuda:N")
    try:
        device = device_of(ComputeSection(device=device_name))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"--device {device_name}: {str(error).splitlines()[0]}") from None
    side, kind = SIDES[device.type], torch.float16 if device.type == "cuda" else torch.bfloat16

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def fastest_s(work: Callable[[], object]) -> float:
        def whole() -> None:
            work()
            synchronize()

        return min(timeit.repeat(whole, synchronize, repeat=TRIES, number=1))

    def flops_per_s(dtype: torch.dtype) -> float:
        one = torch.ones(side, side, dtype=dtype, device=device)
        return 2.0 * side**3 / fastest_s(lambda: torch.mm(one, one))

    block = torch.zeros(COPIED_BYTES[device.type] // 8, dtype=torch.float64, device=device)
    target = torch.empty_like(block)
    copy_s = fastest_s(lambda: target.copy_(block))
    cuda = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if cuda else free_memory_bytes()
    description = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {
        "source": f"measured by anabranch profile, {time.strftime('%Y-%m-%d')}: {description}; free memory",
        "fp32_flops_per_s": round(flops_per_s(torch.float32)),
        "fp16_flops_per_s": round(flops_per_s(kind)),
        "memory_bytes": memory,
        "memory_bytes_per_s": round(2.0 * block.nbytes / copy_s),
    }
