"""Print a service definition that lends this machine whenever it is on, for systemd, launchd or Windows.

examples:
  anabranch service anabranch1:... > ~/.config/systemd/user/anabranch.service
  anabranch service --for launchd anabranch1:... > ~/Library/LaunchAgents/org.anabranch.join.plist
  anabranch service --for windows anabranch1:... > task.xml
  anabranch service anabranch1:... -- --hours 22:00-07:00 --nice 10

Nothing is installed; Windows takes the task's file by `schtasks /Create /TN anabranch /XML task.xml`. The
ticket is written into a file that only you can read, which the service names: other users of a machine can
read command lines. The same command with another ticket of the run replaces it. Options after TICKET -- are
those of `anabranch join`. Only the systemd unit was checked, with `systemd-analyze verify`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from anabranch.errors import os_errors_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = "kind of service (default: that of this system)"
    parser.add_argument("ticket", metavar="TICKET", help="ticket of the run, as one word")
    parser.add_argument("--for", dest="system", choices=("systemd", "launchd", "windows"), help=kind)
    file = "file for the ticket (default: ~/.anabranch/tickets/RUN)"
    parser.add_argument("--ticket-file", type=Path, metavar="FILE", help=file)
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of `anabranch join`")


def run(args: argparse.Namespace) -> int:
    import time

    from anabranch.api.volunteer import home_of
    from anabranch.net.ticket import parse_ticket
    from anabranch.operating_system import write_atomically

    ticket = parse_ticket(args.ticket, now_s=time.time())
    home = home_of(ticket)
    file: Path = (args.ticket_file or home.parent / "tickets" / home.name).absolute()
    with os_errors_named(f"cannot write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, args.ticket.encode() + b"\n", 0o600)
    print(f"the ticket is in {file}, which only you can read", file=sys.stderr)
    program = os.path.abspath(shutil.which("anabranch") or sys.argv[0])
    words = [program, "join", "--ticket-file", str(file), *args.options, "--quiet"]
    of_system = {"darwin": "launchd", "win32": "windows"}
    print(
        {"systemd": _systemd, "launchd": _launchd, "windows": _windows}[
            args.system or of_system.get(sys.platform, "systemd")
        ](words)
    )
    return 0


def _systemd(words: list[str]) -> str:
    """systemd unit of one user that runs the command `words` (`systemctl --user enable --now anabranch`)."""
    command = " ".join(f'"{word}"' if " " in word else word for word in words).replace("%", "%%")
    return (
        "[Unit]\nDescription=anabranch: lend this machine to a run\n\n"
        f"[Service]\nExecStart={command}\nRestart=on-failure\nRestartSec=60\nKillSignal=SIGINT\n"
        "TimeoutStopSec=90\nCPUWeight=10\nIOSchedulingClass=idle\n\n"
        "[Install]\nWantedBy=default.target"
    )


def _launchd(words: list[str]) -> str:
    """launchd agent (XML) of one user that runs the command `words`; started by `launchctl load FILE`."""
    arguments = "\n".join(f"    <string>{escape(word)}</string>" for word in words)
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0"><dict>
  <key>Label</key><string>org.anabranch.join</string>
  <key>ProgramArguments</key><array>
{arguments}
  </array>
  <key>RunAtLoad</key><true/>
  <key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>
</dict></plist>"""


def _windows(words: list[str]) -> str:
    """Windows task (XML of the Task Scheduler) that runs the command `words` at each logon of this user, for
    as long as it takes, and again a minute after each failure; made by `schtasks /Create /XML FILE`. Other
    letters than ASCII are references, so that no console's encoding matters."""
    name = os.environ.get("USERNAME", "")
    user = f"<UserId>{escape(name)}</UserId>" if name else ""
    text = f"""<?xml version="1.0"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled>{user}</LogonTrigger></Triggers>
  <Principals><Principal id="Author">{user}<LogonType>InteractiveToken</LogonType>
    <RunLevel>LeastPrivilege</RunLevel></Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <StartWhenAvailable>true</StartWhenAvailable>
    <RestartOnFailure><Interval>PT1M</Interval><Count>255</Count></RestartOnFailure>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
  </Settings>
  <Actions Context="Author"><Exec><Command>{escape(words[0])}</Command>
    <Arguments>{escape(subprocess.list2cmdline(words[1:]))}</Arguments></Exec></Actions>
</Task>"""
    return text.encode("ascii", "xmlcharrefreplace").decode()
