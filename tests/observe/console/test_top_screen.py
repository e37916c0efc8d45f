"""The terminal view fits its screen, whatever the run, and says what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from anabranch.cli.main import main
from anabranch.observe import events as log
from anabranch.observe.console.top_screen import screen
from anabranch.observe.event_log import EventLog
from anabranch.observe.view.run_view import View
from support.run_events import begin, step, view_of


def lines_of(view: View, width: int, height: int) -> list[str]:
    return screen(view, width, height).plain.split("\n")


def test_stages_peers_figures_and_what_happened_are_there() -> None:
    view = view_of(*(step(t) for t in range(1, 9)))
    view.take(log.PeerRemoved(time=111.0, peer="d0", subject="b", stage=1, reason="Connection refused"))
    lines = lines_of(view, 80, 24)
    assert len(lines) == 24
    assert lines[0].startswith(" tiny ") and "step 8 of 10" in lines[1]
    stages = {line[:9].strip(): line for line in lines if line.startswith((" data", " stage"))}
    assert "● name-a 2" in stages["stage 1"] and "× name-b" in stages["stage 1"]
    assert set(stages) == {"data", "stage 1", "stage 2"}
    assert "name-b is gone from stage 1 (Connection refused)" in "\n".join(lines)


def test_bytes_of_a_token_are_of_all_peers_and_committed_steps() -> None:
    """Two peers sent 40,960 and 4,096 bytes in a step of 64 tokens, and nothing in the next one."""
    view = view_of(step(1))
    assert "sent a token" not in lines_of(view, 80, 24)[0]  # nothing was measured yet
    for peer, activations, reduce in (("a", 32_768, 8_192), ("x", 4_096, 0)):
        view.take(log.Timing(peer=peer, t=1, stage=1, bytes_activations=activations, bytes_reduce=reduce))
    view.take(step(2))
    assert "  352 bytes sent a token" in lines_of(view, 80, 24)[0]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("width", "height"), [(60, 16), (80, 24), (200, 60)])
def test_no_run_is_too_large_or_too_strange(width: int, height: int) -> None:
    view = view_of()
    view.take(log.RunStarted(
        run="運" * 60, run_id="", model="m" * 500, parameters=1, microbatches=1, steps=9,
        tokens_per_iteration=1, numerics="", initial_weights_hash="",
        corpus_fingerprint="", tokenizer_hash="", stages=300,
    ))  # fmt: skip
    for peer in range(500):
        name = "名\u202e\x1b[2J" * 20
        view.take(log.PeerJoined(
            subject=f"p{peer}", name=name, region="", role="", stage=peer % 300, numerics_class=""
        ))  # fmt: skip
        view.take(log.Note(peer=f"p{peer}", text="word " * 60))
    for shown in (view, View()):
        lines = lines_of(shown, width, height)
        assert len(lines) == height
        assert max(map(cell_len, lines)) <= width
        assert not any(character in "".join(lines) for character in "\x1b\u202e")


def test_one_look_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "version").write_text("1\n")
    with EventLog(tmp_path / "events.jsonl") as file:
        for event in [*begin(), step(1)]:
            file.write(event)
    assert main(["top", str(tmp_path)]) == 0
    assert "step 1 of 10" in capsys.readouterr().out


@pytest.mark.parametrize("t", [1 << 53, -(1 << 53)])
def test_a_step_beyond_the_run_does_not_make_a_bar_of_all_memory(t: int) -> None:
    view = view_of(log.Rollback(time=111.0, peer="d0", t=t))
    assert cell_len(lines_of(view, 80, 24)[1]) <= 80
