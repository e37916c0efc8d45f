"""Files for schedulers: valid by published schemas, with commands that exist; and what they do when run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cli.fleet import ENGINES
from anabranch.cli.main import build_parser, main
from anabranch.launch.yaml_text import document

PLAN = {
    "plans": [
        {
            "placement": [
                {"t4 London": 1},
                {"t4 London": 2, "a100 New York": 1},
                {"a100 New York": 3},
            ]
        }
    ]
}
TEXTS = st.text(st.characters(max_codepoint=0xD7FF), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


def written(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["fleet", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def joins(text: str) -> list[dict[str, Any]]:
    """Options of each `anabranch join` in a shell text, which may be quoted in YAML."""
    text = re.sub(r'"\$(\([^)]*\)|\w+)"', "ADDRESS", text.replace("$$", "$").replace('\\"', '"'))
    found = []
    for command in re.findall(r'anabranch (join [^\n)"]*)', text):
        words = shlex.split(command)
        found.append(vars(build_parser(words).parse_args(words)))
    return found


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(TEXTS, VALUES))
def test_yaml_means_what_it_was_made_from(values: dict[str, Any]) -> None:
    assert yaml.safe_load(document(values, "a comment\nof two lines")) == (values or {})


def test_kubernetes_manifests_are_valid_in_all_versions_that_are_known(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = written(capsys, "kubernetes", plan, "--name", "My.run", "--image", "registry/anabranch:1")
    jobs = list(yaml.safe_load_all(text))
    for version in ("1.33", kubernetes_validate.latest_version()):
        for job in jobs:
            kubernetes_validate.validate(job, str(version), strict=True)
    assert [job["metadata"]["name"] for job in jobs] == [
        "anabranch-my-run-stage-1-0", "anabranch-my-run-stage-1-1", "anabranch-my-run-stage-2"
    ]  # fmt: skip
    assert [job["spec"]["completions"] for job in jobs] == [2, 1, 3]
    broken = jobs[0] | {"spec": jobs[0]["spec"] | {"paralellism": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.33", strict=True)
    assert jobs[0]["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    pod = jobs[0]["spec"]["template"]["spec"]
    [options] = joins(pod["containers"][0]["command"][2])
    assert (options["stage"], options["region"], options["grace"]) == (1, "London", 60.0)
    assert pod["terminationGracePeriodSeconds"] > options["grace"]
    assert "anabranch1:" not in yaml.safe_dump_all(jobs)


def test_compose_files_are_valid(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = Path(pytest.importorskip("check_jsonschema").__file__).parent
    schema = json.loads((package / "builtin_schemas" / "vendor" / "compose-spec.json").read_text("utf-8"))
    compose = yaml.safe_load(written(capsys, "compose", plan))
    jsonschema.validate(compose, schema)
    commands = [service["command"][0] for service in compose["services"].values()]
    assert [options["stage"] for command in commands for options in joins(command)] == [1, 1, 2]
    assert "devices" not in written(capsys, "compose", "--peers", "2", "--gpus", "0")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_file_has_the_plans_relays_and_no_ticket(
    engine: str, plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = written(capsys, engine, plan)
    assert "ANABRANCH_TICKET" in text and "6 peers" in text + "6 peers" * (engine in ("skypilot", "dstack"))
    if engine != "ray":
        found = joins(text)
        assert [options["stage"] for options in found] == [1, 1, 2]
        assert {options["region"] for options in found} == {"London", "New York"}
    assert main(["fleet", engine, str(plan), "--out", str(tmp_path / "file")]) == 0
    assert (tmp_path / "file").read_text("utf-8") == text


def test_a_file_that_is_there_is_overwritten_by_force_alone(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for command in (["fleet", "slurm", str(plan)], ["trace", "eight-homes"]):
        assert main([*command, "--out", str(file)]) == 2
        assert f"--out {file} exists; give another name, or --force" in capsys.readouterr().err
        assert file.read_text() == "mine"
        assert main([*command, "--out", str(file), "--force"]) == 0
        assert file.read_text() != "mine"
        file.write_text("mine")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a PLAN.json or --peers N"),
        (["--peers", "0"], "--peers 0"),
        (["--peers", "2", "--region", "x'; rm -rf /"], "the region"),
        (["--peers", "2", "--image", "a b"], "--image a b"),
        (["--peers", "2", "--name", "a/b"], "--name a/b"),
        (["nowhere.json"], "nowhere.json"),
        (["PLAN", "--stage", "2"], "a plan names them itself"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], words: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(plan) if word == "PLAN" else word for word in arguments]
    assert main(["fleet", "slurm", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"plans": []}', '{"plans": [{"placement": [{"a": 1}]}]}'])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert main(["fleet", "slurm", str(tmp_path / "plan.json")]) == 2
    assert "plan" in capsys.readouterr().err


def test_a_plan_with_gpus_that_hold_a_stage_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"plans": [{"placement": [{}, {"2xt4 London": 1}]}]}')
    assert main(["fleet", "slurm", str(tmp_path / "plan.json")]) == 2
    assert "anabranch join --device cuda:0,cuda:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "requeued"),
    [(0, False), (1, False), (2, False), (75, True), ("term", True), ("early", True)],
)
def test_the_slurm_script_requeues_what_may_join_again(
    status: int | str, requeued: bool, plan: Path, tmp_path: Path
) -> None:
    """With programs of its own in the place of anabranch and scontrol; SIGTERM reaches the peer, also if it
    comes before the peer runs."""
    script = tmp_path / "relays.sh"
    assert main(["fleet", "slurm", str(plan), "--out", str(script)]) == 0
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    programs = tmp_path / "bin"
    programs.mkdir()
    note = f'echo "$0 $ANABRANCH_TICKET $*" >> {tmp_path}/calls\n'
    leaves = "trap 'exit 75' TERM\nkill -TERM $PPID\nsleep 5 & wait\n"
    waits = "trap 'exit 75' TERM\nsleep 60 & wait\n"
    peer = {"term": leaves, "early": waits}.get(str(status), f"exit {status}\n")
    early = "read -r _ _ _ script _ < /proc/$PPID/stat\nkill -TERM $script\n" if status == "early" else ""
    programs_by_name = {
        "anabranch": note + peer, "scontrol": note, "scancel": note, "hostname": early + "echo ::1\n"
    }  # fmt: skip
    for name, body in programs_by_name.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ANABRANCH_TICKET": "TICKET",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "99",
    }  # fmt: skip
    ended = subprocess.run(["bash", script], env=environment, check=False).returncode
    # Told at once, the peer may not have begun to heed the signal, which then ends it.
    assert ended in {"term": (75,), "early": (75, 128 + signal.SIGTERM)}.get(str(status), (status,))
    calls = (tmp_path / "calls").read_text("utf-8")
    began = "anabranch TICKET join" in calls and "--stage 2 --region New York" in calls
    assert began or status == "early"
    assert ("scontrol TICKET requeue 99_3" in calls) == requeued
    assert ("scancel TICKET 99" in calls) == (status == 0)


def in_fresh_environment(folder: Path, packages: list[str], program: str, *arguments: Path) -> str:
    """Output of a program in a virtual environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
    command = [folder / "bin" / "python", "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.soak
def test_skypilot_takes_its_files(plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, text in enumerate(written(capsys, "skypilot", plan).split("---\n")):
        (tmp_path / f"{number}.yaml").write_text(text)
    program = "import sky, sys; print([sky.Task.from_yaml(p).name for p in sys.argv[1:]])"
    files = sorted(tmp_path.glob("*.yaml"))
    found = in_fresh_environment(tmp_path / "venv", ["skypilot==0.14.1"], program, *files)
    assert "anabranch-run-stage-2" in found


@pytest.mark.soak
def test_dstack_takes_its_files(plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, text in enumerate(written(capsys, "dstack", plan).split("---\n")):
        (tmp_path / f"{number}.yaml").write_text(text)
    program = (
        "import sys, yaml; from dstack._internal.core.models.configurations import parse_apply_configuration;"
        "print([parse_apply_configuration(yaml.safe_load(open(p))).name for p in sys.argv[1:]])"
    )
    files = sorted(tmp_path.glob("*.yaml"))
    found = in_fresh_environment(tmp_path / "venv", ["dstack==0.22.5"], program, *files)
    assert "anabranch-run-stage-2" in found
