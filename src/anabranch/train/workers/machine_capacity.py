"""Capacity and speed of this machine for the stages of a run: how many microbatches its free memory holds,
whether a stage fits at all, and how long its passes take. Measured before the machine joins.

Not here: the memory of modelled machines (`sim.cluster.device_model`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace

import torch

from anabranch.config import LoraSection, PipelineSection, RunConfig
from anabranch.errors import UserError
from anabranch.operating_system import UNLIMITED_BYTES, free_memory_bytes
from anabranch.protocol.interface.tasks import Forward, InitState, InputGradient, WeightGradient
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.partition import partition
from anabranch.train.model.sizes import (
    ModelConfig,
    activation_elements_kept,
    block_parameters,
    end_parameters,
)
from anabranch.train.numerics.numerics_class import device_of, devices_of, size_of
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts
from anabranch.train.stage.inner_steps import island_vectors
from anabranch.train.stage.protocol_inputs import trained_parameters
from anabranch.train.stage.run_objects import check_devices, master_dtype, share_out
from anabranch.train.stage.worker import Worker

#: Share of the free memory that activations of microbatches may take; a plain choice.
MEMORY_SHARE = 0.5
#: Share of the memory left beside two islands that activations may take, as counted: those of small models
#: were measured to take 1.36 to 1.44 times as much as `_held_bytes` says.
ISLANDS_SHARE = 0.65
#: Largest measured capacity, in microbatches.
MAX_CAPACITY = 1024


def measured_capacity(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED_BYTES) -> int:
    """Number of microbatches whose activations fit in MEMORY_SHARE of the free memory of each device; at
    least 1 (also if none fits), at most MAX_CAPACITY. most_bytes: that count as free, of each GPU or of the
    host. Raises ConfigError as `check_devices`."""
    fit = [
        int(free * MEMORY_SHARE) // max(1, blocks * _held_bytes(run, model))
        for _, free, blocks in _shares(run, model, most_bytes)
    ]
    return max(1, min(MAX_CAPACITY, *fit))


def shared_capacity(
    run: RunConfig, model: ModelConfig, capacity: int, most_bytes: int = UNLIMITED_BYTES
) -> int:
    """Number of microbatches, at most half of `capacity`, whose activations a relay can hold for each of two
    pipeline islands at one time, beside those of one whose forward is computed again; 0 if a device's memory
    does not hold two of the largest stage, and in a run without such islands. most_bytes: that count as free.
    Raises ConfigError as `check_devices`."""
    if not run.round.slots or run.pipeline.whole:
        return 0
    dtype, trained = DTYPES[run.compute.dtype], trained_parameters(run, model).block
    width, master = dtype.itemsize, master_dtype(dtype).itemsize
    second = island_vectors(run, closing=False) * master + (width if width < master else 0)
    frozen = block_parameters(model) * width if run.lora.rank else 0
    block, held = trained * (_trained_bytes(run) + second) + frozen, _held_bytes(run, model)
    under_way = capacity + int(capacity * run.fleet.recompute)
    inputs = 2 * under_way * run.batch.rows * run.batch.sequence * model.dim * width
    shares = _shares(run, model, most_bytes)
    fit = [
        int((free - blocks * block - inputs) * ISLANDS_SHARE) // (blocks * held) - 1
        for _, free, blocks in shares
    ]
    return max(0, min(capacity, *fit) // 2)


def check_fit(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED_BYTES) -> None:
    """Raise UserError if a relay's stage cannot lie on this machine's devices: `check_devices` refuses their
    number, or a device's free memory, or `most_bytes` of a machine that has such a limit, does not hold its
    blocks of the largest stage and one microbatch. Called before anything is fetched."""
    width, each = DTYPES[run.compute.dtype].itemsize, _trained_bytes(run)
    trained = trained_parameters(run, model)
    block, ends = trained.block * each + _held_bytes(run, model), trained.end * each
    if run.lora.rank:
        block, ends = block + block_parameters(model) * width, end_parameters(model) * width
    limited = most_bytes < UNLIMITED_BYTES
    for place, (device, free, blocks) in enumerate(_shares(run, model, most_bytes)):
        needed = blocks * block + (ends if run.pipeline.whole and place == 0 else 0)
        if needed > free:
            several = "let more GPUs hold the stage together (--device cuda:0,cuda:1), or "
            advice = (several if device.startswith("cuda") else "") + _more_memory(limited)
            raise UserError(
                f"{_has(device, free, limited)}, and its {blocks} blocks of the largest stage need at least "
                f"{_gib(needed)}: {advice}"
            )


def check_ends_fit(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED_BYTES) -> None:
    """Raise UserError if a data node of pipeline islands cannot hold embedding and head on its device, for
    its share of the slots at one time, where the run has `fleet.data_nodes` data nodes. With fewer of them
    each holds more. Other runs are not checked. most_bytes: of memory that count as free."""
    if not run.round.slots or run.pipeline.whole:
        return
    device, slots = device_of(run.compute), -(-run.round.slots // run.fleet.data_nodes)
    limited, free = most_bytes < UNLIMITED_BYTES, min(free_bytes(device), most_bytes)
    needed = trained_parameters(run, model).end * _trained_bytes(run, slots)
    needed += end_parameters(model) * DTYPES[run.compute.dtype].itemsize if run.lora.rank else 0
    if needed > free:
        raise UserError(
            f"{_has(str(device), free, limited)}, and embedding and head need at least {_gib(needed)} for "
            f"{slots} of the {run.round.slots} slots at one time: lead the run with more data nodes "
            f"(fleet.data_nodes), or {_more_memory(limited)}"
        )


def _trained_bytes(run: RunConfig, slots: int = 1) -> int:
    """Bytes of memory that one trained parameter takes: its state and gradient, and in a run with rounds its
    copies for `slots` slots of islands at one time."""
    dtype = DTYPES[run.compute.dtype]
    width, master = dtype.itemsize, master_dtype(dtype).itemsize
    sums = 8 if run.run.reduction == "exact" else master
    narrow = width if width < master else 0
    # Weights, two moments, a reduced gradient, and where they are narrower the weights to compute with.
    state, vectors = 4 * master + sums + narrow, island_vectors(run)
    return state + slots * (vectors * master + narrow) if vectors else state


def _has(device: str, free: int, limited: bool) -> str:
    """Words for the memory of a device: its name and `free` bytes. limited: True if its owner limits it."""
    return f"{device} has {_gib(free)} {'to use' if limited else 'free'}"


def _more_memory(limited: bool) -> str:
    return "give more with --memory" if limited else "end other programs there"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _shares(
    run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED_BYTES
) -> list[tuple[str, int, int]]:
    """(name, bytes of free memory, most blocks of a relay's stage) of each device. most_bytes: of a GPU, or
    of the host, that count as free. Raises ConfigError as `check_devices`."""
    devices, specs = devices_of(run.compute), partition(model, run.pipeline)
    check_devices(run, specs, len(devices))
    most: dict[torch.device, int] = {}
    for spec in specs[1:]:
        at = share_out(spec, devices) or dict.fromkeys(spec.blocks, devices[0])
        for device, blocks in Counter(at.values()).items():
            most[device] = max(most.get(device, 0), blocks)
    found = []
    for device in devices:
        limit = most_bytes if device.type == "cuda" else most_bytes // len(devices)
        found.append((str(device), min(free_bytes(device, len(devices)), limit), most[device]))
    return found


def free_bytes(device: torch.device, parts: int = 1) -> int:
    """Free memory (bytes) now of the GPU `device` (`parts` does not matter), or for another device of one of
    `parts` equal parts of the host. Memory that torch caches on the GPU counts as used; where the system does
    not tell what is free (macOS), half of all the host's memory is divided."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes() // parts


def parked_places(
    run: RunConfig, model: ModelConfig, resident: int, most_bytes: int = UNLIMITED_BYTES
) -> int:
    """Number of microbatches, beyond the `resident` ones, whose activations can be parked in host memory:
    `fleet.park` times `resident`, as far as MEMORY_SHARE of the free host memory holds them; 0 without
    `fleet.park`, and on a CPU. resident: microbatches whose activations fit on the device. most_bytes: of
    host memory that count as free."""
    if not run.fleet.park or device_of(run.compute).type == "cpu":
        return 0
    blocks = max(blocks for _, _, blocks in _shares(run, model))
    fit = int(min(free_memory_bytes(), most_bytes) * MEMORY_SHARE) // (blocks * _held_bytes(run, model))
    return max(0, min(int(resident * run.fleet.park), fit, MAX_CAPACITY - resident))


def _held_bytes(run: RunConfig, model: ModelConfig) -> int:
    """Bytes of activations that a microbatch keeps in a block until its backward pass is done, in fp32 (fp64
    in a run of that); at least 1."""
    width = 8 if run.compute.dtype == "fp64" else 4
    return max(1, run.batch.rows * run.batch.sequence * activation_elements_kept(model) * width)


def measured_block_s(run: RunConfig, model: ModelConfig) -> tuple[float, float]:
    """Seconds of a transformer block's forward and of its backward for one microbatch on this machine, all of
    its weights trained; of several devices the mean, weighted by their memory. Raises as `measured_pass_s`.
    """
    one = replace(run, pipeline=PipelineSection(stages=1), lora=LoraSection())
    devices = devices_of(run.compute)
    sizes = [size_of(device) for device in devices]
    passes = []
    for device in devices:
        there = replace(one, compute=replace(run.compute, device=str(device)))
        passes.append(measured_pass_s(there, replace(model, blocks=1), 1))
    forward_s, backward_s = (
        sum(size * seconds for size, seconds in zip(sizes, part, strict=True)) / sum(sizes)
        for part in zip(*passes, strict=True)
    )
    return forward_s, backward_s


def measured_pass_s(
    run: RunConfig, model: ModelConfig, stage: int, enough_s: float = math.inf
) -> tuple[float, float]:
    """Seconds of a relay stage's forward and of its backward (both parts) for one microbatch on this machine.
    The minimum of up to three passes, which are run now: the first ones include the time in which torch loads
    its kernels. enough_s: time after which no further pass begins; beside passes that are so long, the
    loading is nothing. Raises RuntimeError or MemoryError if memory is too small."""


    worker, cuts = Worker(run, model, stage), Cuts(run, model)
    worker.run(InitState(0))
    stream, dtype = worker.model.stream, DTYPES[run.compute.dtype]
    zeros = torch.zeros(run.batch.rows, run.batch.sequence, stream.columns, dtype=dtype)
    place = cuts.place(1, 0, 0)
    x, dy = cuts.encode(ACTIVATION, zeros, place), cuts.encode(GRADIENT, stream.values(zeros), place)
    forwards: list[float] = []
    backwards: list[float] = []
    started = time.perf_counter()
    for index in range(3):
        begin = time.perf_counter()
        if forwards and begin - started > enough_s:
            break
        worker.run(Forward(1, index, train=True), (x,))
        middle = time.perf_counter()
        worker.run(InputGradient(1, index), (dy,))
        worker.run(WeightGradient(1, index))
        forwards.append(middle - begin)
        backwards.append(time.perf_counter() - middle)
    return min(forwards), min(backwards)
