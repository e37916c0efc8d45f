"""Swarms of real processes take the steps of one process, however model and fleet are cut."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.node.local_swarm.local_swarm import processes_of
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Evaluation, PeerJoined, RunFinished, RunStarted, Timing
from anabranch.train.model.sizes import block_parameters, model_config
from support.local_swarms import check_exact, created, history_of, small_run, steps_of, swarm_of

EVEN = {1: [2], 2: [2, 2], 4: [2, 2, 2, 2]}
UNEVEN = {1: [3], 2: [1, 3], 4: [1, 2, 1, 3]}
GRID = [
    (architecture, stages, data_nodes, even)
    for architecture in ("llama", "gpt")
    for stages in (1, 2, 4)
    for data_nodes in (1, 3)
    for even in (True, False)
]
#: Each value of each dimension at least once; with real processes the rest is for `make soak`.
CHOSEN = [("llama", 4, 1, True), ("gpt", 2, 3, True), ("gpt", 1, 1, False)]


def cell(values: tuple[str, int, int, bool]) -> object:
    architecture, stages, data_nodes, even = values
    name = f"{architecture}-{stages}stages-{data_nodes}data-{'even' if even else 'uneven'}"
    return pytest.param(*values, id=name, marks=[] if values in CHOSEN else [pytest.mark.soak])


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("architecture", "stages", "data_nodes", "even"), [cell(values) for values in GRID])
def test_the_grid(
    tmp_path: Path,
    texts: Path,
    supervisor: Supervisor,
    architecture: str,
    stages: int,
    data_nodes: int,
    even: bool,
) -> None:
    replicas = EVEN[stages] if even else UNEVEN[stages]
    run = small_run(
        texts,
        model__size=f"{architecture}-tiny",
        pipeline__stages=stages,
        fleet__data_nodes=data_nodes,
        fleet__relays_per_stage=replicas,
        # Uneven swarms begin before all are there: the others come while the run goes on.
        fleet__minimum=min(replicas),
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        # The first step waits for one data node alone: relays come once all of them are there.
        for number in range(1, data_nodes):
            swarm.join(f"data-{number}", swarm.ticket("data"), ["--corpus", str(directory.corpus)])
        swarm.until(lambda _: len(swarm.of(PeerJoined)) == data_nodes)
        for name, stage in processes_of(run).items():
            if stage:
                swarm.join(name, swarm.ticket(), ["--stage", str(stage)])
        swarm.to_the_end()
        assert all(process.status == 0 for process in swarm.processes.values()), swarm.story()
    check_exact(directory, steps=4)
    assert swarm.of(RunStarted)[0].stages == stages
    assert steps_of(swarm.seen) == [1, 2, 3, 4]
    assert [event.t for event in swarm.of(Evaluation)] == [0, 3, 4]
    assert isinstance(swarm.seen[-1], RunFinished)
    if even:
        # Every process reports each step.
        spent = {(event.peer, event.t) for event in swarm.of(Timing)}
        joined = {event.subject for event in swarm.of(PeerJoined)}
        assert len(joined) == data_nodes + sum(replicas)
        assert {peer for peer, _ in spent} == joined
        # Half of a stage's sums went to the other replica, packed, and half of its reduced gradient, from
        # either one; or where one owns no unit all of the reduced gradient from the other.
        elements = 4 // stages * block_parameters(model_config(run.model, 257))
        reduces = Counter[tuple[int, int]]()
        for event in swarm.of(Timing):
            reduces[event.t, event.stage] += event.bytes_reduce if event.stage else 0
        sent = [count for (_, stage), count in reduces.items() if stage]
        assert 4 * elements <= min(sent) <= max(sent) < (7 + 4) * elements
    for commit in history_of(directory).commits:
        assert [len(stage.owners) for stage in commit.stages] == [12] + [6] * stages


def test_train_runs_a_swarm_and_tells_the_story(
    tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from anabranch.config import render_run_file

    run = small_run(texts, fleet__data_nodes=2)
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(run))
    assert main(["train", str(file), "--run-dir", str(tmp_path / "run"), "--steps", "3"]) == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    assert lines[0] == lines[-1] == f"run directory: {tmp_path / 'run'}"
    for part in (
        "2 relay stages, 6 microbatches and 96 tokens a step",
        "stage 1: blocks 0-1",
        "data-1 joins as a data node",
        "relay-2.1 joins as a relay of stage 2",
        "step  3/3",
    ):
        assert part in out
    assert "zero bits differ" in out
    assert (tmp_path / "run" / "plots" / "loss.png").exists()
    # Run again, it refuses to touch what is there.
    assert main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 2
    error = capfd.readouterr().err
    assert "exists already" in error and error.count("\n") == 1
    assert main(["verify", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["holds"] is True
