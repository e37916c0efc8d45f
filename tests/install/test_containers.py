"""Files for container engines, editors and notebooks: valid by their schemas, with commands that exist."""

from __future__ import annotations

import json
import re
import shlex
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
    run = load_run_file(CONTAINER / compose["configs"]["demo"]["file"])
    assert processes_of(run).keys() - {"data-0"} == {f"relay-{s}.{n}" for s in (1, 2, 3) for n in range(3)}
    assert compose["services"]["relay"]["deploy"]["replicas"] == run.fleet.relays == 9
    assert run.network.advertise == f"{compose['services']['leader']['hostname']}:{run.network.port}"
    check_run(resolved(run), model_config(run.model, 512))


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_a_container_file_copies_what_is_there_and_has_the_tested_torch(name: str) -> None:
    text = (CONTAINER / name).read_text("utf-8")
    for line in re.findall(r"^COPY ([^-].*)$", text, flags=re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / ".dockerignore").read_text("utf-8").splitlines(), source
    [version] = re.findall(r"torch==([\d.]+)", text)
    assert f"\ntorch=={version}\n" in (ROOT / "constraints.txt").read_text("utf-8")


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
