"""`anabranch route` from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.flow.graph.fair_shares import FairShares
from anabranch.flow.graph.problem import DataNode, Flow, Instance, Relay
from anabranch.sim.routing_lab.experiment import Messages, Optimum, Repair, RouteResult
from benchmarks.flow.families import FAMILIES
from benchmarks.flow.feasibility import violations
from support.instance_writer import format_instance


@pytest.fixture
def instance_file(tmp_path: Path) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(format_instance(FAMILIES["A"].draw(1, 1.5)), encoding="utf-8")
    return path


@pytest.mark.parametrize("policy", ["auction", "gwtf", "greedy", "swarm", "static", "optimal"])
def test_result_as_json(policy: str, instance_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["route", str(instance_file), "--policy", policy, "--oracle", "--json", "--churn", "2"]
    assert main([*arguments, "--loss", "0.05", "--delay", "uniform:0.01,0.1"]) == 0
    result = json.loads(capsys.readouterr().out)
    instance = FAMILIES["A"].draw(1, 1.5)
    flow = Flow(tuple(tuple(path) for path in result["paths"]))
    assert not violations(flow, instance)
    assert result["policy"] == policy
    assert result["flow"] == flow.value == result["oracle"]["flow"]
    assert result["cost"] == flow.cost(instance) >= result["oracle"]["cost"]
    assert result["max_path_cost"] == flow.max_path_cost(instance)
    assert set(result["messages"]) >= {"total", "per_node_mean", "per_node_max"}
    assert (result["messages"]["total"] == 0) == (policy in ("static", "optimal"))
    assert sum(result["admitted"].values()) == flow.value
    assert set(result["fair"]["shares"]) == {node.id for node in instance.data_nodes}
    churn = result["churn"]
    assert len(churn["crashed"]) == 2
    assert 0 < churn["flow"] <= churn["oracle"]["flow"]


def test_report_for_people_and_picture(
    instance_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "flow.svg"
    arguments = ["route", str(instance_file), "--policy", "greedy", "--oracle", "--plot", str(out)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("greedy: 7 of 11 microbatches") and "optimum: 7 microbatches" in text
    first = out.read_bytes()
    assert b"<svg" in first
    # Matplotlib writes each text as a comment before its outlines.
    assert b"<!-- greedy: 7 of 11 microbatches, cost " in first and b"<!-- stage 8 -->" in first
    # Four of five relays of a stage have places that no path takes: they are pale.
    assert first.count(b'opacity: 0.3"') > 8
    assert main(arguments) == 0
    assert out.read_bytes() == first


def test_the_instance_that_comes_with_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "swarm.json"
    assert main(["route", str(example), "--json", "--oracle"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["flow"] == result["oracle"]["flow"] == 7


def test_a_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    """Matplotlib would take what stands between dollars for a formula, and this for a bad one."""
    path = tmp_path / "instance.json"
    text = format_instance(FAMILIES["A"].draw(1)).replace('"s1r1"', json.dumps("$\\frac{$"))
    text = text.replace('"s2r1"', f'"{"long" * 20}"')
    path.write_text(text, encoding="utf-8")
    assert main(["route", str(path), "--policy", "static", "--plot", str(tmp_path / "flow.svg")]) == 0
    assert "<!-- longlonglonglonglo… -->" not in (drawn := (tmp_path / "flow.svg").read_text("utf-8"))
    assert "<!-- longlonglonglongl… -->" in drawn


def test_every_key_of_a_result_is_in_the_formats() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "json-results.md").read_text(encoding="utf-8")
    section = text.partition("## Routing result\n")[2].partition("\n## ")[0]
    for struct in (RouteResult, Messages, Optimum, Repair):
        for key in struct.__struct_fields__:
            assert f"`{key}`" in section, key
    for key in ("admitted", "fair", *FairShares.__dataclass_fields__):
        assert f"`{key}`" in section, key


def test_shares_are_reported_beside_those_that_are_fair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both data nodes want four of the four places that there are; d2 wants nothing."""
    hops = [(f"d{n}", "r") for n in range(3)] + [("r", f"d{n}") for n in range(3)]
    instance = Instance(
        1,
        "own",
        (DataNode("d0", 4), DataNode("d1", 4), DataNode("d2", 0)),
        (Relay("r", 1, 4),),
        dict.fromkeys(hops, 1.0),
    )
    path = tmp_path / "shared.json"
    path.write_text(format_instance(instance), encoding="utf-8")
    assert main(["route", str(path), "--policy", "gwtf", "--oracle", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert sum(result["admitted"].values()) == 4 and result["admitted"]["d2"] == 0
    assert result["fair"]["shares"] == pytest.approx({"d0": 0.5, "d1": 0.5}, abs=1e-5)
    assert main(["route", str(path), "--policy", "static", "--oracle"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("admitted: d0 4 of 4 (fair: 50%), d1 0 of 4")


def test_the_auction_refuses_return_to_own_data_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    drawn = replace(FAMILIES["A"], data_nodes=2).draw(1, 1.0, "own")
    path.write_text(format_instance(drawn), encoding="utf-8")
    assert main(["route", str(path)]) == 2
    error = capsys.readouterr().err
    assert 'return "own"' in error and "policy gwtf" in error and error.count("\n") == 1
    path.write_text(format_instance(FAMILIES["A"].draw(1, 1.0, "own")), encoding="utf-8")
    assert main(["route", str(path)]) == 0, "with one data node both rules are the same"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--policy", "magic"], "--policy magic: choose one of auction, gwtf"),
        (["--delay", "uniform:3"], "--delay uniform:3"),
        (["--delay", "uniform:0.3,0.01"], "--delay uniform:0.3,0.01"),
        (["--loss", "1"], "--loss 1: it must be at least 0 and less than 1"),
        (["--loss", "nan"], "--loss nan"),
        (["--churn", "-1"], "--churn -1"),
        (["--policy", "greedy", "--churn", "99"], "instance.json has 40 relays"),
        (["--plot", "flow.txt"], "--plot flow.txt"),
        (["--delay", "uniform:0.01,3600"], "--delay uniform:0.01,3600: write it as"),
        (["--plot", "no/such/folder/flow.svg"], "--plot no/such/folder/flow.svg: there is no folder no/such"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str], place: str, instance_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", str(instance_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert place in error and error.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line(
    instance_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    assert main(["route", str(instance_file), "--policy", "static", "--plot", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: --plot {folder}: Is a directory\n"


def test_a_run_that_is_not_quiet_at_the_end_says_so(
    instance_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policy", "greedy", "--churn", "2", "--delay", "uniform:2000,3000"]
    assert main(["route", str(instance_file), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("not converged") for line in lines] == [False, True, False, True]


@pytest.mark.parametrize(("text", "place"), [("nonsense", "not JSON"), ('{"version": 9}', "version")])
def test_a_bad_instance_is_one_line(
    text: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    for name in (str(path), str(tmp_path / "absent.json")):
        assert main(["route", name]) == 2
        error = capsys.readouterr().err
        assert name in error and error.count("\n") == 1
    assert main(["route", str(path)]) == 2
    assert place in capsys.readouterr().err
