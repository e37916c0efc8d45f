"""`anabranch profile`: this machine becomes a device of a scenario."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.node.diagnostics import device_benchmark as gauge
from anabranch.sim.cluster.scenario import load_scenario


def test_this_machine_becomes_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauge, "SIDES", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(gauge, "COPIED_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    out = tmp_path / "devices.json"
    for name in ("attic", "cellar"):
        assert main(["profile", "--name", name, "--device", "cpu", "--out", str(out)]) == 0
    assert "fleet.devices" in capsys.readouterr().out
    assert set(json.loads(out.read_text("utf-8"))) == {"attic", "cellar"}
    scenario = load_scenario(
        "wan10", {"fleet.devices": str(out), "fleet.device": ["attic", "t4"], "fleet.capacity": [4]}
    )
    assert scenario.fleet.device == ("attic", "t4")
    with pytest.raises(UserError, match=r"there is no 'barn'; there are t4, .*attic, cellar"):
        load_scenario("wan10", {"fleet.devices": str(out), "fleet.device": ["barn"]})


def test_wrong_files_and_devices_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"none.json: cannot be read: No such file"):
        load_scenario("wan10", {"fleet.devices": str(tmp_path / "none.json")})
    assert main(["profile", "--device", "cuda:77"]) == 2
    assert "--device cuda:77: " in capsys.readouterr().err
    assert main(["profile", "--out", str(tmp_path / "no" / "x.json"), "--device", "cuda:77"]) == 2
    assert "there is no folder" in capsys.readouterr().err, "told before anything is measured"
    assert main(["profile", "--name", ""]) == 2
    assert "--name: must not be empty" in capsys.readouterr().err
    assert main(["profile", "--device", "abacus"]) == 2
    assert capsys.readouterr().err.endswith("error: --device abacus: must be auto, cpu, cuda or cuda:N\n")
