"""Screen of `anabranch top`: a run as lines of text, for terminals from 80×24 on."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from anabranch.observe.view.peers import PRESENT
from anabranch.observe.view.run_view import View
from anabranch.observe.view.time_series import STEP_COLUMNS, Point
from anabranch.observe.wording import duration, number

_BARS = "▁▂▃▄▅▆▇█"
#: State -> mark and colour of a peer; colour is never the only sign.
_MARKS = {
    "active": ("●", "green"), "idle": ("○", "bright_black"), "joining": ("↓", "cyan"),
    "suspect": ("?", "yellow"), "lost": ("!", "red"), "crashed": ("×", "red"),
}  # fmt: skip
_SUBJECTS = {"trouble": "red", "repair": "green", "crew": "cyan", "progress": "", "note": "bright_black"}
#: Seconds for which a crashed peer remains visible.
LINGER_S = 20.0
#: Latest steps over which figures that vary from step to step are averaged.
RECENT = 8


def screen(view: View, width: int, height: int) -> Text:
    """Screen of a run's state: exactly `height` lines (at least 12) of at most `width` columns (at least
    40)."""
    run = view.state.get("run", "")
    steps = view.steps.items
    lines = [_title(view, width), _progress(run, width), _figures(view, steps), _split(steps)]
    for name, column, form in (("loss", "loss", ".3f"), ("tok/s", "tps", ",.0f")):
        lines.append(_spark(name, _column(steps, column), form, width))
    lines.append(Text())
    room = height - len(lines) - 1
    stages = _stages(view, width, max(2, room - min(6, len(view.story.items))))
    story = _story(view, width, room - len(stages))
    lines += [*stages, Text("─" * width, style="bright_black"), *story]
    lines += [Text() for _ in range(height - len(lines))]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[:height])


def _title(view: View, width: int) -> Text:
    run, totals = view.state.get("run", ""), view.state.get("totals", "")
    name = run.get("name", "waiting for the run")
    phase = run.get("phase", "")
    line = Text.assemble((f" {name} ", "bold reverse"), f"  {run.get('model', '')}")
    style = {"training": "green", "waiting": "yellow"}.get(phase, "")
    why = run.get("why", "")
    words = why if why.startswith(f"{phase} ") else f"{phase}: {why}" if why else phase
    line.append(f"  {words}", style=style)
    sent, tokens = totals.get("sent", 0), totals.get("tokens", 0)
    # Payloads that all peers sent, for each token of the committed steps, as the page has them.
    return line.append(f"  {sent / tokens:,.0f} bytes sent a token") if sent and tokens else line


def _progress(run: Mapping[str, Any], width: int) -> Text:
    t, steps = run.get("t", 0), run.get("steps", 0)
    eta = run.get("eta_s")
    words = f" step {t:,} of {steps:,}"
    end = f"  {duration(eta)} to go " if eta else " "
    room = max(4, width - len(words) - len(end) - 3)
    done = round(room * min(1.0, max(0.0, t / steps))) if steps > 0 else 0
    line = Text(words + "  ", style="bold")
    return line.append("━" * done, style="cyan").append("━" * (room - done), style="bright_black").append(end)


def _figures(view: View, steps: Sequence[Point]) -> Text:
    totals = view.state.get("totals", "")
    evaluations = view.evaluations.items
    parts = [
        f"loss {number(steps[-1][2] if steps else None, missing='–')}",
        f"held out {number(evaluations[-1][2] if evaluations else None, missing='–')}",
        f"{_mean(_column(steps, 'tps')):,.0f} tok/s",
        f"{view.peers.present()} peers",
        f"{int(totals.get('repairs', 0))} repaired",
        f"{int(totals.get('removals', 0))} crashed",
    ]
    return Text(" " + "  ".join(parts))


def _split(steps: Sequence[Point]) -> Text:
    parts = {name: _mean(_column(steps, name)) for name in ("compute", "transfer", "reduce", "waiting")}
    total = sum(parts.values())
    line = Text(f" iteration {_mean(_column(steps, 'seconds')):.2f} s")
    for name, style in (
        ("compute", "green"), ("transfer", "blue"), ("reduce", "magenta"), ("waiting", "bright_black"),
    ):  # fmt: skip
        if total:
            line.append(f"  {name} ").append(f"{100 * parts[name] / total:.0f} %", style=style)
    return line


def _spark(name: str, values: list[float], form: str, width: int) -> Text:
    room = max(8, width - 28)
    shown = [
        _mean(values[at * len(values) // room : (at + 1) * len(values) // room], 10**9) for at in range(room)
    ]
    shown = shown if len(values) > room else values
    if len(shown) < 2:
        return Text(f" {name:<6}")
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    bars = "".join(_BARS[round((value - low) * scale)] for value in shown)
    return (
        Text(f" {name:<6}").append(bars, style="cyan").append(f" {low:{form}}–{high:{form}}", "bright_black")
    )


def _stages(view: View, width: int, room: int) -> list[Text]:
    """At most `room` lines, one for each stage with its peers; peers and stages for which there is no room
    are only counted."""
    stages = int(view.state.get("run", "").get("stages", 0))
    rows: list[list[dict[str, Any]]] = [[] for _ in range(min(stages, 999) + 1)]
    for node in view.state.sections.get("nodes", {}).values():
        here = node["state"] in PRESENT or (
            node["state"] == "crashed" and view.time - node["since"] < LINGER_S
        )
        if here and 0 <= node["stage"] < len(rows):
            rows[node["stage"]].append(node)
    lines = []
    for stage, nodes in enumerate(rows):
        line = Text(f" {'data' if stage == 0 else f'stage {stage}':<9}", style="bold")
        nodes.sort(key=lambda node: (node["state"] == "active", node["name"]))
        for at, node in enumerate(nodes):
            mark, style = _MARKS["idle" if node["state"] == "active" and not node["share"] else node["state"]]
            share = f" {node['share']:g}" if node["state"] == "active" else ""
            part = f"{node['name'][:14]}{share}  "
            if line.cell_len + len(part) + 10 > width and at < len(nodes) - 1:
                line.append(f"and {len(nodes) - at} more", style="bright_black")
                break
            line.append(f"{mark} ", style=style).append(part)
        lines.append(line)
    if len(lines) > room:
        more = Text(f" and {len(lines) - room + 1} stages more", style="bright_black")
        lines = [*lines[: room - 1], more]
    return lines


def _story(view: View, width: int, room: int) -> list[Text]:
    """Lines with the latest sentences of the story that fit into `room` lines, in order; a sentence that is
    longer than a line takes two, and is cut after them."""
    lines: list[Text] = []
    began = float(view.state.get("run", "").get("began") or 0.0)
    for time, subject, _, text in reversed(view.story.items[-room:] if room > 0 else []):
        at = f" {duration(float(time) - began):>8}  "
        room_for_text = max(1, width - len(at))
        broken = textwrap.wrap(str(text), room_for_text, max_lines=2, placeholder=" …") or [""]
        said = [Text(at if first == 0 else " " * len(at), "bright_black") for first in range(len(broken))]
        for line, words in zip(said, broken, strict=True):
            line.append(words, style=_SUBJECTS.get(str(subject), ""))
        if len(lines) + len(said) > room:
            break
        lines = [*said, *lines]
    return lines


def _column(steps: Sequence[Point], name: str) -> list[float]:
    at = STEP_COLUMNS.index(name)
    return [value for point in steps if (value := point[at]) is not None]


def _mean(values: Sequence[float], last: int = RECENT) -> float:
    recent = values[-last:]
    return sum(recent) / len(recent) if recent else 0.0

