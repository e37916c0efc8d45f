"""Live guests that ask for gradients, claim work, make overflows up or hold steps up, alone or together."""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Note, PeerActive, PeerRemoved, Skip
from support.counting_peers import run_counting_peer
from support.hostile_runs import HostileRun, LiveGuest, hostile_run
from support.local_swarms import PATIENCE_S, Swarm, history_of, small_run
from support.work_deeds import KEPT_S

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}


def holds(directory: RunDirectory) -> None:
    """No bit of the run differs from that of a single process."""
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


def stuck(swarm: Swarm) -> list[str]:
    """Notes of the leader about reduces that got stuck."""
    return [note.text for note in swarm.of(Note) if "the reduce of" in note.text and "is stuck" in note.text]


def units(guest: LiveGuest, word: str) -> dict[int, set[int]]:
    """Iteration -> units that the guest printed in lines that begin with `word`."""
    found = defaultdict[int, set[int]](set)
    for line in guest.words(word):
        t, *of_t = map(int, line.split())
        found[t].update(of_t)
    return found


@contextmanager
def lone_replica(
    path: Path, run: RunConfig, supervisor: Supervisor, deed: str, stage: int
) -> Iterator[tuple[HostileRun, LiveGuest, str]]:
    """A new run, a guest that does `deed` as the only replica of a stage, and the id of the relay that was
    the other one: it is killed once the guest serves."""
    with hostile_run(path, run, supervisor) as hostile:
        guest = hostile.invite(deed, stage)
        hostile.until(lambda: guest.peer in hostile.serving())
        name = f"relay-{stage}.0"
        victim = hostile.swarm.peer_id(name)
        hostile.swarm.processes[name].signal(signal.SIGKILL)
        yield hostile, guest, victim


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_guests_that_repeat_themselves_cost_a_gradient_and_a_reduce_more(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Both at once. However often one asks for a gradient, it gets it twice, and of microbatches that others
    sent few; however often the other names another owner of a microbatch, the reduce of its stage begins anew
    once."""
    run = small_run(texts, **ENDLESS, routing__policy="static")
    with hostile_run(tmp_path / "run", run, supervisor, target=run_counting_peer) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        wants = hostile.invite("wants gradients again and again", 1)
        names = hostile.invite("names two owners in turn", 1)

        def often() -> list[int]:
            """Iterations in which owners were changed in more than four bursts."""
            return [t for t, count in Counter(map(int, names.words("owner"))).items() if count > 4]

        hostile.until(lambda: len(often()) > 3 and len(wants.words("wanted")) > 20)
        came = Counter(wants.words("came"))
        assert max(came.values()) <= 2, came.most_common(3)
        own, foreign = set(wants.words("own")), Counter(wants.words("foreign"))
        asked = {what.split()[0] for what in foreign}
        # Each of two replicas grants one, and half as many as the guest had in the step before.
        assert 0 < foreign.total() <= 2 * len(asked) + len(own) + run.batch.microbatches, (own, foreign)
        orders = {tuple(map(int, line.split())) for line in hostile.printed("data-0", "ordered")}
        attempts = Counter(t for stage, t, _ in orders if stage == 2 and t in often())
        assert max(attempts.values()) <= 2, (attempts, often())
        hostile.end(wants, names)
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_accomplice_gives_away_its_own_work_alone(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Once others have claimed theirs, the liar is to add no microbatch that neither of the two computed. It
    lacks those of the accomplice, and loses its seat as it holds the sum up."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        friend = hostile.invite("vouches for a claimer", 1)
        liar = hostile.invite("claims its whole stage", 2, first=True)
        hostile.until(lambda: friend.begun >= 0 and bool(hostile.out(liar)))
        hostile.goes_on(5)
        has, friends = units(liar, "has"), units(friend, "has")
        last = {t: set(given) for t, *given in (map(int, line.split()) for line in liar.words("given"))}
        assert any(given - has[t] for t, given in last.items()), "the accomplice's word counted for nothing"
        assert any(len(has[t] | friends[t]) < run.batch.microbatches for t in last)
        for t, given in last.items():
            assert given <= has[t] | friends[t], (t, given, has[t], friends[t])
        hostile.end(friend, liar)
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_overflows_made_up_one_after_the_other_put_no_stall_off(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The guest claims nothing, and reports another overflow before the step stalls. It could go on through
    all microbatches of the step; others compute its own before it is half through. If nobody did so in two
    stalls its word is taken, once (docs/explanation/trust.md): `verify` finds the skipped step, and no bit
    that differs."""
    run = small_run(texts, **ENDLESS, batch__microbatches=24)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite("overflows in turn", 1)
        hostile.until(hostile.withstood(guest, steps=2))
        told = Counter(int(line.split()[0]) for line in guest.words("overflow"))
        assert 1 < max(told.values()) <= run.batch.microbatches / 2, told
        hostile.end(guest)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    skipped = [problem for problem in report.problems if "was skipped for made up" in problem]
    assert not report.differ and list(report.problems) == skipped and len(skipped) <= 1, report.lines()


@pytest.mark.soak  # in virtual time: test_never_sent_again.py
@pytest.mark.timeout(600)
def test_a_microbatch_that_a_guest_does_not_send_again_comes_another_way(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """A relay of the next stage dies with it. The step never ended."""
    run = small_run(texts, **ENDLESS, fleet__relays_per_stage=[2, 3])
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite("sends each microbatch once", 1)
        hostile.until(hostile.withstood(guest, steps=3))
        relays = {swarm.peer_id(name): name for name in ("relay-2.0", "relay-2.1", "relay-2.2")}
        sent, until = len(guest.words("first")), time.monotonic() + PATIENCE_S
        while len(guest.words("first")) == sent and time.monotonic() < until:
            time.sleep(0.02)
        victim = guest.words("first")[-1].split()[1]
        time.sleep(KEPT_S / 2)  # it has claimed the microbatch by then
        swarm.processes[relays[victim]].signal(signal.SIGKILL)
        hostile.until(lambda: bool(guest.words("kept")))
        hostile.goes_on()
        hostile.end(guest)
        assert {event.subject for event in hostile.honest_removed()} == {victim}, swarm.story()
    holds(directory)


@pytest.mark.soak  # in virtual time: test_withheld_windows.py
@pytest.mark.timeout(900)
def test_windows_that_a_lone_replica_withholds_are_evaluated_by_another(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The other replica of its stage is killed. The step that evaluates never ended."""
    often = ENDLESS | {"evaluation__every": 10, "fleet__relays_per_stage": [1, 2]}
    run = small_run(texts, **often)
    scene = lone_replica(tmp_path / "run", run, supervisor, "evaluates no window", 1)
    with scene as (hostile, guest, victim):
        swarm, directory = hostile.swarm, hostile.swarm.directory
        hostile.until(lambda: victim not in hostile.serving())
        windows = len(guest.words("window"))
        hostile.until(lambda: len(guest.words("window")) > windows)
        hostile.goes_on(15)
        moved = [event.reason for event in swarm.of(PeerRemoved) if "may hold the step up" in event.reason]
        assert len(moved) == 1, swarm.story()
        hostile.end(guest)
        assert {event.subject for event in hostile.honest_removed()} == {victim}, swarm.story()
    holds(directory)


@pytest.mark.soak  # in virtual time: test_unasked_digests.py
@pytest.mark.timeout(600)
def test_digests_that_nobody_asked_for_do_not_get_into_the_log(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """With one report of them `verify` found the log of the run wrong for ever."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite("reports digests", 1)
        hostile.until(hostile.withstood(guest, steps=5))
        assert len(guest.words("digests")) > 1
        hostile.end(guest)
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak  # in virtual time: test_skips_by_one_word.py
@pytest.mark.timeout(900)
def test_a_data_node_that_holds_steps_up_and_makes_overflows_up_stops_no_run(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Three steps in a row were skipped on its word, and the run ended."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm = hostile.swarm
        guest = hostile.invite("claims nothing and overflows", 0)
        hostile.until(lambda: bool(hostile.out(guest)))
        assert "on its word alone 2 steps were skipped" in hostile.out(guest), hostile.out(guest)
        assert len(swarm.of(Skip)) == 2 and not hostile.honest_removed(), swarm.story()
        hostile.goes_on(3)
        hostile.end(guest)


@pytest.mark.soak  # in virtual time: test_lone_finders.py
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lone_replica_that_makes_overflows_up_is_out_and_its_stage_restored(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The only other replica of the stage is killed once the guest serves. Steps that it had skipped stay in
    the log if a snapshot was taken after them; `verify` finds these steps, and no bit that differs."""
    snapshots = {"snapshots__every": 2, "snapshots__copies": 2, "fleet__relays_per_stage": [3, 1]}
    run = small_run(texts, **ENDLESS, **snapshots)
    scene = lone_replica(tmp_path / "run", run, supervisor, "overflows alone", 2)
    with scene as (hostile, guest, victim):
        swarm, directory = hostile.swarm, hostile.swarm.directory
        hostile.until(lambda: bool(hostile.out(guest)))
        assert "it alone found" in hostile.out(guest), hostile.out(guest)
        skips = swarm.of(Skip)
        assert len(skips) == 3 and {skip.stage for skip in skips} == {2}, skips
        hostile.goes_on(5)
        heirs = [e.subject for e in swarm.of(PeerActive) if e.stage == 2 and e.subject in hostile.serving()]
        assert set(heirs) - {victim, guest.peer}, swarm.story()
        assert {removed.subject for removed in hostile.honest_removed()} == {victim}, swarm.story()
    report = verify(directory.path)
    skipped = [problem for problem in report.problems if "was skipped for made up" in problem]
    assert not report.differ and list(report.problems) == skipped and len(skipped) <= 3, report.lines()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("deed", "word", "reduces", "changes"),
    [
        # The leader trusts it no more from the bad seal on, and judges it as soon as it sums all parts.
        ("forges and withholds", "forged", 2, {"audit__share": 0.2}),
        # It cuts that link whenever it owes parts; others hear it. It is judged after three such reduces.
        ("cuts and withholds", "cut", 4, {}),
    ],
)
def test_who_withholds_its_part_of_a_sum_takes_nobodys_seat(
    deed: str,
    word: str,
    reduces: int,
    changes: dict[str, float],
    tmp_path: Path,
    texts: Path,
    supervisor: Supervisor,
) -> None:
    """A forger, and a relay without a link to the leader, are judged by the parts that came. reduces: number
    of the stage's stuck reduces until then."""
    run = small_run(texts, **{**ENDLESS, "routing__policy": "static", **changes})
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite(deed, 1)
        hostile.until(lambda: bool(guest.words(word) and hostile.out(guest)))
        assert "parts of its sum" in hostile.out(guest), hostile.out(guest)
        assert len(stuck(swarm)) == reduces, stuck(swarm)
        hostile.goes_on()
        hostile.end(guest)
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_data_nodes_that_hold_the_steps_up_are_removed(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Three of them: the first begins none of its microbatches, the second claims none, and the third claims
    those that it never began."""
    run = small_run(texts, **ENDLESS)
    deeds = ("begins no microbatch", "claims nothing", "claims what it never began")
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guests = [hostile.invite(deed, 0) for deed in deeds]
        hostile.until(lambda: all(map(hostile.out, guests)))
        for guest in guests:
            assert "of this data node" in hostile.out(guest), (guest.deed, hostile.out(guest))
        hostile.end(*guests)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_convicted_walk_ins_do_not_close_the_door(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Two of them give false sums, one after the other. Their keys are out; the open ticket lets an honest
    machine in."""
    run = small_run(texts, **{**ENDLESS, "audit__share": 1e-9, "checkpoint__every": 3})
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        door = hostile.ticket("open", 0)
        guests = []
        for stage in (1, 2):
            guests.append(hostile.invite("false part", stage, door))
            hostile.until(lambda: bool(hostile.out(guests[-1])))
            hostile.goes_on()
        revoked = history_of(directory).revoked
        assert all(revoked.refusal(guest.peer, "") for guest in guests), [*map(hostile.out, guests)]
        swarm.join("walk-in", door.text, ["--stage", "1"])
        hostile.until(lambda: swarm.serves("walk-in"))
        hostile.goes_on()
        hostile.end(*guests)
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)
