"""Internal failures: any exception, wherever it is raised, ends the peer with a sentence and a report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.background import background
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import TcpTransport
from anabranch.node.driver.crash_report import FORMER_REPORT, REPORT, RESERVE, CrashReport
from anabranch.node.driver.peer_driver import LivePeer, Outcome
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.peer.peer import Peer

OWNER = Identity.from_seed(b"owner".ljust(32))


class Nothing:
    """Nothing is computed here."""


def live_peer(path: Path) -> LivePeer:
    peer = Peer(OWNER.peer_id, 1, OWNER.peer_id, Settings("run", 1, 1, 1, 1))
    gate = Gate("run", OWNER.peer_id, lambda hello: None)
    transport = lambda accept: TcpTransport(OWNER, 1, gate, accept)  # noqa: E731
    return LivePeer(peer, Nothing(), transport, b"", path / "events.jsonl")  # type: ignore[arg-type]


def broken(*_: object) -> None:
    raise OSError(28, "No space left on device")


async def broken_task() -> None:
    broken()


def in_an_event(live: LivePeer) -> None:
    live.watchers.append(broken)
    live.handle(ev.Wake())


def in_a_callback(live: LivePeer) -> None:
    asyncio.get_running_loop().call_soon(broken)


def in_a_task(live: LivePeer) -> None:
    background(broken_task())


def on_a_thread(live: LivePeer) -> None:
    live._disk.submit(broken, lambda _: None)


def in_the_answer_of_a_thread(live: LivePeer) -> None:
    live._disk.submit(lambda: None, broken)


def run(path: Path, fail: Callable[[LivePeer], None]) -> Outcome:
    async def scenario() -> Outcome:
        live = live_peer(path)
        asyncio.get_running_loop().call_later(0.05, fail, live)
        return await asyncio.wait_for(live.run(), 30.0)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "fail", [in_an_event, in_a_callback, in_a_task, on_a_thread, in_the_answer_of_a_thread]
)
def test_any_exception_ends_the_peer_with_a_report(tmp_path: Path, fail: Callable[[LivePeer], None]) -> None:
    outcome = run(tmp_path, fail)
    assert not outcome.ok and outcome.internal
    assert "No space left on device" in outcome.reason and REPORT in outcome.reason
    assert "in broken" in (tmp_path / REPORT).read_text()
    assert not (tmp_path / RESERVE).exists()


def test_a_report_that_cannot_be_written_does_not_keep_the_peer_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anabranch.node.driver.crash_report.os.pwrite", broken)
    outcome = run(tmp_path, in_an_event)
    assert not outcome.ok and "its report could not be written" in outcome.reason
    assert "in broken" in capsys.readouterr().err


def test_the_report_before_is_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        report = CrashReport(tmp_path)
        assert (tmp_path / RESERVE).stat().st_blocks > 0, "the space is not reserved"
        report.write(text)
        report.close()
    assert "second" in (tmp_path / REPORT).read_text() and "first" in (tmp_path / FORMER_REPORT).read_text()


def test_errors_of_connections_do_not_end_the_peer(tmp_path: Path) -> None:
    def fail(live: LivePeer) -> None:
        loop = asyncio.get_running_loop()
        context = {"message": "x", "exception": RuntimeError("its bytes"), "transport": object()}
        loop.call_exception_handler(context)
        live.abort("still alive")

    outcome = run(tmp_path, fail)
    assert outcome.reason == "still alive" and not (tmp_path / REPORT).exists()
