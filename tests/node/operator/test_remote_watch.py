"""The copy of a run's event log on another machine ends with a sentence, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.cli import watch as command
from anabranch.cli.main import main
from anabranch.net.errors import IdentityError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import PeerAddress, Ticket, issue_ticket
from anabranch.node.driver.peer_driver import RUN_OVER, Outcome
from anabranch.node.operator import remote_watch
from anabranch.node.operator.remote_watch import RemoteWatch
from anabranch.observe.page import page_thread
from anabranch.protocol.interface import events as ev

#: Only a test that hangs meets this.
PATIENCE_S = 60.0
OWNER = Identity.generate()


def ticket_for(port: int) -> Ticket:
    here = [PeerAddress(OWNER.peer_id, "127.0.0.1", port)]
    return issue_ticket(OWNER, run="r", role="watch", expires_at_s=int(time.time()) + 3600, peers=here)


def test_the_copy_ends_when_the_data_node_says_that_the_run_is_over(tmp_path: Path) -> None:
    async def scenario() -> Outcome:
        def greet(link: Link) -> None:
            link.start(lambda message, blob: None, lambda reason: None)
            asyncio.get_running_loop().call_soon(lambda: link.close(RUN_OVER))

        founder = TcpTransport(OWNER, 1, Gate("r", OWNER.peer_id, lambda hello: None), greet)
        _, port = await founder.listen("127.0.0.1", 0)
        try:
            watching = RemoteWatch(ticket_for(port), tmp_path, lambda words: None)
            return await asyncio.wait_for(watching.run(), PATIENCE_S)
        finally:
            await founder.close()

    assert asyncio.run(scenario()) == Outcome(RUN_OVER, ok=True, over=True)


def watching_alone(monkeypatch: pytest.MonkeyPatch, home: Path, data: bytes) -> tuple[Outcome | None, bytes]:
    """(How a copy ends that is shown `data` at once, or None if it goes on; its file)."""

    class Client:
        def __init__(self, *_: Any) -> None: ...

        def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
            return [ev.Showed(0, data)]

        def deadline(self) -> float:
            return float("inf")

    monkeypatch.setattr(remote_watch, "EventLogClient", Client)

    async def scenario() -> Outcome | None:
        watching = RemoteWatch(ticket_for(1), home, lambda words: None)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            return await asyncio.wait_for(watching.run(), 0.2)
        return None

    return asyncio.run(scenario()), (home / "events.jsonl").read_bytes()


def test_a_disk_that_takes_a_part_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def few(handle: int, data: memoryview, offset: int) -> int:
        return whole(handle, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", few)
    assert watching_alone(monkeypatch, tmp_path, b"0123456789") == (None, b"0123456789")


def test_a_full_disk_ends_the_copy_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_watch, "write_at", full)
    outcome, _ = watching_alone(monkeypatch, tmp_path, b"0123456789")
    assert outcome is not None and not outcome.ok
    assert "events.jsonl cannot be written" in outcome.reason and "No space left" in outcome.reason


class Page:
    """Stands for the page, and for the user, who ends it by Ctrl+C once told that the run is over."""

    def __init__(self, *_: Any) -> None: ...

    def start(self) -> str:
        return "http://here"

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (IdentityError("the key file is damaged"), "the key file is damaged"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_copy_that_fails_ends_the_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    words: str,
) -> None:
    async def fails(self: RemoteWatch) -> Outcome:
        raise failure

    monkeypatch.setattr(page_thread, "PageThread", Page)
    monkeypatch.setattr(RemoteWatch, "run", fails)
    assert main(["watch", ticket_for(1).text, "--home", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and "Traceback" not in error


def test_the_page_stays_when_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = iter([Outcome(RUN_OVER, ok=True, over=True)])

    def get() -> Outcome:
        for end in ends:
            return end
        raise KeyboardInterrupt

    monkeypatch.setattr(page_thread, "PageThread", Page)
    monkeypatch.setattr(command, "_remote_run", lambda *_: ("r", tmp_path / "events.jsonl"))
    monkeypatch.setattr(command, "queue", SimpleNamespace(SimpleQueue=lambda: SimpleNamespace(get=get)))
    assert main(["watch", ticket_for(1).text]) == 0
    assert "the run is over: the page stays" in capsys.readouterr().out
