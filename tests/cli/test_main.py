"""The front door: help, errors, and `init`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.cli.main import COMMANDS, main
from anabranch.cli.support import outputs as front
from anabranch.config import load_run_file
from anabranch.errors import UserError


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown and f"  anabranch {command}" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_help_of_every_command_loads_no_torch() -> None:
    program = f"""
import sys
from anabranch.cli.main import main
for command in {list(COMMANDS)!r}:
    try:
        main([command, "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "anabranch", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("anabranch")


def test_an_interrupt_while_python_ends_is_not_told() -> None:
    program = """
import atexit, os, signal, sys
from anabranch.cli.main import entry
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["anabranch"]
entry()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unknown_option_is_told_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["trace", "wan10", "--weeks", "2"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: anabranch trace ")
    assert error.endswith("anabranch trace: error: unrecognized arguments: --weeks 2\n")


def test_a_mistyped_command_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["trian", "--steps", "5"])
    assert leaving.value.code == 2
    assert "there is no command 'trian'; did you mean 'train'? `anabranch --help`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["zzzz"])
    assert "there is no command 'zzzz'; `anabranch --help` lists all" in capsys.readouterr().err


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "run.toml"), "--stages", "9"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: command line: fleet.relays 6 cannot fill pipeline.stages 9")
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(
    ("raised", "status"),
    [(UserError("no"), 2), (KeyboardInterrupt(), 130), (KeyboardInterrupt("no harm done"), 130)],
)
def test_statuses(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise raised

    monkeypatch.setattr(importlib.import_module("anabranch.cli.init"), "run", fails)
    assert main(["init"]) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error and all(str(word) in error for word in raised.args)


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(importlib.import_module("anabranch.cli.init"), "run", fails)
    with pytest.raises(ZeroDivisionError):
        main(["init"])


def test_errors_are_red_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    front.print_error("x")
    assert capsys.readouterr().err == "error: x\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    front.print_error("x")
    assert capsys.readouterr().err == "\033[1;31merror:\033[0m x\n"


def test_init_writes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.toml"
    arguments = "--model gpt-tiny --steps 20 --stages 2 --data-nodes 1 --relays 4 --dtype fp64"
    arguments += " --reduction fast --seed 9 --numerics mixed --name mine"
    assert main(["init", str(path), *arguments.split()]) == 0
    assert f"anabranch train {path}" in capsys.readouterr().out
    config = load_run_file(path)
    assert (config.run.name, config.run.steps, config.run.seed) == ("mine", 20, 9)
    assert (config.run.reduction, config.run.numerics, config.compute.dtype) == ("fast", "mixed", "fp64")
    assert (config.model.size, config.pipeline.stages) == ("gpt-tiny", 2)
    assert (config.fleet.data_nodes, config.fleet.relays) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "tiny"),
        (["--model", "llama-1b"], "llama-1b"),
        (["--model", "gpt2-124m", "--preset", "diloco"], "gpt2-124m"),
        (["--model", "llama-1b", "--name", "mine"], "mine"),
    ],
)
def test_a_run_is_called_after_its_model(arguments: list[str], name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), *arguments]) == 0
    assert load_run_file(path).run.name == name


def test_init_writes_codecs(tmp_path: Path) -> None:
    path = tmp_path / "home.toml"
    assert main(["init", str(path), "--wire", "int8", "--sums", "coarse"]) == 0
    wire = load_run_file(path).wire
    assert (wire.activations, wire.gradients, wire.reduce) == ("int8", "int8", "coarse")


@pytest.mark.parametrize(
    ("arguments", "subspace", "codec"),
    [
        (["--wire", "subspace"], 16, "none"),  # an eighth of llama-tiny's width
        (["--wire", "subspace", "--subspace", "24"], 24, "none"),
        (["--wire", "int8", "--subspace", "16"], 16, "int8"),
    ],
)
def test_init_makes_a_subspace_model(
    tmp_path: Path, arguments: list[str], subspace: int, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), *arguments]) == 0
    run = load_run_file(path)
    assert (run.model.subspace, run.wire.activations, run.wire.gradients) == (subspace, codec, codec)
    said = capsys.readouterr().out
    assert f"model.subspace = {subspace}" in said and "bytes per token and cut" in said


@pytest.mark.parametrize(("wire", "size_bytes"), [("int8", 264), ("fp16", 512), ("none", 0)])
def test_init_says_what_a_codec_sends(
    tmp_path: Path, wire: str, size_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "run.toml"), "--wire", wire]) == 0
    said = capsys.readouterr().out
    assert ("bytes per token and cut" in said) == bool(size_bytes)
    assert not size_bytes or f"{size_bytes} bytes per token and cut, forward and backward" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-huge"], "there is no size 'llama-huge'; choose one of llama-tiny"),
        (["--stages", "4"], "4 stages are more than the model's 3 blocks"),
    ],
)
def test_init_refuses_what_no_model_can_be(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not path.exists()


def test_init_overwrites_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["init", str(path), "--force"]) == 0
    assert load_run_file(path).run.steps == 400
    assert main(["init", str(tmp_path / "no" / "run.toml")]) == 2
    assert "cannot write" in capsys.readouterr().err
