"""`anabranch verify`: what it prints, its exit status, and what it says of what it cannot read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from anabranch.audit.verification_report import RESULT_VERSION
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from support.audited_runs import copy_of, flip_bits, make_run, small_run

FORMATS = Path(__file__).parents[2] / "docs" / "reference" / "json-results.md"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("command"), small_run(steps=3))


@pytest.fixture
def copy(clean: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(clean, tmp_path)


def test_the_last_line_is_the_verdict(clean: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(clean)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verify: 3 steps, 5 microbatches each, 0 peers removed, 0 rollbacks: zero bits differ"
    assert any(line.startswith("weights") for line in lines)


def test_a_difference_is_status_1(copy: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bits(copy, 3, 0, "weights/model.norm.weight", [(1, 5)], rehash=True)
    assert main(["verify", str(copy)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "1 value differs in 1 bit, first at checkpoint of step 3, stage 0" in last


def test_json_is_one_documented_object(clean: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(clean), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["version"] == RESULT_VERSION and result["holds"] is True
    text = FORMATS.read_text(encoding="utf-8")
    section = text[text.index("## Verify result") :].partition("\n## Routing instance")[0]
    for key in (*result, *result["compared"], *result["distances"][0], *result["compared"]["losses"]):
        assert f"`{key}`" in section, key


def sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["verify", str(run)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_what_cannot_be_read_is_named(
    copy: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a run directory" in sentence(tmp_path / "nothing", capsys)
    log = copy.log.read_bytes()

    lines = log.splitlines(keepends=True)
    copy.log.write_bytes(b"".join((*lines[:4], b"{garbage}\n", *lines[4:])))
    assert "line 5 is damaged" in sentence(copy.path, capsys)
    copy.log.write_bytes(b"".join((*lines[:4], *lines[5:])))
    assert "line 5 is damaged" in sentence(copy.path, capsys)
    copy.log.write_bytes(lines[0])
    assert "nothing to verify" in sentence(copy.path, capsys)
    copy.log.write_bytes(b"")
    assert "the log is empty" in sentence(copy.path, capsys)
    copy.log.unlink()
    assert "there is no commit log here" in sentence(copy.path, capsys)
    copy.log.write_bytes(log)

    stage = copy.checkpoint_path(3) / "stage-1.safetensors"
    stage.write_bytes(stage.read_bytes()[:-5])
    assert "stage-1.safetensors: the snapshot is truncated" in sentence(copy.path, capsys)

    shutil.rmtree(copy.corpus)
    assert "corpus" in sentence(copy.path, capsys)


def test_a_log_whose_last_line_was_torn_is_read(
    copy: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with copy.log.open("ab") as log:
        log.write(b'{"index":99,"te')
    assert main(["verify", str(copy)]) == 0
    assert "cut off by a crash (15 bytes)" in capsys.readouterr().out


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_jobs_is_a_positive_number(
    jobs: str, clean: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(clean), "--jobs", jobs]) == 2
    assert capsys.readouterr().err == f"error: --jobs {jobs}: it must be at least 1\n"
