"""Files for container engines, editors and notebooks: valid by their schemas, with commands that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import nbformat
import pytest
import yaml

from anabranch.cli.main import build_parser
from anabranch.config import load_run_file
from anabranch.node.lifecycle.run_checks import check_run, resolved
from anabranch.node.local_swarm.local_swarm import processes_of
from anabranch.train.model.sizes import model_config

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
NOTEBOOK = ROOT / "docs" / "examples" / "lend-a-colab-machine.ipynb"


def vendored_schema(name: str) -> dict[str, object]:
    """JSON schema of other programs' files, as the package check-jsonschema has them."""
    package = Path(pytest.importorskip("check_jsonschema").__file__).parent
    return json.loads((package / "builtin_schemas" / "vendor" / f"{name}.json").read_text("utf-8"))


def understood(text: str) -> list[str]:
    """Names of the `anabranch` commands in a shell text, each of which the command line takes."""
    found = []
    for command in re.findall(r"anabranch ((?:start|resume|join|watch|doctor|train) [^;\n]*)", text):
        arguments = shlex.split(command.replace("$$", "$"))
        found.append(build_parser(arguments).parse_args(arguments).command)
    return found


def test_the_compose_file_starts_ten_nodes_and_a_page() -> None:
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text("utf-8"))
    jsonschema.validate(compose, vendored_schema("compose-spec"))
    commands = {name: understood(service["command"][0]) for name, service in compose["services"].items()}
    assert commands == {"leader": ["resume", "start"], "relay": ["join"], "page": ["watch"]}
    mounted = dict(volume.split(":")[:2] for volume in compose["services"]["leader"]["volumes"])
    assert mounted.pop("runs") == "/runs" and list(mounted.values()) == ["/demo.toml"]
    run = load_run_file(CONTAINER / next(iter(mounted)))
    assert processes_of(run).keys() - {"data-0"} == {f"relay-{s}.{n}" for s in (1, 2, 3) for n in range(3)}
    assert compose["services"]["relay"]["deploy"]["replicas"] == run.fleet.relays == 9
    assert run.network.advertise == f"{compose['services']['leader']['hostname']}:{run.network.port}"
    check_run(resolved(run), model_config(run.model, 512))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_the_commands_of_the_compose_file_train_without_containers(tmp_path: Path) -> None:
    """The page answers, the run goes on after a relay is killed, and a stopped leader is resumed. Of the nine
    relays four are enough: the run has three stages."""
    driver = ROOT / "tests" / "support" / "compose_commands.py"
    command = ["unshare", "--mount", "--net", sys.executable, driver, tmp_path, "4"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    told = {path.name: path.read_text()[-500:] for path in tmp_path.glob("*.txt")}
    assert done.returncode == 0, (done.stderr, told)
    result = json.loads(done.stdout)
    assert result["page"] == 200 and result["stopped"] == 0
    assert result["resumed"] > result["reached"] >= 6


@pytest.mark.slow
def test_the_build_stage_makes_the_wheel(tmp_path: Path) -> None:
    """The commands of the container file's first stage, in a folder that has what it copies."""
    first = (CONTAINER / "Containerfile").read_text("utf-8").split("\nFROM ")[1]
    [files, folders] = re.findall(r"^COPY (.*)$", first, flags=re.MULTILINE)
    for name in files.split()[:-1]:
        shutil.copy(ROOT / name, tmp_path)
    source, target = folders.split()
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / source, tmp_path / target, ignore=left_out)
    [build] = re.findall(r"^RUN pip (wheel .*)$", first, flags=re.MULTILINE)
    words = build.replace("/dist", str(tmp_path / "dist")).split()
    # Without a network the installed setuptools builds.
    command = [sys.executable, "-m", "pip", *words, "--no-build-isolation"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len(list((tmp_path / "dist").glob("anabranch-*.whl"))) == 1


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_a_container_file_copies_what_is_there_and_has_the_tested_torch(name: str) -> None:
    text = (CONTAINER / name).read_text("utf-8")
    for line in re.findall(r"^COPY ([^-].*)$", text, flags=re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / ".dockerignore").read_text("utf-8").splitlines(), source
    [version] = re.findall(r"torch==([\d.]+)", text)
    assert f"\ntorch=={version}\n" in (ROOT / "constraints.txt").read_text("utf-8")
    assert ("\nARG TORCH_INDEX=https://download.pytorch.org/whl/cpu\n" in text) == (name == "Containerfile")


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_instructions_of_a_container_file_are_ones_that_an_engine_takes(name: str) -> None:
    """Known words, stages that exist, shell texts that a shell can read, and a user that is not root."""
    text = re.sub(r"^#.*\n", "", (CONTAINER / name).read_text("utf-8"), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line]
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "ENV", "ENTRYPOINT"}
    assert [word for word, _ in lines[:2]] == ["ARG", "FROM"] and {word for word, _ in lines} <= known
    stages = [rest.split(" AS ")[1] for word, rest in lines if word == "FROM" and " AS " in rest]
    assert {stage for _, rest in lines for stage in re.findall(r"\bfrom=(\w+)", rest)} <= set(stages)
    last = {word: rest for word, rest in lines}
    assert last["USER"] != "root" and json.loads(last["ENTRYPOINT"]) == ["anabranch"]
    for word, rest in lines:
        if word == "RUN":
            shell = re.sub(r"^(--mount=\S+ +)+", "", rest)
            assert subprocess.run(["sh", "-n", "-c", shell], check=False).returncode == 0, shell


def test_the_devcontainer_runs_targets_that_exist() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"make ([a-z-]+)", settings["postCreateCommand"]):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_notebook_is_valid_and_its_commands_exist() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert understood(cells) == ["doctor", "join"]
    assert not any(cell.get("outputs") for cell in notebook.cells)
