"""Pictures of simulated runs: what they say, and that they can be read whatever the figures are."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from anabranch.observe.plots.iteration_timeline import Repair, Span, draw_timeline
from anabranch.observe.plots.policy_plots import draw_bars, draw_throughput

MINUS = "\N{MINUS SIGN}"


def words(path: Path) -> str:
    """Matplotlib writes each text as a comment before its outlines."""
    return path.read_text("utf-8")


def test_bars_begin_at_nothing_however_wide_an_interval_is(tmp_path: Path) -> None:
    out = tmp_path / "bars.svg"
    draw_bars({"auction": (32.7, 3.1, 19.0), "restart": (59.5, 235.1, 17.6)}, "a title", out)
    text = words(out)
    assert f"<!-- {MINUS}" not in text and "<!-- 300 -->" not in text
    assert "<!-- 59.5 -->" in text and "<!-- \xb1 235.1 -->" in text and "<!-- a title -->" in text


def test_a_policy_that_did_not_finish_is_told(tmp_path: Path) -> None:
    out = tmp_path / "bars.svg"
    draw_bars({"auction": (32.7, 0.0, 19.0), "restart": (math.nan, 0.0, math.nan)}, "a title", out)
    assert "<!-- finish -->" in words(out) and "nan" not in words(out)
    draw_bars({"restart": (math.nan, 0.0, math.nan)}, "a title", out)
    assert "<!-- finish -->" in words(out)


def test_a_throughput_without_rows_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "throughput.svg"
    draw_throughput({"auction": [(10.0, 16.0, 8.0, 2)], "restart": []}, 1000, "a title", out)
    assert "<!-- auction: 100 tokens/s -->" in words(out) and "<!-- restart: 0 tokens/s -->" in words(out)


def test_a_crash_and_its_repair_are_in_the_timeline(tmp_path: Path) -> None:
    out = tmp_path / "timeline.svg"
    spans = [Span("r0", "gone", 12.0, 15.0), Span("r1", "forward", 11.0, 13.0)]
    spans.append(Span("r1", "reduce", 14.0, 15.0))
    draw_timeline(spans, ["r0", "r1"], "a title", out, {"fill": 5.0}, [Repair(12.1, "r0", "r1")], 10.0)
    text = words(out)
    for word in ("forward", "sending for the reduce", "gone", "crash", "idle", "fill 5.0 s"):
        assert f"<!-- {word} -->" in text, word
    assert "<!-- repair: from the lost node to its replacement -->" in text
    draw_timeline(spans[1:], ["r0", "r1"], "a title", out)
    assert "repair" not in words(out) and "<!-- crash -->" not in words(out)


def test_names_are_no_markup_of_the_drawing(tmp_path: Path) -> None:
    """Names stand in comments of the SVG file, beside the outlines of their letters."""
    script = "<script>document.title = 'broken'</script>"
    names = [f"--><g/>{script}<!--", f"]]>{script}", f'" onload="x" {script}']
    out = tmp_path / "timeline.svg"
    spans = [Span(name, "forward", 1.0, 2.0, name) for name in names]
    draw_timeline(spans, names, names[0], out, {names[1]: 1.0}, [Repair(1.5, names[0], names[1], names[2])])
    elements = list(ElementTree.parse(out).iter())
    assert len(elements) > 20 and not any(element.tag.endswith("script") for element in elements)
    assert not any(name.startswith("on") for element in elements for name in element.attrib)


@pytest.mark.slow
def test_a_thousand_nodes_fit_on_a_page(tmp_path: Path) -> None:
    nodes = [f"r{number}" for number in range(1000)]
    out = tmp_path / "timeline.svg"
    draw_timeline([Span(node, "forward", 0.0, 1.0) for node in nodes[::40]], nodes, "a title", out)
    height_pt = float(words(out).partition('height="')[2].partition("pt")[0])
    assert height_pt < 72 * 30
    assert "<!-- r0 -->" in words(out) and "<!-- r1 -->" not in words(out)


def _height(words: str, label: str) -> float:
    """Where a label stands in a picture (points from above)."""
    found = re.search(rf"<!-- {re.escape(label)} -->\s*<g [^>]*translate\([\d.]+ ([\d.]+)\)", words)
    assert found, label
    return float(found[1])


def test_names_of_short_phases_do_not_stand_in_each_other(tmp_path: Path) -> None:
    out = tmp_path / "timeline.svg"
    phases = {"fill": 0.06, "steady": 0.3, "drain": 0.02, "reduce": 0.02}
    draw_timeline([Span("r0", "forward", 0.0, 0.4)], ["r0"], "a title", out, phases)
    words = out.read_text("utf-8")
    low = _height(words, "steady 0.30 s")
    assert _height(words, "drain 0.02 s") == _height(words, "fill 0.06 s") == low
    assert _height(words, "a title") < _height(words, "reduce 0.02 s") < low
