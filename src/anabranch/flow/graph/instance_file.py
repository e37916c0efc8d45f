"""Reader of the file format of flow instances (JSON, version 1; `docs/reference/json-results.md`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from anabranch.errors import UserError
from anabranch.flow.graph.problem import DataNode, Instance, Relay, link_cost

#: Largest microbatch count or capacity. A greater one is a mistake, and would overflow the exact solver.
COUNT_MAX = 1_000_000
#: Largest cost (seconds, or the instance's unit): greater ones lose hundredths in sums over a path.
COST_MAX = 1e12
#: Most characters of an error message: a value of the file in it may be long.
MESSAGE_MAX = 200

_Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
_Cost = Annotated[float, Meta(ge=0, le=COST_MAX)]
_Seconds = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]


class _Node(Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    compute_s: _Seconds = 0.0


class _DataNode(_Node, kw_only=True):
    microbatches: _Count


class _Relay(_Node, kw_only=True):
    stage: int
    capacity: _Count


class _Link(Struct, forbid_unknown_fields=True):
    start: str = field(name="from")
    end: str = field(name="to")
    cost: _Cost | None = None
    latency_s: _Seconds | None = None
    bandwidth_bps: _Positive | None = None
    latency_back_s: _Seconds | None = None
    bandwidth_back_bps: _Positive | None = None


class _InstanceFile(Struct, forbid_unknown_fields=True):
    version: Literal[1]
    stages: Annotated[int, Meta(ge=1, le=COUNT_MAX)]
    returns: Literal["any", "own"] = field(name="return")
    data_nodes: Annotated[list[_DataNode], Meta(min_length=1)]
    relays: list[_Relay]
    links: list[_Link]
    activation_bytes: _Positive | None = None


class InstanceError(UserError, ValueError):
    """Raised for an instance that cannot be used; the message names the wrong place in the file."""


def parse_instance(text: str | bytes) -> Instance:
    """Instance in the JSON text of a file. Raises InstanceError, which names the first place that is wrong,
    or says why the text is no JSON."""
    try:
        file = msgspec.json.decode(text, type=_InstanceFile)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = place.strip(".`")
        raise _error(where, what) if where else InstanceError(f"not an instance: {what}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InstanceError(f"not JSON: {error}") from None
    except RecursionError:
        raise InstanceError("not an instance: nested too deeply") from None
    stage_of: dict[str, int] = {}
    groups: dict[str, Sequence[_Node]] = {"data_nodes": file.data_nodes, "relays": file.relays}
    for kind, nodes in groups.items():
        for number, node in enumerate(nodes):
            place = f"{kind}[{number}]"
            if not node.id or not node.id.isprintable():
                raise _error(f"{place}.id", f"{node.id!r} is not a name of printable characters")
            if node.id in stage_of:
                raise _error(f"{place}.id", f"{node.id!r} is there twice")
            stage_of[node.id] = node.stage if isinstance(node, _Relay) else 0
            if isinstance(node, _Relay) and not 1 <= node.stage <= file.stages:
                raise _error(f"{place}.stage", f"{node.stage} is outside the stages 1..{file.stages}")
    return Instance(
        file.stages,
        file.returns,
        tuple(DataNode(node.id, node.microbatches) for node in file.data_nodes),
        tuple(Relay(node.id, node.stage, node.capacity) for node in file.relays),
        _links(file, stage_of),
    )


def _links(file: _InstanceFile, stage_of: dict[str, int]) -> dict[tuple[str, str], float]:
    nodes: list[_Node] = [*file.data_nodes, *file.relays]
    compute_s = {node.id: node.compute_s for node in nodes}
    links: dict[tuple[str, str], float] = {}
    for number, link in enumerate(file.links):
        place, hop = f"links[{number}]", (link.start, link.end)
        for key, name in zip(("from", "to"), hop, strict=True):
            if name not in stage_of:
                raise _error(f"{place}.{key}", f"{name!r} is no node")
        start, end = stage_of[link.start], stage_of[link.end]
        if end != (start + 1) % (file.stages + 1):
            raise _error(place, f"a link from stage {start} to stage {end}, which is not the next")
        if hop in links:
            raise _error(place, f"the link {link.start!r} to {link.end!r} is there twice")
        links[hop] = _cost(place, link, (compute_s[link.start], compute_s[link.end]), file.activation_bytes)
    return links


def _cost(place: str, link: _Link, compute_s: tuple[float, float], activation_bytes: float | None) -> float:
    """Cost of a link: as given, or from measurements. place: of the link in the file, for messages.
    compute_s: seconds per microbatch of the nodes at its ends. Raises InstanceError."""
    measured = (link.latency_s, link.bandwidth_bps, link.latency_back_s, link.bandwidth_back_bps)
    if link.cost is not None:
        if measured != (None,) * len(measured):
            raise _error(place, "gives both cost and a measured latency_s or bandwidth_bps")
        return link.cost
    if link.latency_s is None or link.bandwidth_bps is None:
        raise _error(place, "needs cost, or latency_s and bandwidth_bps")
    if activation_bytes is None:
        raise _error(place, "gives bandwidth_bps, so the instance needs activation_bytes")
    latencies_s = (link.latency_s, link.latency_s if link.latency_back_s is None else link.latency_back_s)
    bandwidths_bps = (link.bandwidth_bps, link.bandwidth_back_bps or link.bandwidth_bps)
    try:
        cost = link_cost(compute_s, latencies_s, bandwidths_bps, activation_bytes)
    except ZeroDivisionError:  # bytes per second too few for a float
        cost = math.inf
    if not cost <= COST_MAX:
        raise _error(place, f"costs {cost:g}, more than {COST_MAX:g}")
    return cost


def _error(place: str, problem: str) -> InstanceError:
    """InstanceError whose message is one line, however long or odd the value in `problem` is."""
    text = f"{place}: {problem}"
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return InstanceError(line if len(line) <= MESSAGE_MAX else f"{line[:MESSAGE_MAX]}...")
