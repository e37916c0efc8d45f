"""Show who contributed what to a run: units of work in committed steps, by person and ticket.

examples:
  anabranch ledger runs/tiny
  anabranch ledger runs/tiny --json     the result for a program (docs/reference/json-results.md)
  anabranch ledger runs/tiny --csv      one line for each peer and stage

The commit log alone decides whose work counts: what a rollback made void counts for nobody. A person is a
name that a member chose, with the ticket that it came with. SHARE is the part of each stage's work, SIGNED
the part of the units behind a signed receipt, AUDITED the units that others computed again and found right.
It needs the founder's run directory, and no model; the run may be going on."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anabranch.cli.support.arguments import add_json, add_run_dir
from anabranch.errors import UserError
from anabranch.observe.wording import counted, plain_lines

if TYPE_CHECKING:
    from anabranch.audit.contributions import Contribution, Ledger

#: Widths of the table's columns in characters; with their spaces 99.
WIDTHS = (14, 12, 16, 13, 8, 6, 6, 7, 9)
HEADS = ("NAME", "TICKET", "STAGE:SHARE", "STEPS", "UNITS", "TOKENS", "SIGNED", "AUDITED", "STATE")
#: Columns that are aligned to the right.
NUMBERS = frozenset(("UNITS", "TOKENS", "SIGNED", "AUDITED"))
#: First characters of a cell that a spreadsheet would take for a formula.
FORMULA = ("=", "+", "-", "@")
COLUMNS = (
    *("peer", "name", "ticket", "ticket_name", "stage", "units", "share", "tokens", "steps", "first_step"),
    *("last_step", "signed_units", "audited_units", "same", "different", "withheld", "unable"),
    *("expired", "convicted", "revoked"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add_json(parser)
    parser.add_argument("--csv", action="store_true", help="print one line for each peer and stage as CSV")


def run(args: argparse.Namespace) -> int:
    from anabranch.api.model_card import read_ledger
    from anabranch.audit.contributions import as_dict
    from anabranch.node.lifecycle import gate_file
    from anabranch.observe.console.progress import ticking

    if args.json and args.csv:
        raise UserError("--json and --csv: choose one of them")
    with ticking("reading the log"):
        found = read_ledger(args.run_dir)
    names = {ticket.key: ticket.name for ticket in gate_file.read(args.run_dir).tickets}
    if args.json:
        print(json.dumps(as_dict(found, names), allow_nan=False))
    elif args.csv:
        print(_csv(found, names), end="")
    else:
        print(plain_lines("\n".join(table(found, names))))
    return 0


def table(found: Ledger, names: Mapping[str, str]) -> list[str]:
    """Lines of at most 99 columns: a summary of the ledger `found`, heads of columns, and a line for each
    person, which is all peers of one name and one ticket. names: key of a ticket -> its name."""
    units = counted(found.stage_units.total(), "unit")
    summary = f"{counted(found.steps, 'committed step')}, {units} of work"
    if found.skipped:
        summary += f"; {found.skipped} skipped"
    if found.rolled_back:
        summary += f"; {counted(found.rolled_back, 'commit')} rolled back, which count for nobody"
    people = found.people()
    lines = [summary, *([_line(HEADS)] if people else [])]
    return [*lines, *(_line(_cells(found, each, names)) for each in people)]


def _line(cells: tuple[str, ...]) -> str:
    texts = []
    for head, width, cell in zip(HEADS, WIDTHS, cells, strict=True):
        text = cell if len(cell) <= width else cell[: width - 1] + "…"
        texts.append(text.rjust(width) if head in NUMBERS else text.ljust(width))
    return " ".join(texts).rstrip()


def _cells(found: Ledger, each: Contribution, names: Mapping[str, str]) -> tuple[str, ...]:
    source, count = each.sources[0], len(each.peers)
    name = source.name or source.peer[:8]
    return (
        f"{name[:8]} ({count})" if count > 1 else name,
        names.get(source.ticket) or source.ticket[:8] or "–",
        " ".join(f"{stage}:{100 * share:.0f}%" for stage, share in found.shares(each).items()) or "–",
        f"{min(each.steps)}..{max(each.steps)}" if each.steps else "–",
        f"{each.total}",
        _short(each.tokens),
        f"{100 * each.signed / each.total:.0f}%" if each.total else "–",
        f"{each.audited}",
        each.state,
    )


def _short(number: int) -> str:
    """A number in at most five characters, for a table: 950, 12.3k, 4.56M."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return str(number)


def _csv(found: Ledger, names: Mapping[str, str]) -> str:
    """The ledger `found` as CSV text: the names of the columns, then a line for each peer and stage. names:
    key of a ticket -> its name."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.rows:
        source, steps = row.sources[0], sorted(row.steps)
        cells = [
            *(source.peer, source.name, source.ticket, names.get(source.ticket, ""), source.stage, row.total),
            *(found.shares(row).get(source.stage, 0.0), row.tokens, len(steps)),
            *((steps[0], steps[-1]) if steps else ("", "")),
            *(row.signed, row.audited, *(row.verdicts[name] for name in COLUMNS[13:18])),
            *(int(row.convicted), row.revoked),
        ]
        writer.writerow([_cell(cell) for cell in cells])
    return text.getvalue()


def _cell(value: object) -> object:
    """The value of a cell as it is, but a text that a spreadsheet would take for a formula gets an apostrophe
    before it: strangers choose such texts."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
