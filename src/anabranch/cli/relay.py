"""Carry the bytes of machines that cannot dial each other, such as two behind home routers; holds no stage.

examples:
  anabranch relay --id --port 7700 --advertise my.host:7700      print this carrier's address, and end
  anabranch relay anabranch1:... --host 0.0.0.0 --port 7700 --advertise my.host:7700
  anabranch relay anabranch1:... --host 0.0.0.0 --port 443 --advertise my.host:443 --max-mbit 50

A carrier needs an address that everybody can dial, and a ticket of the run (any relay ticket). It sees who
talks to whom, when and how much. It can read and alter nothing: the two ends encrypt between themselves.
It ends with the run: when the run's data node says that all steps are committed. While nobody answers it goes
on dialling, and says so ever more rarely. Ctrl+C ends it; the machines then meet through another carrier.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from anabranch.addresses import host_port
from anabranch.cli.support.arguments import PORT, add_listen, check_range
from anabranch.config import Range, address_problem
from anabranch.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ticket", nargs="*", metavar="TICKET", help="ticket that `anabranch start` printed, spaces or not")
    add_listen(parser)
    add("--advertise", default="", metavar="HOST:PORT", help="address at which others dial this carrier")
    add("--max-mbit", type=float, default=0.0, metavar="MBIT", help="most Mbit/s in all; 0: no limit")
    add("--circuits", type=int, default=256, metavar="N", help="most circuits; a link takes two")
    of_peer = "most circuits that one peer opened, or that lead to it"
    add("--circuits-of-peer", type=int, default=64, metavar="N", help=of_peer)
    add("--home", type=Path, metavar="DIR", help="folder for its key (default: ~/.anabranch/carrier)")
    add("--id", action="store_true", help="print the carrier's address for network.advertise, and end")


def run(args: argparse.Namespace) -> int:
    from anabranch.net.connection_limits import CarryLimits
    from anabranch.net.identity import Identity
    from anabranch.net.ticket import parse_ticket
    from anabranch.node.driver.event_loop import run_async
    from anabranch.node.lifecycle.carrier_process import CarrierOptions, CarrierProcess

    check_range("--port", args.port, PORT)
    check_range("--max-mbit", args.max_mbit, Range(0, 10**6))
    check_range("--circuits", args.circuits, Range(1, 4096))
    check_range("--circuits-of-peer", args.circuits_of_peer, Range(1, 4096))
    if problem := address_problem(args.host, args.advertise, "--host", "--advertise"):
        raise UserError(problem)
    home = args.home or Path.home() / ".anabranch" / "carrier"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if args.id:
        if not args.port and not args.advertise:
            raise UserError("--id: name the port with --port, or the address with --advertise")
        identity = Identity.load_or_create(home / "key")
        print(f"{args.advertise or host_port(args.host, args.port)}/{identity.peer_id}")
        return 0
    if not args.ticket:
        raise UserError("a carrier needs a ticket of the run: anabranch relay TICKET")
    ticket = parse_ticket("".join(args.ticket), now_s=time.time())
    if ticket.grant.role == "watch":
        raise UserError("this ticket only permits watching: ask for a relay ticket")
    limits = CarryLimits(args.circuits, args.circuits_of_peer, bytes_per_s=args.max_mbit * 1e6 / 8)
    options = CarrierOptions(ticket, home, args.host, args.port, args.advertise, limits)

    async def carry() -> str:
        return await CarrierProcess(options, lambda text: print(text, flush=True)).run()

    print(run_async(carry()))
    return 0
