"""Expel a peer from a run, or everybody who came with a ticket.

examples:
  anabranch expel ada runs/tiny --reason "wrong results"    # the member that calls itself ada
  anabranch expel 3f9a02c1 runs/tiny                        # the peer whose id begins so
  anabranch expel lab runs/tiny                             # everybody with this ticket, as `ticket revoke`

An expelled peer is removed and nobody lets its key in again. A new key costs nothing: whoever has a ticket
comes back with one. To keep a guest out, revoke its ticket; --with-ticket does both. On a stopped run the
command takes effect when the run is resumed."""

from __future__ import annotations

import argparse

from anabranch.cli.support.arguments import add_run_dir
from anabranch.cli.ticket import add_reason, checked_reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="PEER|TICKET", help="id or name of a peer, or name of a ticket")
    add_run_dir(parser)
    add_reason(parser)
    parser.add_argument("--with-ticket", action="store_true", help="revoke the peer's ticket, too")


def run(args: argparse.Namespace) -> int:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.node.lifecycle import gate_file
    from anabranch.node.lifecycle.tickets import expel, history_of, revoke_ticket
    from anabranch.observe.console.progress import ticking

    directory, reason = RunDirectory.open(args.run_dir), checked_reason(args.reason)
    record = gate_file.read(args.run_dir)
    if record.ticket(args.target) is not None:
        ticket = revoke_ticket(args.run_dir, args.target, reason)
        print(f"ticket {ticket.name} ({ticket.key[:8]}) is revoked")
        return 0
    with ticking("reading the log"):
        member = history_of(directory).membership.members
    peer = expel(args.run_dir, args.target, reason)
    print(f"peer {peer.id[:8]} is expelled")
    came_with = member[peer.id].ticket if peer.id in member else ""
    if came_with and (known := record.ticket(came_with)) is not None and not known.revoked_at_s:
        if args.with_ticket:
            revoke_ticket(args.run_dir, came_with, reason)
            print(f"its ticket {known.name} ({known.key[:8]}) is revoked")
        else:
            print(
                f"its ticket {known.name} still lets others in: anabranch ticket revoke {known.name} "
                f"{args.run_dir}"
            )
    return 0
