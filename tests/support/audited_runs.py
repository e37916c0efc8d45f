"""Run directories of simulated swarms on a real small corpus, and ways to tamper with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import blake3
import msgspec
import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from anabranch.checkpoint.directory import CheckpointManifest, RunDirectory, write_atomically
from anabranch.config import DataSection, RunConfig, render_run_file, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise
from anabranch.protocol.log.records import (
    NO_ENTRY,
    AnyRecord,
    Commit,
    Entry,
    Genesis,
    Rollback,
    decode_entry,
    encode_entry,
    entry_hash,
)
from anabranch.sim.kernel.swarm_world import World
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.numerics_class import numerics_class
from anabranch.train.stage.protocol_inputs import Manifest
from support.swarms.training_world import training_world

Change = Callable[[AnyRecord], AnyRecord]


def small_run(architecture: str = "llama", steps: int = 6, **changes: object) -> RunConfig:
    """Two narrow stages, five microbatches of 2x12 tokens, on a corpus of bytes. `changes` are dotted keys
    with a double underscore for the dot."""
    base = {
        "run.steps": steps,
        "model.size": f"{architecture}-tiny",
        "model.dim": 16,
        "model.blocks": 2,
        "model.heads": 2,
        "model.ffn": 24,
        "model.max_sequence": 16,
        "data.source": "text",
        "data.path": "texts",
        "data.tokenizer": "bytes",
        "batch.microbatches": 5,
        "batch.rows": 2,
        "batch.sequence": 12,
        "optimizer.lr": 1e-2,
        "optimizer.warmup_steps": 2,
        "pipeline.stages": 2,
        "compute.device": "cpu",
        "evaluation.every": 3,
        "evaluation.windows": 2,
        "checkpoint.every": 3,
        "fleet.minimum": 2,
        "fleet.relays_per_stage": (2, 2),
    }
    if architecture == "llama":
        base["model.kv_heads"] = 1
    return with_changes(RunConfig(), {**base, **{k.replace("__", "."): v for k, v in changes.items()}})


def make_run(
    folder: Path,
    run: RunConfig,
    replicas: Sequence[int] = (2, 2),
    seed: int = 0,
    spoil: Callable[[World], None] = lambda world: None,
    logged_class: str | None = None,
) -> RunDirectory:
    """Train `run` in a simulated swarm and write its run directory to `folder`/run. `spoil` may plan faults;
    `logged_class` is the numerics class that the peers claim (None: the true one)."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(40):
        words = [f"{number} river {(number * 7 + line) % 13} bends at mile {line}\n" for line in range(12)]
        (texts / f"{number:02}.txt").write_text("".join(words))
    directory = RunDirectory.create(folder / "run")
    corpus = materialise(DataSection(**{**vars(run.data), "path": str(texts)}), directory.corpus)
    directory.run_file.write_text(render_run_file(run))
    batches = Batches(corpus, run.batch, run.run.seed)
    true_class = numerics_class(run.compute, run.batch.rows, run.batch.sequence)[0]
    world = training_world(
        run,
        model_config(run.model, corpus.vocab_size),
        batches,
        replicas,
        data_nodes=2,
        seed=seed,
        manifest=Manifest(corpus.fingerprint, corpus.tokenizer_hash),
        manifest_hash=batches.manifest_hash,
        numerics_class=logged_class or true_class,
    )
    spoil(world)
    world.run(until_s=2000)
    directory.log.write_bytes(b"".join(line + b"\n" for line in world.log))
    bases = world.history().bases
    for t, stages in world.checkpoints.items():
        files = {
            stage: ([np.asarray(piece) for piece in pieces], fingerprint)
            for stage, (pieces, fingerprint) in stages.items()
        }
        directory.write_checkpoint(t, bases[t], world.settings.run, files)
    return directory


def copy_of(directory: RunDirectory, folder: Path) -> RunDirectory:
    """A copy to tamper with."""
    shutil.copytree(directory.path, folder / "copy")
    return RunDirectory.open(folder / "copy")


def rewrite_log(directory: RunDirectory, change: Callable[[list[AnyRecord]], list[AnyRecord]]) -> None:
    """Change the records of a log and chain them again, checkpoints included: a forgery without a seam."""
    lines = directory.log.read_bytes().splitlines()
    entries = [decode_entry(line) for line in lines]
    new_base = {}
    written: list[bytes] = []
    previous, base, old_base = NO_ENTRY, "", ""
    by_record = {id(entry.record): entry_hash(line) for entry, line in zip(entries, lines, strict=True)}
    originals = [entry.record for entry in entries]
    for index, (original, record) in enumerate(_paired(originals, change(list(originals)))):
        if isinstance(record, Commit):
            record = msgspec.structs.replace(record, previous_base=base)
        term = entries[min(index, len(entries) - 1)].term
        line = encode_entry(Entry(index, term, previous, record))
        written.append(line)
        previous = entry_hash(line)
        if isinstance(record, Genesis | Commit | Rollback):
            base = previous
            if original is not None:
                old_base = by_record[id(original)]
                new_base[old_base] = base
    directory.log.write_bytes(b"".join(line + b"\n" for line in written))
    for t in directory.checkpoints():
        manifest = directory.manifest(t)
        if manifest.base in new_base:
            write_manifest(directory, msgspec.structs.replace(manifest, base=new_base[manifest.base]))


def _paired(originals: list[AnyRecord], changed: list[AnyRecord]) -> list[tuple[AnyRecord | None, AnyRecord]]:
    """Each changed record with the original that it stands for (None: an inserted one)."""
    if len(originals) == len(changed):
        return list(zip(originals, changed, strict=True))
    known = {id(record): record for record in originals}
    return [(known.get(id(record)), record) for record in changed]


def change_step(directory: RunDirectory, t: int, change: Callable[[Commit], Commit]) -> None:
    """Rewrite the log with C_t changed."""

    def at(record: AnyRecord) -> AnyRecord:
        return change(record) if isinstance(record, Commit) and record.t == t else record

    rewrite_log(directory, lambda records: [at(record) for record in records])


def write_manifest(directory: RunDirectory, manifest: CheckpointManifest) -> None:
    path = directory.checkpoint_path(manifest.t) / "manifest.json"
    write_atomically(path, msgspec.json.encode(msgspec.to_builtins(manifest, str_keys=True)))


def change_stage(
    directory: RunDirectory,
    t: int,
    stage: int,
    change: Callable[[dict[str, Tensor], dict[str, str]], None],
    rehash: bool = True,
) -> None:
    """Change the tensors and metadata of a stage in a checkpoint by `change(tensors, metadata)`; with
    `rehash` the manifest's file hash follows."""
    manifest = directory.manifest(t)
    entry = manifest.stages[stage]
    path = directory.checkpoint_path(t) / entry.name
    data = path.read_bytes()
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    metadata = msgspec.json.decode(data[8 : 8 + size])["__metadata__"]
    change(tensors, metadata)
    data = save(tensors, metadata)
    path.write_bytes(data)
    if rehash:
        hashed = msgspec.structs.replace(entry, blake3=blake3.blake3(data).hexdigest(), size_bytes=len(data))
        write_manifest(
            directory, msgspec.structs.replace(manifest, stages={**manifest.stages, stage: hashed})
        )


def flip_bits(
    directory: RunDirectory, t: int, stage: int, tensor: str, flips: Sequence[tuple[int, int]], rehash: bool
) -> None:
    """Flip (element, bit) of a tensor in a checkpoint; with `rehash` the manifest's file hash follows."""

    def flip(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        width = tensors[tensor].element_size() * 8
        kind = {32: np.uint32, 64: np.uint64}[width]
        values = tensors[tensor].numpy().reshape(-1).view(kind)
        for element, bit in flips:
            values[element] ^= kind(1 << bit)

    change_stage(directory, t, stage, flip, rehash)
