"""Removal of units of flow at a `gwtf` node: beyond capacity or demand, or too long without a partner."""

from __future__ import annotations

from anabranch.flow.agents.interface import Send, Setup, Side
from anabranch.flow.agents.reservations import Reservations
from anabranch.flow.gwtf.messages import Cancel, PushBack
from anabranch.flow.gwtf.units import Unit, Units

#: Rounds after which an inflow without a partner is pushed back, and an outflow without a partner cancelled.
#: An outflow waits longer, as the stage before may still request it. Plain choices.
PATIENCE_IN, PATIENCE_OUT = 4, 8
#: Most rounds before a cancelled outflow is requested again; they double from 1. A plain choice.
BACKOFF_ROUNDS = 64


def push_back(units: Units, unit: Unit) -> Send:
    """Drop the inflow `unit` (unit that comes to this node from the previous stage); returns the message that
    tells the previous node. An outflow joined to it stays, without a partner."""
    units.drop_in(unit.link)
    return Send(unit.peer, Side.PREVIOUS, PushBack((unit.link,)))


def cancel(units: Units, out: Unit) -> Send:
    """Drop the outflow `out` (unit that leaves this node to the next stage); returns the message that tells
    the next node. An inflow joined to it stays, without a partner."""
    units.drop_out(out.link)
    return Send(out.peer, Side.NEXT, Cancel((out.link,)))


def shed_excess(setup: Setup, units: Units, reservations: Reservations) -> list[Send]:
    """Give up outflows beyond capacity or demand, with their inflows: first those without a partner, then the
    most expensive. A data node also gives up the newest inflows beyond its demand. Ends the back-off. Returns
    the messages that tell neighbours and sources."""
    units.restart()
    sends: list[Send] = []
    dearest = sorted(units.outs.values(), key=lambda out: (out.partner is not None, -units.cost_to_sink(out)))
    if setup.is_data:
        sends += [cancel(units, out) for out in dearest[: max(0, len(dearest) - units.demand)]]
        sends += [push_back(units, unit) for unit in list(units.ins.values())[units.demand :]]
        return sends + reservations.keep_only(units.outs)
    for out in dearest[: units.excess()]:
        partner = units.ins.get(out.partner) if out.partner is not None else None
        sends.append(cancel(units, out))
        if partner is not None:
            sends.append(push_back(units, partner))
    return sends + reservations.moved()


def drop_unjoined(units: Units) -> list[Send]:
    """Push back inflows and cancel outflows of a relay that had no partner for too long; returns the
    messages. After a cancelled outflow the relay requests no spare unit for a back-off, which doubles."""
    sends: list[Send] = []
    for unit in list(units.ins.values()):
        if unit.partner is None and units.round - unit.round > PATIENCE_IN:
            sends.append(push_back(units, unit))
    for out in list(units.outs.values()):
        if out.partner is None and units.round - out.round > PATIENCE_OUT:
            sends.append(cancel(units, out))
            units.wait_until = units.round + units.backoff
            units.backoff = min(2 * units.backoff, BACKOFF_ROUNDS)
    return sends
