"""Peer process that keeps all that it sends, as the bytes of its messages and payloads before encryption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from anabranch.node.driver.connections import Connections
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import Message, encode
from anabranch.protocol.messages.pipeline import Forward

#: File of what a peer sent, in its home.
SENT = "sent.bin"


def run_recording_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`. The process appends to `sent.bin`, beside its output, each message and payload that it
    sends (a probe of a line is bytes, all others are tensors), and prints `sent COUNT` for the first payload
    of each number of bytes that a Forward has."""
    sizes: set[int] = set()

    def send(self: Connections, peer: str, message: Message, payload: Payload | None) -> None:
        with open(Path(log).with_name(SENT), "ab") as file:
            file.write(encode(message))
            if payload is not None:
                data = payload if isinstance(payload, bytes) else _bytes_of(payload)
                file.write(data)
                if isinstance(message, Forward) and len(data) not in sizes:
                    sizes.add(len(data))
                    print("sent", len(data), flush=True)
        honest(self, peer, message, payload)

    honest, Connections.send = Connections.send, send  # type: ignore[method-assign]
    run_peer(name, arguments, log, namespace, environment)


def _bytes_of(tensor: Payload) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())  # type: ignore[attr-defined]
