"""Two of three voters are lost for good, with their disks: a new epoch goes on, the old one is refused."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.chaos import free_port
from anabranch.cli.main import main
from anabranch.launch.fleet import AGAIN
from anabranch.node.local_swarm.local_swarm import last_words
from anabranch.node.local_swarm.supervisor import Supervisor
from support.local_swarms import (
    PATIENCE_S,
    Swarm,
    check_exact,
    created,
    history_of,
    small_run,
    steps_of,
    swarm_of,
    voters_of,
)

REFUSED = (
    "the run was recovered without this machine's part of the log (epoch 2); the ticket is still valid: join "
    "again"
)

REMOVED = "removed from the run while it was not heard; the ticket is still valid: join again"
#: Told by the log, which reached it before the new epoch refused it.
TAKEN_UP = "removed from the run: the run was taken up again; the ticket is still valid: join again"


@pytest.mark.costly
def test_the_founder_goes_on_alone_and_the_old_epoch_is_refused(
    tmp_path: Path, texts: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(
        texts,
        run__steps=100_000,
        network__port=free_port("127.0.0.1"),
        fleet__data_nodes=2,
        fleet__minimum=1,  # two relays are lost for good
        fleet__voters=3,
        evaluation__every=0,
        checkpoint__every=5,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [7] and len(voters_of(directory)) == 3)
        keep = voting(directory, swarm)
        old = {name: process for name, process in swarm.processes.items() if name not in keep}
        frozen, *_ = old
        old[frozen].signal(signal.SIGSTOP)
        for name in keep - {"data-0"}:
            swarm.processes[name].signal(signal.SIGKILL)
            assert swarm.processes[name].wait(PATIENCE_S)
            shutil.rmtree(directory.peer(name))
        # Without a majority the step does not end, so the owner says twice that the process should.
        swarm.leader.signal(signal.SIGINT)
        assert not swarm.leader.wait(1.0)
        swarm.leader.signal(signal.SIGINT)
        assert swarm.leader.wait(PATIENCE_S)

        before = history_of(directory)
        assert main(["recover", str(directory.path), "--new-epoch"]) == 0
        assert f"epoch 2 begins after step {before.t};" in capsys.readouterr().out
        tickets = swarm.start_leader()
        # Those that looked for the founder all the time meet it, and so does the one that slept through it.
        for process in old.values():
            process.signal(signal.SIGCONT)
            assert process.wait(PATIENCE_S) and process.status == AGAIN, swarm.story()
            # The new epoch removes members that are not heard, and may do so before one is back.
            assert last_words(process.log) in (REFUSED, REMOVED, TAKEN_UP)
        for name in old:
            swarm.join(name, tickets["relay"], ["--stage", name.partition("-")[2].partition(".")[0]])
        swarm.join("data-1", tickets["data"], ["--corpus", str(directory.corpus)])
        # Which of the newcomers vote depends on who came first.
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [before.t + 3] and len(voting(directory, swarm)) == 3)
        assert voters_of(directory)[0].startswith(swarm.peer_id("data-0"))
        swarm.stop()
        swarm.to_the_end()
    after = history_of(directory)
    assert {commit.epoch for commit in before.commits} == {1}
    assert [commit.epoch for commit in after.commits if commit.t > before.t] == [2] * (after.t - before.t)
    check_exact(directory, after.t)


def voting(directory: RunDirectory, swarm: Swarm) -> set[str]:
    ids = {voter.partition("/")[0] for voter in voters_of(directory)}
    return {name for name in swarm.processes if swarm.peer_id(name) in ids}
