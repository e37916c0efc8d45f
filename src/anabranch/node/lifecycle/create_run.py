"""Creation of a run directory, and preparation of the peer that is to found or resume the run in it."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch import PROTOCOL_VERSION
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, load_run_file, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.net.identity import Identity, IdentitySigner, next_incarnation
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.lifecycle.run_checks import check_run, checked_model, resolved, room_warning
from anabranch.node.lifecycle.saved_checkpoint import SavedCheckpoints
from anabranch.node.lifecycle.training_machine import TrainingMachine, run_of
from anabranch.operating_system import write_atomically
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface.events import NEVER_EXPIRES_S, VerifiedCredential
from anabranch.protocol.log.hash_chain import LogError, Position
from anabranch.protocol.log.records import Entry, Genesis, Member, encode_entry, entry_hash
from anabranch.protocol.peer import bootstrap
from anabranch.protocol.peer.peer import Peer
from anabranch.protocol.peer.takeover import Certify
from anabranch.protocol.raft.raft_log import RaftLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anabranch.train.model.sizes import ModelConfig

#: Validity (s) of membership certificates: longer than a run.
CERTIFICATE_S = 30 * 24 * 3600
#: The founder's folder under peers/.
LEADER_NAME = "data-0"

Progress = Callable[[str, int, int], None]


@dataclass
class CreatedRun:
    """A new or resumed run: everything that the founder's process needs to start. directory, run, genesis:
    the run, its run file and its first log entry. identity, incarnation, certificate, peer, machine: of the
    founder, not started yet. history: state of the run after the commit log on this disk (`disk`). newest:
    iteration of the checkpoint that the run continues from; 0 if there is none. notices: sentences for the
    user on damaged or missing checkpoints."""

    directory: RunDirectory
    run: RunConfig
    genesis: Genesis
    identity: Identity
    incarnation: int
    certificate: bytes
    peer: Peer
    machine: TrainingMachine
    history: LogReplay
    newest: int
    disk: RaftStorage
    notices: tuple[str, ...]


def create_run(
    run: RunConfig,
    path: Path,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> RunDirectory:
    """Make a run directory with its corpus and run file. Values that the corpus and imported weights
    determine are added to the run file. progress(label, done, total): called while the corpus is made, with
    bytes. tell: gets sentences about the run, warnings among them. Raises UserError, also if `path` is in
    use. If the corpus or the run file cannot be made, for whatever reason, the directory is removed again, an
    empty folder that was at `path` before with it."""
    from anabranch.train.model.rounds import steps_on_corpus
    from anabranch.train.numerics.numerics_class import configure

    configure(run.compute.threads)
    from anabranch.data.batches import Batches
    from anabranch.data.corpus import materialise
    from anabranch.data.corpus_cache import default_cache
    from anabranch.train.recipes.recipes import epochs_sentence

    run = resolved(run)
    if run.run.note:
        tell(run.run.note)
    model = checked_model(run, tell)
    if warning := room_warning(run, model, path):
        tell(f"warning: {warning}")
    directory = RunDirectory.create(path)
    try:
        corpus = materialise(run.data, directory.corpus, progress, tell, default_cache())
        batches = Batches(corpus, run.batch, run.run.seed)
        tell(
            f"corpus: {corpus.documents:,} documents; {corpus.train.tokens:,} tokens to train on, "
            f"{corpus.held_out.tokens:,} held out; "
            + epochs_sentence(steps_on_corpus(run) * batches.tokens_per_iteration, corpus.train.tokens)
        )
        if run.model.initial_weights != "seed":
            run = with_changes(run, {f"model.{key}": value for key, value in asdict(model).items()})
        elif run.model.vocab_size is None:
            run = with_changes(run, {"model.vocab_size": corpus.vocab_size})
        if run.lora.rank:
            run = with_changes(run, {"lora.frozen": _store_frozen(directory, run, model)})
        write_atomically(directory.run_file, render_run_file(run).encode())
    except BaseException:
        # A partial run directory, in which everything is new, would block the next attempt.
        shutil.rmtree(path, ignore_errors=True)
        raise
    return directory


def lead_run(directory: RunDirectory, address: str) -> CreatedRun:
    """Set up the founder of a run directory, to found the run (if the log is empty) or to resume it. Opens
    the corpus, measures this machine, counts a start of the peer's process, and writes imported weights of a
    new run as checkpoint 0; nothing is sent, and no log entry is written yet. address: host:port that peers
    dial. Raises UserError if the log, the corpus or the checkpoints are damaged, or the run is of another
    protocol version, IdentityError if its key cannot be used."""
    folder = directory.peer(LEADER_NAME)
    disk = RaftStorage(directory.log, folder / "vote.json")
    kept = disk.load()
    history = _history(directory, kept)
    voters = RaftLog(kept.lines, kept.start, kept.founders).voters
    checkpoints = SavedCheckpoints(directory, history, kept.lines, alone=len(voters) <= 1)
    saved = checkpoints.newest_good()
    run = load_run_file(directory.run_file) if history.genesis is None else run_of(history.genesis)
    identity = Identity.load_or_create(folder / "key")
    incarnation = next_incarnation(folder / "incarnation")
    me = Member(
        id=identity.peer_id,
        stage=0,
        incarnation=incarnation,
        numerics_class="",
        capacity=1,
        name=LEADER_NAME,
        address=address,
        disk=kept.nonce,
    )
    machine = TrainingMachine(me, directory.corpus, frozen=directory.frozen)
    machine.prepare(run)
    assert machine.model is not None and machine.batches is not None and machine.corpus is not None
    from anabranch.train.stage.protocol_inputs import model_hash, schedule_of, settings_of

    check_run(run, machine.model)
    member = machine.member(run)
    genesis = history.genesis
    if genesis is None:
        genesis = _found(directory, run, machine, member)
    elif genesis.corpus_fingerprint != machine.corpus.fingerprint:
        raise UserError(
            f"{directory.corpus} is not the corpus that this run began with; restore it from a copy"
        )
    settings = settings_of(run, genesis.run, machine.model, history.epoch or genesis.epoch)
    schedule = schedule_of(run, machine.batches.manifest_hash, machine.batches.tokens_per_iteration)
    certify = _certifier(identity, genesis.run)
    fingerprint = model_hash(machine.model)
    return CreatedRun(
        directory=directory,
        run=run,
        genesis=genesis,
        identity=identity,
        incarnation=incarnation,
        certificate=certify(member, VerifiedCredential("data", NEVER_EXPIRES_S)),
        peer=bootstrap.lead(member, settings, schedule, genesis, kept, saved, fingerprint, certify,
            signer=IdentitySigner(identity)),
        machine=machine,
        history=history,
        newest=saved.t if saved is not None else 0,
        disk=disk,
        notices=tuple(checkpoints.notices),
    )


def _history(directory: RunDirectory, kept: SavedVoterState) -> LogReplay:
    """State of the run by the commit log that this voter kept (`kept`). Raises UserError for damage, or a run
    of another protocol version."""
    try:
        history = fold(kept.lines)
    except LogError as error:
        raise UserError(f"{directory.log}: {error}; restore the file from a copy") from None
    if history.genesis is not None and history.genesis.protocol_version != PROTOCOL_VERSION:
        raise UserError(
            f"{directory.path}: the run uses protocol version {history.genesis.protocol_version}, this "
            f"release {PROTOCOL_VERSION}: install the release that the run uses"
        )
    return history


def _found(directory: RunDirectory, run: RunConfig, machine: TrainingMachine, member: Member) -> Genesis:
    """Make the genesis record (first log entry) of a new run; it is not written to the log here. machine:
    prepared. member: record of the founder. Imported weights that are trained are written as checkpoint 0.
    Raises ConfigError if they cannot be read."""
    from anabranch.checkpoint.hf import import_hf
    from anabranch.data.hub import model_folder
    from anabranch.train.stage.protocol_inputs import Manifest, genesis_of, initial_fingerprints

    assert machine.model is not None and machine.corpus is not None
    run_id = f"{run.run.name}-{secrets.token_hex(6)}"
    initial = None
    if run.model.initial_weights != "seed" and not run.lora.rank:
        _, initial = import_hf(model_folder(run.model.initial_weights))
    fingerprints = initial_fingerprints(run, machine.model, initial)
    manifest = Manifest(machine.corpus.fingerprint, machine.corpus.tokenizer_hash)
    genesis = genesis_of(run, run_id, machine.model, member.id, manifest, member.numerics_class, fingerprints)
    if initial is not None:
        _write_initial(directory, run, machine.model, initial, genesis)
    return genesis


def _store_frozen(directory: RunDirectory, run: RunConfig, model: ModelConfig) -> tuple[str, ...]:
    """Hashes of each stage's frozen weights, which are written into the run directory, for peers to fetch.
    Raises ConfigError if the folder of weights cannot be read."""
    from anabranch.checkpoint.hf import import_hf
    from anabranch.data.hub import model_folder
    from anabranch.train.adapters.frozen import FrozenStore, frozen_of_folder
    from anabranch.train.adapters.lora import adapted

    _, tensors = import_hf(model_folder(run.model.initial_weights))
    return frozen_of_folder(run, adapted(run, model), tensors, FrozenStore(directory.frozen))


def _certifier(identity: Identity, run_id: str) -> Certify:
    """Make the function that issues the certificate of a member of the run `run_id`, signed by `identity`. A
    certificate never outlives or outranks the ticket behind it; a peer that showed none gets b""."""

    def certify(member: Member, credential: VerifiedCredential | None) -> bytes:
        if credential is None:
            return b""
        expires_at_s = min(int(time.time()) + CERTIFICATE_S, credential.expires_at_s)
        return issue_certificate(
            identity,
            run=run_id,
            peer_id=member.id,
            role=credential.role,
            expires_at_s=expires_at_s,
            ticket=credential.ticket,
            quota=credential.quota,
        )

    return certify


def _write_initial(
    directory: RunDirectory,
    run: RunConfig,
    model: ModelConfig,
    initial: Mapping[str, Tensor],
    genesis: Genesis,
) -> None:
    """Write imported weights (`initial`, all tensors by name) as the checkpoint of iteration 0, from which
    every peer fetches its stage. genesis: record by whose hash the checkpoint names its place in the log."""
    from anabranch.protocol.interface.tasks import InitState, Snapshot
    from anabranch.train.workers.workers import make_worker

    base = entry_hash(encode_entry(Entry(index=0, term=1, previous=Position().previous, record=genesis)))
    stages = {}
    for stage in range(run.pipeline.relay_stages + 1):
        worker = make_worker(run, model, stage, _NoBatches() if stage == 0 else None, initial)  # type: ignore[arg-type]
        worker.run(InitState(0))
        result = worker.run(Snapshot(0))
        stages[stage] = ([piece.numpy() for piece in result.outputs], result.fingerprint)  # type: ignore[attr-defined]
    directory.write_checkpoint(0, base, genesis.run, stages)


class _NoBatches:
    """Stand-in for the batches of stage 0, which a snapshot of its state does not need."""

    tokens_per_iteration = 1
