"""Compute of this machine: measured capacity and speed, and the workers that compute a stage."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import RunConfig, check_removed_options, config_from_text, with_changes
from anabranch.errors import UserError
from anabranch.node.driver.worker_thread import Computer
from anabranch.node.private_data.machine_data import OwnedData, OwnFolders, own_data_of
from anabranch.operating_system import free_memory_bytes
from anabranch.protocol.interface.events import Described
from anabranch.protocol.interface.tasks import Forward, InitState, InputGradient, WeightGradient
from anabranch.protocol.log.records import Genesis, Member

if TYPE_CHECKING:
    import torch

    from anabranch.data.batches import Batches
    from anabranch.data.corpus import Corpus
    from anabranch.train.model.sizes import ModelConfig

#: Share of the free memory that activations of microbatches may take; a plain choice.
MEMORY_SHARE = 0.5
#: Share of the free memory that copies of other stages' states may take; a plain choice.
SNAPSHOT_SHARE = 0.25
#: Folder, in a volunteer's own, of frozen weights that it downloaded.
FROZEN = "frozen"
#: Most memory (bytes) of a machine that names no limit.
UNLIMITED = 1 << 62
#: Largest measured capacity, in microbatches.
MAX_CAPACITY = 1024


def run_of(genesis: Genesis) -> RunConfig:
    """Run file in the genesis record (first log entry). Raises ConfigError if it is invalid."""
    return config_from_text(genesis.config, "the run's genesis")


class TrainingMachine:
    """This machine's compute with real tensors (see `peer_driver.Machine`).

    me: this peer's member record, without measurements. corpus_directory: the corpus of a data node. device:
    compute device of this machine, "" for the run file's. frozen: folder of frozen weights by their hash, for
    runs that train adapters (None: they are downloaded each time). threads: of torch, 0 for the run file's.
    memory_bytes: of the host and of each GPU, to plan with as if no more were free. own: private data of this
    machine, for a run on such data (None: it has none, and leads). The methods import torch, once the
    environment for the run's numerics is set; call them on the worker thread.
    """

    def __init__(
        self,
        me: Member,
        corpus_directory: Path | None,
        device: str = "",
        frozen: Path | None = None,
        threads: int = 0,
        memory_bytes: int = UNLIMITED,
        own: OwnFolders | None = None,
    ) -> None:
        self._me = me
        self._own_folders = own
        self._own: OwnedData | None = None
        self._threads, self._memory_bytes = threads, memory_bytes
        self._corpus_directory = corpus_directory
        self._device = device
        self._frozen = frozen
        self.run: RunConfig | None = None
        self.model: ModelConfig | None = None
        self.batches: Batches | None = None
        self.corpus: Corpus | None = None
        # Microbatches whose activations stay on the device, if those of others are offloaded.
        self._resident: int | None = None

    def prepare(self, run: RunConfig, fingerprint: str = "") -> None:
        """Set the numerics (threads, precision), open the corpus and fix the model's shape; a second call
        does nothing. fingerprint: of the run's corpus, if it is known. Another corpus gives no batches and no
        vocabulary: the leader refuses it by its fingerprint. Raises ConfigError for a damaged corpus or a
        model that cannot be."""
        if self.run is not None:
            return
        from anabranch.train.numerics.numerics_class import configure

        configure(run.compute.threads)
        from anabranch.train.model.sizes import model_config

        if self._corpus_directory is not None:
            from anabranch.data.batches import Batches
            from anabranch.data.corpus import open_corpus

            self.corpus = open_corpus(self._corpus_directory)
            if fingerprint in ("", self.corpus.fingerprint):
                self.batches = Batches(self.corpus, run.batch, run.run.seed)
        vocabulary = self.corpus.vocab_size if self.corpus and self.batches else run.model.vocab_size or 1
        self.model = model_config(run.model, vocabulary)
        self.run = run

    def describe(self, genesis: Genesis) -> Described:
        """This machine's offer to the run of `genesis`: its member record with measured capacity and speed
        (`member`), and its settings. Calls `prepare` with the user's options in place of the run's, and opens
        the private data. Takes seconds. Raises UserError if the user's options or this machine's devices do
        not fit the run."""
        from anabranch.train.stage.protocol_inputs import model_hash, schedule_of, settings_of

        run = run_of(genesis)
        if self._device:
            run = with_changes(run, {"compute.device": self._device})
        if self._threads and self._threads != run.compute.threads:
            if run.run.numerics != "mixed":
                raise UserError(
                    f"--threads {self._threads}: all machines of this run compute with "
                    f"{run.compute.threads}, as the bits depend on it: leave --threads out"
                )
            run = with_changes(run, {"compute.threads": self._threads})
        check_removed_options(run)
        self.prepare(run, genesis.corpus_fingerprint)
        assert self.model is not None
        if self._corpus_directory is None:
            check_fit(run, self.model, self._memory_bytes)
        elif "," in self._device:
            raise UserError(f"--device {self._device}: a data node holds no blocks: name one device")
        else:
            check_ends_fit(run, self.model, self._memory_bytes)
        if self._own_folders is not None:
            relay = self._corpus_directory is None
            self._own = own_data_of(self._own_folders, run, genesis, self._me.id, relay)
        settings = settings_of(run, genesis.run, self.model, genesis.epoch)
        free = min(free_memory_bytes(), self._memory_bytes)
        room = min(settings.snapshot_budget_bytes, int(free * SNAPSHOT_SHARE))
        settings = replace(settings, snapshot_budget_bytes=room)
        fingerprint = self.corpus.fingerprint if self.corpus else ""
        manifest_hash = self.batches.manifest_hash if self.batches else None
        tokens = run.batch.microbatches * run.batch.rows * run.batch.sequence
        schedule = schedule_of(run, manifest_hash, tokens)
        return Described(self.member(run), settings, fingerprint, model_hash(self.model), schedule)

    def member(self, run: RunConfig) -> Member:
        """Member record of this machine, after `prepare`. Measures a block's seconds for one microbatch, and
        the capacity unless the run file sets it, to which the microbatches that can be parked are added; how
        many then stay on the device is kept for `build`."""
        import msgspec

        from anabranch.train.numerics.numerics_class import numerics_class

        assert self.model is not None
        capacity = run.fleet.capacity or measured_capacity(run, self.model, self._memory_bytes)
        parked = parked_places(run, self.model, capacity, self._memory_bytes)
        self._resident = capacity if parked else None
        name, _ = numerics_class(run.compute, run.batch.rows, run.batch.sequence)
        forward_s, backward_s = measured_block_s(run, self.model)
        return msgspec.structs.replace(
            self._me,
            numerics_class=name,
            capacity=capacity + parked,
            forward_s=forward_s,
            backward_s=backward_s,
        )

    def build(self, stage: int) -> tuple[Computer, str]:
        """Make the worker that computes a stage; after `member`. Returns the worker in its initial state and
        the fingerprint of that state; "" if imported weights are the initial state, which have to be fetched
        as a checkpoint: the worker's state is another then."""
        from anabranch.train.adapters.frozen import FrozenStore
        from anabranch.train.workers.workers import make_worker

        assert self.run is not None and self.model is not None
        batches = self.batches if stage == 0 else None
        store = None if self._frozen is None else FrozenStore(self._frozen)
        worker = make_worker(
            self.run, self.model, stage, batches, resident=self._resident, frozen=store, own=self._own
        )
        if self.run.model.initial_weights != "seed" and not self.run.lora.rank:
            return worker, ""
        return worker, worker.run(InitState(0)).fingerprint


def measured_capacity(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED) -> int:
    """Number of microbatches whose activations fit in MEMORY_SHARE of the free memory of each device; at
    least 1 (also if none fits), at most MAX_CAPACITY. most_bytes: that count as free, of each GPU or of the
    host. Raises ConfigError if there are more devices than blocks."""
    fit = [
        int(free * MEMORY_SHARE) // max(1, blocks * _held_bytes(run, model))
        for _, free, blocks in _shares(run, model, most_bytes)
    ]
    return max(1, min(MAX_CAPACITY, *fit))


def check_fit(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED) -> None:
    """Raise UserError if a relay's stage cannot lie on this machine's devices: there are more devices than
    blocks, or a device's free memory, or `most_bytes` of a machine that has such a limit, does not hold its
    blocks of the largest stage and one microbatch. Called before anything is fetched."""
    from anabranch.train.model.interface import DTYPES
    from anabranch.train.model.sizes import block_parameters, end_parameters
    from anabranch.train.stage.protocol_inputs import trained_parameters

    width, each = DTYPES[run.compute.dtype].itemsize, _trained_bytes(run)
    trained = trained_parameters(run, model)
    block, ends = trained.block * each + _held_bytes(run, model), trained.end * each
    if run.lora.rank:
        block, ends = block + block_parameters(model) * width, end_parameters(model) * width
    limited = most_bytes < UNLIMITED
    for place, (device, free, blocks) in enumerate(_shares(run, model, most_bytes)):
        needed = blocks * block + (ends if run.pipeline.whole and place == 0 else 0)
        if needed > free:
            several = "let more GPUs hold the stage together (--device cuda:0,cuda:1), or "
            advice = (several if device.startswith("cuda") else "") + _more_memory(limited)
            raise UserError(
                f"{_has(device, free, limited)}, and its {blocks} blocks of the largest stage need at least "
                f"{_gib(needed)}: {advice}"
            )


def check_ends_fit(run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED) -> None:
    """Raise UserError if a data node of pipeline islands cannot hold embedding and head on its device, for
    its share of the slots at one time, where the run has `fleet.data_nodes` data nodes. With fewer of them
    each holds more. Other runs are not checked. most_bytes: of memory that count as free."""
    if not run.round.slots or run.pipeline.whole:
        return
    from anabranch.train.model.interface import DTYPES
    from anabranch.train.model.sizes import end_parameters
    from anabranch.train.numerics.numerics_class import device_of
    from anabranch.train.stage.protocol_inputs import trained_parameters

    device, slots = device_of(run.compute), -(-run.round.slots // run.fleet.data_nodes)
    limited, free = most_bytes < UNLIMITED, min(free_bytes(device), most_bytes)
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
    from anabranch.train.model.interface import DTYPES
    from anabranch.train.stage.inner_steps import island_vectors
    from anabranch.train.stage.run_objects import master_dtype

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
    run: RunConfig, model: ModelConfig, most_bytes: int = UNLIMITED
) -> list[tuple[str, int, int]]:
    """(name, bytes of free memory, most blocks of a relay's stage) of each device. most_bytes: of a GPU, or
    of the host, that count as free. Raises ConfigError if there are more devices than blocks."""
    from anabranch.train.model.partition import partition
    from anabranch.train.numerics.numerics_class import devices_of
    from anabranch.train.stage.run_objects import check_devices, share_out

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
    `parts` equal parts of the host."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes() // parts


def parked_places(run: RunConfig, model: ModelConfig, resident: int, most_bytes: int = UNLIMITED) -> int:
    """Number of microbatches, beyond the `resident` ones, whose activations can be parked in host memory:
    `fleet.park` times `resident`, as far as MEMORY_SHARE of the free host memory holds them; 0 without
    `fleet.park`, and on a CPU. resident: microbatches whose activations fit on the device. most_bytes: of
    host memory that count as free."""
    from anabranch.train.numerics.numerics_class import device_of

    if not run.fleet.park or device_of(run.compute).type == "cpu":
        return 0
    blocks = max(blocks for _, _, blocks in _shares(run, model))
    fit = int(min(free_memory_bytes(), most_bytes) * MEMORY_SHARE) // (blocks * _held_bytes(run, model))
    return max(0, min(int(resident * run.fleet.park), fit, MAX_CAPACITY - resident))


def _held_bytes(run: RunConfig, model: ModelConfig) -> int:
    """Bytes of activations that a microbatch keeps in a block until its backward pass is done, in fp32 (fp64
    in a run of that); at least 1."""
    from anabranch.train.model.sizes import activation_elements_kept

    width = 8 if run.compute.dtype == "fp64" else 4
    return max(1, run.batch.rows * run.batch.sequence * activation_elements_kept(model) * width)


def measured_block_s(run: RunConfig, model: ModelConfig) -> tuple[float, float]:
    """Seconds of a transformer block's forward and of its backward for one microbatch on this machine, all of
    its weights trained; of several devices the mean, weighted by their memory. Raises as `measured_pass_s`.
    """
    from anabranch.config import LoraSection, PipelineSection
    from anabranch.train.numerics.numerics_class import devices_of, size_of

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
    The minimum of three: the first passes include the time in which torch loads its kernels. enough_s: time
    after which no further pass begins; beside passes that are so long, the loading is nothing. Raises
    RuntimeError or MemoryError if memory is too small."""
    import torch

    from anabranch.train.model.interface import DTYPES
    from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts
    from anabranch.train.stage.worker import Worker

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
