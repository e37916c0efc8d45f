"""Compute of this machine: its offer to a run, and the workers that compute a stage.

Not here: how its capacity and speed are measured (`train.workers.machine_capacity`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import RunConfig, check_removed_options, config_from_text, with_changes
from anabranch.errors import UserError
from anabranch.node.driver.worker_thread import Computer
from anabranch.node.private_data.machine_data import OwnedData, OwnFolders, own_data_of
from anabranch.operating_system import UNLIMITED_BYTES, free_memory_bytes
from anabranch.protocol.interface.events import Described
from anabranch.protocol.interface.tasks import InitState
from anabranch.protocol.log.records import Genesis, Member

if TYPE_CHECKING:
    from anabranch.data.batches import Batches
    from anabranch.data.corpus import Corpus
    from anabranch.train.model.sizes import ModelConfig

#: Share of the free memory that copies of other stages' states may take; a plain choice.
SNAPSHOT_SHARE = 0.25
#: Folder, in a volunteer's own, of frozen weights that it downloaded.
FROZEN = "frozen"


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
        memory_bytes: int = UNLIMITED_BYTES,
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
        from anabranch.train.workers.machine_capacity import check_ends_fit, check_fit

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
        from anabranch.train.workers import machine_capacity as measured

        assert self.model is not None
        capacity = run.fleet.capacity or measured.measured_capacity(run, self.model, self._memory_bytes)
        parked = measured.parked_places(run, self.model, capacity, self._memory_bytes)
        self._resident = capacity if parked else None
        shared = 0
        if self._corpus_directory is None:
            shared = measured.shared_capacity(run, self.model, capacity, self._memory_bytes)
        name, _ = numerics_class(run.compute, run.batch.rows, run.batch.sequence)
        forward_s, backward_s = measured.measured_block_s(run, self.model)
        return msgspec.structs.replace(
            self._me,
            numerics_class=name,
            capacity=capacity + parked,
            forward_s=forward_s,
            backward_s=backward_s,
            shared=shared or msgspec.UNSET,
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
