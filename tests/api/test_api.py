"""The Python interface: a run from its creation to its export, by nothing else; names, types, examples."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch
from anabranch.api import model, run, volunteer
from anabranch.observe.console import progress

#: Shape of a run that trains in a second.
TINY = {
    "model": {"dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24},
    "data": {"source": "text", "tokenizer": "bytes"},
    "batch": {"microbatches": 4, "rows": 1, "sequence": 16},
    "pipeline": {"stages": 1},
    "fleet": {"data_nodes": 1, "relays": 2},
    "evaluation": {"every": 4, "windows": 1},
    "checkpoint": {"every": 2},
    "compute": {"device": "cpu"},
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    return folder


@pytest.mark.slow
def test_a_run_by_the_interface_alone(tmp_path: Path, texts: Path) -> None:
    """Trained, a relay killed, everything killed, resumed, verified, sampled, exported (I1, I3)."""
    made = anabranch.Run.create({**TINY, "run.steps": 8, "data.path": str(texts)}, tmp_path / "run")
    assert made.step == 0 and not made.running and made.config.run.steps == 8
    with pytest.raises(anabranch.UserError, match="was not started yet"):
        print(made.tickets)

    seen = []
    for step in made.start().metrics():
        seen.append(step)
        if step.t == 2 and step.loss is not None and "relay-1.1" in made.peers:
            made.kill("relay-1.1")
        if step.t == 4 and step.loss is not None:
            made.kill()
            break
    assert not made.running and not made.peers
    assert [figures.t for figures in seen if figures.loss is not None] == [1, 2, 3, 4]
    assert {figures.t for figures in seen if figures.held_out_loss is not None} >= {0}

    with anabranch.Run.open(tmp_path / "run") as resumed:
        assert set(resumed.tickets) == {"relay", "data", "watch"}
        with pytest.raises(anabranch.UserError, match="has started the run already"):
            resumed.start()
        assert resumed.wait() == 8
    with pytest.raises(anabranch.UserError, match="nothing to resume"):
        resumed.start()
    assert max(figures.t for figures in made.metrics(past=True)) == 8

    report = anabranch.verify(tmp_path / "run")
    assert report.holds and report.promise == "bits" and report.steps == 8

    trained = anabranch.load(tmp_path / "run")
    assert trained.t == 8
    said = trained.generate("text", tokens=5, temperature=0)
    assert said.startswith("text") and said == anabranch.generate(tmp_path / "run", "text", 5, 0)
    folder = anabranch.export(tmp_path / "run", tmp_path / "hf")
    again = anabranch.load(folder)
    ids = [[1, 2, 3, 4]]
    assert trained(ids).shape == (1, 4, trained.config.vocab_size)
    assert bool((again(ids) == trained(ids)).all())
    with pytest.raises(anabranch.UserError, match="not an empty folder"):
        trained.export(folder)


@pytest.mark.soak
def test_a_script_that_leads_a_run_and_lends_to_it(tmp_path: Path, texts: Path) -> None:
    """A script without a guard of its main module; `join` in another process, as on another machine."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import subprocess, sys
import anabranch

print("the script runs")
config = {{**{TINY!r}, "run.steps": 3, "data.path": {str(texts)!r}}}
with anabranch.Run.create(config, {str(tmp_path / "run")!r}, local=False) as run:
    code = "import anabranch, sys; print(anabranch.join(sys.argv[1], home=sys.argv[2]).reason)"
    other = subprocess.Popen([sys.executable, "-c", code, run.tickets["relay"], {str(tmp_path / "home")!r}])
    print("steps:", run.wait(), "exit status:", other.wait())
""")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the script runs") == 1
    assert "the run is over: all 3 steps are committed" in result.stdout
    assert "steps: 3 exit status: 0" in result.stdout


def test_configurations() -> None:
    default = run.configuration(None)
    assert default == run.configuration({}) == run.configuration(default)
    assert run.configuration({"model.size": "gpt-tiny"}).model.size == "gpt-tiny"
    assert run.configuration({"optimizer": {"lr": 1e-3}}).optimizer.lr == 1e-3
    with pytest.raises(anabranch.UserError, match=r"optimizer\.speed"):
        run.configuration({"optimizer.speed": 3})


def test_watching_tickets_do_not_join() -> None:
    with pytest.raises(anabranch.NetError, match="not a ticket"):
        anabranch.join("hello")


def test_importing_is_light_and_names_are_public() -> None:
    program = """
import sys, anabranch
assert not {"torch", "numpy", "msgspec", "asyncio"} & set(sys.modules), sorted(sys.modules)
assert set(anabranch.__all__) <= set(dir(anabranch))
from anabranch import Run, join, verify, load
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    for name in anabranch.__all__:
        assert getattr(anabranch, name)
    with pytest.raises(AttributeError, match="has no attribute 'tain'"):
        anabranch.tain  # noqa: B018


def test_the_stub_declares_the_public_names() -> None:
    stub = ast.parse((Path(anabranch.__file__).parent / "__init__.pyi").read_text("utf-8"))
    declared = {name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    declared |= {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert declared == set(anabranch.__all__)


def test_making_a_run_shows_itself_and_says_what_it_found(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the sentences that are asked for comes within two seconds; a bar does later."""
    settings = {**TINY, "data": {"source": "text", "path": str(texts), "tokenizer": "bytes"}}
    said: list[str] = []
    anabranch.Run.create(settings, tmp_path / "quick", say=said.append)
    assert any(text.startswith("corpus: 40 documents") for text in said)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    anabranch.Run.create(settings, tmp_path / "long")
    shown = capsys.readouterr()
    assert shown.out == "" and "tokenizing: " in shown.err


@pytest.mark.parametrize("module", [model, run, volunteer], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
