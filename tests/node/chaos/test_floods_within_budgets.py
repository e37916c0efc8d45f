"""Live guests that send as many messages as their budgets permit, and are never refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.node.local_swarm.supervisor import Supervisor
from support.hostile_runs import hostile_run
from support.local_swarms import small_run
from support.patient_strangers import TOLD, run_patient_strangers
from support.transport_deeds import run_transport_guest

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}
#: Steps under attack, and messages that the strangers send meanwhile at least.
STEPS, MESSAGES = 40, 5 * TOLD


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["claims", "gradients"])
def test_eight_strangers_of_a_ticket(
    what: str, tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Before messages were handled in turn, the run took no step for as long as they came (28 s), and a
    newcomer did not come in. Nor did it (one step in 20 s) while payloads were not handled in turn."""
    with hostile_run(tmp_path / "run", small_run(texts, **ENDLESS), supervisor) as hostile:
        hostile.target = run_patient_strangers
        guest = hostile.invite(f"{what} within their budget", 1)
        hostile.until(lambda: len(guest.words("sent")) >= 1)
        since, before = hostile.steps, len(guest.words("sent"))
        swarm = hostile.swarm
        swarm.join("newcomer", swarm.ticket("relay"), ["--stage", "2"])
        hostile.until(
            lambda: (
                hostile.steps >= since + STEPS
                and (len(guest.words("sent")) - before) * TOLD >= MESSAGES
                and swarm.serves("newcomer")
            )
        )
        assert not guest.words("closed") and not hostile.honest_removed(), swarm.story()
    report = verify(tmp_path / "run")
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("keys", [1, 2])
def test_gradients_for_others_that_overflow(
    keys: int, tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Before, one guest ended the run after 3 s, as its gradients counted as others', and two of four relays
    after 6 s. In virtual time: test_gradients_for_others.py."""
    with hostile_run(tmp_path / "run", small_run(texts, **ENDLESS), supervisor) as hostile:
        hostile.target = run_transport_guest
        guests = [hostile.invite("gives for others", 1) for _ in range(keys)]
        hostile.until(hostile.withstood(*guests, steps=STEPS))
        assert not hostile.honest_removed(), hostile.swarm.story()
    report = verify(tmp_path / "run")
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_members_that_send_small_payloads(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Members send the leader nearly as many as their budget permits, and what they owe the step waits
    behind it. On two cores the run takes 1.0 steps a second beside four and 0.6 beside eight; before members'
    payloads were handled in turn it took 2.6 beside four, and fewer than 15 in two minutes beside eight."""
    with hostile_run(tmp_path / "run", small_run(texts, **ENDLESS), supervisor) as hostile:
        hostile.target = run_transport_guest
        guests = [hostile.invite("sends small payloads", 1 + number % 2) for number in range(4)]
        hostile.until(lambda: all(len(guest.words("sent")) >= 10 for guest in guests))
        since, before = hostile.steps, [len(guest.words("sent")) for guest in guests]
        hostile.until(lambda: hostile.steps >= since + STEPS)
        sent = [len(guest.words("sent")) for guest in guests]
        assert all(after > earlier for after, earlier in zip(sent, before, strict=True))
        assert not hostile.honest_removed(), hostile.swarm.story()
    report = verify(tmp_path / "run")
    assert report.holds and report.promise == "bits", report.lines()
