"""A swarm whose processes are a wide-area network apart: work goes where it is quickest."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import render_run_file
from anabranch.net.wan import emulated_network
from anabranch.observe.event_log import events_of
from anabranch.observe.events import PeerJoined, Step
from support.local_swarms import check_exact, history_of, small_run

FAR_S = 0.2

#: data-0 and relay-1.1 are in one region, relay-1.0 far away from both: regions are taken in turn.
PROFILE = {
    "source": "made up for this test",
    "units": {"latency_s": "seconds, one way", "bandwidth_gbps": "gigabits per second"},
    "regions": ["home", "antipodes"],
    "same_region": {"latency_s": 0.002, "bandwidth_gbps": 1},
    "pairs": {"home-antipodes": {"latency_s": FAR_S, "bandwidth_gbps": 1}},
}


@pytest.mark.costly
@pytest.mark.usefixtures("needs_emulated_network")
def test_the_near_replica_carries_more_than_the_far_one(
    tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps, microbatches = 3, 8
    run = small_run(
        texts,
        run__steps=steps,
        batch__microbatches=microbatches,
        pipeline__stages=1,
        fleet__relays_per_stage=[2],
        fleet__capacity=2,
        evaluation__every=0,
    )
    (tmp_path / "run.toml").write_text(render_run_file(run))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    command = ["train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run"), "--no-verify"]
    assert main([*command, "--network", str(tmp_path / "profile.json")]) == 0
    lines = capfd.readouterr().out.splitlines()
    directory = RunDirectory.open(tmp_path / "run")

    assert "emulated network: data-0 in home, relay-1.0 in antipodes, relay-1.1 in home" in lines
    joined = {event.subject: event for event in events_of(directory.events, PeerJoined)}
    assert {(event.name, event.region) for event in joined.values() if event.stage == 1} == {
        ("relay-1.0", "antipodes"),
        ("relay-1.1", "home"),
    }
    # Their sockets are in the emulated network, and its delay is there: to learn of one step and to answer
    # for the next takes the far replica one way and back.
    addresses = [member.address for member in history_of(directory).membership.members.values()]
    assert len({address.partition(":")[0] for address in addresses}) == 3
    assert all(address.startswith("10.77.") for address in addresses)
    seconds = [event.seconds for event in events_of(directory.events, Step)]
    assert min(seconds) >= 2 * FAR_S, seconds

    served: Counter[str] = Counter()
    told = [line.rpartition(" | split ")[2] for line in lines if line.startswith("step")]
    for commit, split in zip(history_of(directory).commits, told, strict=True):
        stage = commit.stages[1]
        counts = Counter(joined[stage.members[owner]].name for owner in stage.owners)
        assert counts.total() == microbatches
        assert split == f"1: {counts['relay-1.0']}+{counts['relay-1.1']}"
        served += counts
    assert served["relay-1.1"] > 2 * served["relay-1.0"], served
    check_exact(directory, steps)


@pytest.mark.skipif(sys.platform != "linux", reason="there is nothing to be permitted")
def test_without_permission_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--run-dir", str(tmp_path / "run"), "--network"]

    def refusal(network: str) -> str:
        emulated_network.available.cache_clear()
        assert main([*command, network]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()
        return error

    try:
        assert "nowhere.json: cannot be read: No such file or directory" in refusal("nowhere.json")
        monkeypatch.setattr(emulated_network, "TUN", tmp_path / "tun")
        if os.geteuid() == 0:
            assert f"--network wan10: the emulated network needs {tmp_path / 'tun'}" in refusal("wan10")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "--network wan10: the emulated network needs root" in refusal("wan10")
    finally:
        emulated_network.available.cache_clear()
