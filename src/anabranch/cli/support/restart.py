"""Unattended leading: the leader in a process of its own, started again after an internal failure."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from anabranch.cli.support import own_relays
from anabranch.cli.support.arguments import Line
from anabranch.cli.support.outputs import handled_signals
from anabranch.node.local_swarm.peer_process import signal_at_end_of_parent
from anabranch.operating_system import KILL, SIGNALS_ASK

#: Exit status of a leader that ended by a defect or an exhausted machine (EX_SOFTWARE of sysexits.h).
INTERNAL_FAILURE = 70
#: The same, killed by the kernel for lack of memory, and crashes of a library.
FAILURES = (INTERNAL_FAILURE, -KILL, -signal.SIGSEGV, -signal.SIGABRT, -getattr(signal, "SIGBUS", KILL))
#: First and longest wait (s) before the next start; it doubles from failure to failure.
WAIT_S, WAIT_MAX_S = 1.0, 300.0
#: Time (s) after which a leader counts as recovered, and the next wait is the first again.
RECOVERED_S = 600.0


def add_argument(parser: argparse.ArgumentParser) -> None:
    text = "lead in a process of its own, and start it again after an internal failure (full disk, defect)"
    parser.add_argument("--restart", action="store_true", help=text)


def resume_command(path: Path, args: argparse.Namespace) -> list[str]:
    """Command that leads the run in `path` again, with output options, `--serve` and caps of `args`, without
    `--restart` and `--new-tickets`."""
    command = [sys.executable, "-m", "anabranch", "resume", str(path), "--log-format", args.log_format]
    command += own_relays.options(args.serve) + Line.of(args).words()
    command += ["--no-page"] if args.no_page else []
    command += ["--tensorboard", str(args.tensorboard)] if args.tensorboard is not None else []
    for name in ("wandb", "mlflow", "trackio"):
        command += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    return command


def keep_leading(command: list[str], say: Callable[[str], None], wait_s: float = WAIT_S) -> int:
    """Run `command`, again after each internal failure or crash, until it ends in another way; returns its
    exit status, 128 + N if signal N ended it. say: prints a sentence for the user before each restart.
    wait_s: seconds before the first restart; they double from failure to failure, up to WAIT_MAX_S. A signal
    to stop is handed on to the command, which is then not restarted; if this process is killed, the command
    stops cleanly (on Linux)."""
    stopped = threading.Event()
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, *_: object) -> None:
        stopped.set()
        if process is not None and process.poll() is None and SIGNALS_ASK:
            process.send_signal(number)  # on Windows the terminal's Ctrl+C has reached it

    end_with_me = partial(signal_at_end_of_parent, signal.SIGTERM)
    next_wait_s = wait_s
    with handled_signals(stop):
        while True:
            began = time.monotonic()
            # A session of its own: Ctrl+C in the terminal reaches the leader once, through this process.
            process = subprocess.Popen(
                command,
                start_new_session=True,
                preexec_fn=end_with_me if sys.platform == "linux" else None,
            )
            status = process.wait()
            if status not in FAILURES or stopped.is_set():
                return status if status >= 0 else 128 - status
            if time.monotonic() - began > RECOVERED_S:
                next_wait_s = wait_s
            how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
            say(f"the leading process ended {how}; it is started again in {next_wait_s:g} s")
            if stopped.wait(next_wait_s):
                return status if status >= 0 else 128 - status
            next_wait_s = min(WAIT_MAX_S, 2 * next_wait_s)
