"""Service definitions: the ticket is in a file of its owner, and in no command line."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import stat
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from anabranch.cli.join import ticket_text
from anabranch.cli.main import build_parser, main
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket

#: Namespace of the elements of a Windows task.
TASK = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


@pytest.fixture
def ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path / "my home"))
    owner = Identity.generate()
    door = [PeerAddress(owner.peer_id, "127.0.0.1", 1)]
    expires_at_s = int(time.time()) + 60
    return issue_ticket(owner, run="tiny-1", role="relay", expires_at_s=expires_at_s, peers=door).text


@pytest.mark.parametrize("system", ["systemd", "launchd", "windows"])
def test_a_definition_joins_with_the_ticket_of_a_file(
    system: str, ticket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "--for", system, ticket, "--", "--nice", "10"]) == 0
    file = tmp_path / "my home" / ".anabranch" / "tickets" / "tiny-1"
    said = capsys.readouterr()
    assert ticket not in said.out and str(file) in said.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if system == "systemd":
        [line] = [line for line in said.out.splitlines() if line.startswith("ExecStart=")]
        words = shlex.split(line.partition("=")[2])
    elif system == "launchd":
        words = plistlib.loads(said.out.encode())["ProgramArguments"]
    else:
        task = ElementTree.fromstring(said.out)
        program, arguments = (task.findtext(f".//{TASK}{tag}", "") for tag in ("Command", "Arguments"))
        words = [program, *shlex.split(arguments)]
    parsed = build_parser(words[1:]).parse_args(words[1:])
    assert (parsed.command, parsed.nice, parsed.quiet) == ("join", 10, True)
    assert ticket_text(parsed.ticket, parsed.ticket_file, 0.0) == ticket


def test_windows_starts_a_failed_task_again_and_never_ends_it(
    ticket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USERNAME", "J\u00f6rg & co")
    assert main(["service", "--for", "windows", ticket, "--ticket-file", str(tmp_path / "t")]) == 0
    text = capsys.readouterr().out
    task = ElementTree.fromstring(text)
    settings = task.find(f"{TASK}Settings")
    assert text.isascii() and settings is not None
    assert settings.findtext(f"{TASK}RestartOnFailure/{TASK}Interval") == "PT1M"
    assert settings.findtext(f"{TASK}RestartOnFailure/{TASK}Count") == "255"
    assert settings.findtext(f"{TASK}StartWhenAvailable") == "true"
    assert settings.findtext(f"{TASK}ExecutionTimeLimit") == "PT0S"
    assert task.findtext(f".//{TASK}LogonTrigger/{TASK}UserId") == "J\u00f6rg & co"


def test_another_ticket_of_the_run_takes_the_place_of_the_first(ticket: str, tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text("an older one, which others could read")
    file.chmod(0o644)
    assert main(["service", ticket, "--ticket-file", str(file)]) == 0
    assert file.read_text().strip() == ticket and stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(ticket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", ticket]) == 0
    unit = tmp_path / "anabranch.service"
    unit.write_text(capsys.readouterr().out)
    result = subprocess.run(["systemd-analyze", "verify", "--user", unit], capture_output=True, text=True)
    assert "anabranch.service" not in result.stderr, result.stderr
