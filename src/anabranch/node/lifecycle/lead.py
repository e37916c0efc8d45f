"""Leading a run: the data node that founded it, from its first event to the end of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from anabranch.background import background
from anabranch.config import ModelSection, NetworkSection
from anabranch.errors import UserError
from anabranch.net.connection_limits import CarryLimits, LineCaps, limits_of_run
from anabranch.net.errors import ListenError
from anabranch.net.handshake import Gate
from anabranch.net.iroh.engine import IrohEngine
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket
from anabranch.node.driver.checkpoint_io import CheckpointIo
from anabranch.node.driver.peer_driver import LivePeer, Outcome
from anabranch.node.lifecycle import control_file, gate_file
from anabranch.node.lifecycle.addresses import advertised, relay_address, remember_port, started_engine
from anabranch.node.lifecycle.create_run import LEADER_NAME, CreatedRun
from anabranch.node.lifecycle.join import door_of
from anabranch.node.lifecycle.shutdown import stop_on_signals
from anabranch.node.lifecycle.tickets import issue_tickets
from anabranch.observe.event_log import EventLog
from anabranch.observe.event_texts import own_event
from anabranch.observe.events import Event, Note, RunFinished, RunStarted
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.peer import bootstrap


async def lead(
    founded: CreatedRun,
    network: NetworkSection,
    port: int,
    on_event: Callable[[Event], None],
    on_ready: Callable[[dict[str, Ticket]], None],
    say: Callable[[str], None],
    new_tickets: bool = False,
    carry: CarryLimits | None = None,
    caps: LineCaps | None = None,
) -> Outcome:
    """Run the leading data node until the run is over or a signal stops it (SIGINT, SIGTERM:
    `stop_on_signals`); returns how it ended. network, port: address to listen on, which may differ from when
    the run was founded; the port is remembered for the next process. on_event: called for each event, the
    beginning and end of leading among them. on_ready: gets the tickets by role. say: prints a sentence for
    the user. new_tickets: True to issue tickets even where former ones still work. carry: limits of what this
    process carries for others (None: the default ones). caps: of its line (None: none). Raises UserError if
    the address cannot be used or iroh cannot start."""
    engine = None
    if network.transport != "tcp":
        relay, must = relay_address(network.iroh_relay), network.transport == "iroh"
        engine = await started_engine(founded.identity, relay, network.advertise, must, say)
    live = _live_peer(founded, engine, network.transport == "iroh", carry, caps)
    live.journal.on_event = on_event
    try:
        await live.links.transport.listen(network.host, port)
    except ListenError as error:
        raise UserError(f"{error}; {_other_port(founded, network)}") from None
    remember_port(founded.directory.peer(LEADER_NAME), port)
    on_ready(issue_tickets(founded, advertised(network, port), new_tickets))
    live.journal.write(_run_started(founded))
    for notice in founded.notices:
        live.journal.write(Note(peer=founded.identity.peer_id, text=notice))
    control = background(control_file.follow(live, founded.directory.path))
    with stop_on_signals(live, lambda: say("stopping after the present step (Ctrl+C again stops at once)")):
        outcome = await live.run(bootstrap.first_door(founded.peer))
    control.cancel()
    finished = RunFinished(peer=founded.identity.peer_id, t=founded.peer.committed, reason=outcome.reason)
    finished = own_event(finished, founded.directory.path)
    with contextlib.suppress(OSError), EventLog(founded.directory.events) as log:
        log.write(finished)
    on_event(finished)
    return outcome


def _other_port(founded: CreatedRun, network: NetworkSection) -> str:
    """Sentence with advice for a port that cannot be used: how to choose another one for this run."""
    if network.port:
        return "set network.port to another one, or to 0 for any free one"
    return (
        "the run's tickets name this port: end the program that uses it, or take another port and issue new "
        f"tickets with `anabranch resume {founded.directory.path} --new-tickets`"
    )


def _live_peer(
    founded: CreatedRun,
    engine: IrohEngine | None,
    only_engine: bool,
    carry: CarryLimits | None,
    caps: LineCaps | None,
) -> LivePeer:
    identity, directory = founded.identity, founded.directory
    batches = founded.machine.batches
    assert batches is not None

    revoked = gate_file.read(directory.path).revocations()
    gate = Gate(founded.genesis.run, identity.peer_id, door_of(founded.peer, revoked))
    settings = founded.peer.ctx.run.settings
    limits = limits_of_run(
        founded.genesis.parameters, settings.largest_share, settings.boundary_bytes, PIECE_BYTES
    )
    live = LivePeer(
        founded.peer,
        founded.machine,
        lambda accept: TcpTransport(
            identity,
            founded.incarnation,
            gate,
            accept,
            limits=limits,
            carry=carry,
            engine=engine,
            only_engine=only_engine,
            caps=caps,
        ),
        founded.certificate,
        directory.events,
        CheckpointIo(
            directory,
            founded.genesis.run,
            founded.run.checkpoint.keep,
            founded.newest,
            founded.run.lora.frozen,
        ),
        founded.disk,
    )
    live.journal.iteration_bytes = batches.iteration_bytes
    live.journal.window_bytes = batches.evaluation_bytes
    return live


def _model_name(model: ModelSection) -> str:
    """Name of a run's model for people: that of its weights' folder, of its architecture, or of its size."""
    if model.initial_weights != "seed":
        return Path(model.initial_weights).name
    return model.architecture or model.size


def _run_started(founded: CreatedRun) -> RunStarted:
    run, genesis = founded.run, founded.genesis
    assert founded.machine.batches is not None
    return RunStarted(
        peer=founded.identity.peer_id,
        run=run.run.name,
        run_id=founded.genesis.run,
        model=_model_name(run.model),
        parameters=genesis.parameters,
        microbatches=run.batch.microbatches,
        tokens_per_iteration=founded.machine.batches.tokens_per_iteration,
        steps=founded.peer.ctx.run.steps,
        numerics=genesis.numerics_class,
        initial_weights_hash=genesis.initial_weights_hash,
        corpus_fingerprint=genesis.corpus_fingerprint,
        tokenizer_hash=genesis.tokenizer_hash,
        stages=genesis.stages,
        from_iteration=founded.newest,
    )
