"""Check whether this machine can lend to a run or lead one; each line says what was found and what to do.

examples:
  anabranch doctor                                  check this machine alone
  anabranch doctor run.toml                         also its speed at each stage, as leader of this run
  anabranch doctor anabranch1:...                   also try each way to the run's peers: direct, carried
  anabranch doctor anabranch1:... --host 0.0.0.0 --port 7700 --advertise my.host:7700
                                                    also have the run's leader dial this machine
  anabranch doctor --host 0.0.0.0 --port 7700       check that others could dial it at that address
  anabranch doctor --peer my.host:7700              check that a run's data node is reachable
  anabranch doctor --answer --host 0.0.0.0          answer other machines' checks; prints an address and code
  anabranch doctor --peer my.host:7701/CODE         measure the link to such a machine, and what it sees

A line is green (good), yellow (may be a problem) or red (will not work), with a remedy. The exit status is 1
if one is red. Nothing is sent to any machine but the named peers. Bandwidth, clock offset, NAT and
reachability from outside are measured with a machine that answers; the type of NAT needs two of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

from anabranch.cli.support.arguments import LOOPBACK, add_json, add_listen
from anabranch.errors import UserError
from anabranch.observe.wording import plain

_COLOURS = {"green": "\033[32m", "yellow": "\033[33m", "red": "\033[31m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "measure the stages of this run, or try every way to the peers that this ticket names"
    add("run", nargs="?", default="", metavar="RUN.toml|TICKET", help=what)
    add_listen(parser)
    what = "with a ticket: addresses at which the run's leader is to dial this machine, as for `join`"
    add("--advertise", default="", metavar="HOST:PORT", help=what)
    what = "dial this peer; with the code that `doctor --answer` printed there, also measure the link"
    add("--peer", action="append", default=[], metavar="HOST:PORT[/CODE]", help=what)
    add("--answer", action="store_true", help="answer the checks of other machines")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.answer:
        return _answer(args.host, args.port)
    from anabranch.config import address_problem, load_run_file
    from anabranch.net.ticket import TICKET_PREFIX, parse_ticket
    from anabranch.node.diagnostics.check_result import RED
    from anabranch.node.diagnostics.doctor import examine
    from anabranch.observe.console.progress import Ticker
    from anabranch.observe.console.step_line import wants_colour

    by_ticket = args.run.strip().startswith(TICKET_PREFIX)
    ticket = parse_ticket(args.run, now_s=time.time()) if by_ticket else None
    config = load_run_file(Path(args.run)) if args.run and not by_ticket else None
    if args.advertise and (problem := address_problem(args.host, args.advertise, "--host", "--advertise")):
        raise UserError(problem)
    where = args.host, args.port
    if config is not None and where == (LOOPBACK, 0):  # the run file says where its leader listens
        where = config.network.host, config.network.port
    coloured = wants_colour(sys.stdout)
    results = []
    with Ticker() as ticker:
        for result in examine(config, Path.cwd(), *where, args.peer, ticker.begin, ticket, args.advertise):
            ticker.end()
            results.append(result)
            if not args.json:
                verdict = f"{result.verdict:<6}"
                shown = f"{_COLOURS[result.verdict]}{verdict}\033[0m" if coloured else verdict
                remedy = f"; {result.repair}" if result.repair else ""
                print(f"{shown}  {result.name}: {plain(result.found)}{plain(remedy)}", flush=True)
    if args.json:
        print(json.dumps([asdict(result) for result in results]))
    return 1 if any(result.verdict == RED for result in results) else 0


def _answer(host: str, port: int) -> int:
    """Serve the link tests of other machines' `anabranch doctor` until Ctrl+C, after printing the command
    that they need; returns the exit status, 0. Raises UserError if it cannot listen."""
    from anabranch.node.diagnostics.link_test import MAX_BYTES, MAX_S, LinkTestServer

    code = secrets.token_hex(4)

    async def serve() -> None:
        server = LinkTestServer(code)
        try:
            found = await server.start(host, port)
        except (OSError, OverflowError) as error:
            where = f"{host} port {port}"
            raise UserError(f"cannot listen on {where}: {error}; choose another --port or --host") from None
        print(f"on another machine: anabranch doctor --peer YOUR.ADDRESS:{found}/{code}", flush=True)
        print(f"a test takes at most {MAX_S:g} s and {MAX_BYTES >> 20} MiB; Ctrl+C ends this", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        print()
    return 0
