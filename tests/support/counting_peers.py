"""Peer process that prints what guests cost it: states read from the disk, searches for a stage, reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from anabranch.node.driver.checkpoint_io import CheckpointIo
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.protocol.context.outbox import Outbox
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import Attempt, Message
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog


def run_counting_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`. The process prints `read STAGE` for each state of a checkpoint that it reads, `placed
    PEER` for each search for the stage of a joiner, and `reported PEER COUNTS` for each report of states,
    COUNTS being 1 if the leader keeps what the peer reported, and `ordered STAGE T NUMBER` for each message
    of a reduce attempt."""

    def printing(owner: type, method: str, told: Callable[..., str]) -> None:
        honest = getattr(owner, method)

        @functools.wraps(honest)
        def counted(self: Any, *arguments: Any) -> Any:
            result = honest(self, *arguments)
            print(told(self, *arguments), flush=True)
            return result

        setattr(owner, method, counted)

    printing(CheckpointIo, "read", lambda self, t, stage: f"read {stage}")
    printing(Admission, "_stage_for", lambda self, joiner: f"placed {joiner.id}")
    kept: Callable[..., str] = lambda self, peer, message: f"reported {peer} {int(peer in self._states._of)}"  # noqa: E731
    printing(SnapshotCatalog, "on_holds", kept)

    def ordered(self: Outbox, peer: str, message: Message, payload: Payload | None = None) -> None:
        if isinstance(message, Attempt):
            print("ordered", message.stage, message.fence.t, message.attempt.number, flush=True)
        send(self, peer, message, payload)

    send, Outbox.send = Outbox.send, ordered  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)
