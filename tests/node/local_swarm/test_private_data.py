"""Real processes whose rounds are on data of their own: no token leaves its machine, and every bit of the
rounds is checked by anybody, every bit of the inner steps by their owner."""

from __future__ import annotations

import re
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, load_run_file
from anabranch.data.corpus import open_corpus
from anabranch.errors import UserError
from anabranch.node.local_swarm.local_swarm import create_local
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Step
from anabranch.protocol.log.records import Commit
from anabranch.protocol.rounds.plan import filled
from anabranch.train.adapters.lora import run_model
from anabranch.train.islands.kept_contributions import (
    ContributionFolder,
    contribution_digest,
    files_of,
    read_contribution,
    read_header,
)
from anabranch.train.model.interface import stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.sizes import model_config
from support.audited_runs import change_step
from support.local_swarms import check_exact, history_of, small_run, swarm_of
from support.recording_peers import SENT, run_recording_peer

RELAYS = ("relay-1.0", "relay-1.1", "relay-1.2", "relay-1.3")


def secret_texts(folder: Path, secret: str) -> Path:
    """Text of 24 documents with `secret` in each line."""
    folder.mkdir(parents=True)
    for number in range(24):
        lines = (f"{secret} {number}/{line} by the harbour wall\n" for line in range(30))
        (folder / f"{number:02}.txt").write_text("".join(lines))
    return folder


def forms_of(secret: str) -> list[bytes]:
    """`secret` as text and as token ids of the tokenizer "bytes", of one to eight bytes each."""
    ids = np.frombuffer(secret.encode(), dtype=np.uint8)
    return [ids.astype(kind).tobytes() for kind in ("<u1", "<u2", "<u4", "<u8", ">u2", ">u4")]


@pytest.fixture(scope="module")
def trained(
    texts: Path, tmp_path_factory: pytest.TempPathFactory, supervisor: Supervisor
) -> Iterator[tuple[RunDirectory, dict[str, str]]]:
    """Run of three islands of which one is killed in a round, and of a fourth that joins; with the secret of
    each."""
    path = tmp_path_factory.mktemp("private")
    run = small_run(
        texts,
        run__steps=4000,
        data__private=True,
        pipeline__stages=0,
        round__slots=3,
        round__steps=4,
        round__start=0.001,
        round__late="wait",  # on a busy machine slots are late, and would not count
        fleet__relays_per_stage=[3],
        fleet__minimum=3,
        evaluation__every=100,
        checkpoint__every=100,
        checkpoint__keep=100,
    )
    secrets = {name: f"Zx{number}-secret-of-{name}-qK" for number, name in enumerate(RELAYS)}
    given = [secret_texts(path / "owners" / name, secrets[name]) for name in RELAYS[:3]]
    directory = create_local(run, path / "run", given)
    with swarm_of(directory, run, supervisor, target=run_recording_peer) as swarm:
        swarm.until(lambda seen: sum(isinstance(event, Step) for event in seen) > 8)
        victim = swarm.peer_id("relay-1.1")
        swarm.read(lambda: sum(victim in owners_of(step) for step in swarm.of(Step) if step.t > 4) > 2)
        swarm.processes["relay-1.1"].signal(signal.SIGKILL)
        secret_texts(path / "owners" / "relay-1.3", secrets["relay-1.3"])
        joiner = prepare_for(directory, run, path / "owners" / "relay-1.3", "relay-1.3")
        swarm.join("relay-1.3", swarm.ticket(), ["--stage", "1", "--private-data", str(joiner)])
        swarm.until(lambda seen: swarm.serves("relay-1.3"))
        swarm.read(lambda: sum(swarm.peer_id("relay-1.3") in owners_of(step) for step in swarm.of(Step)) > 4)
        swarm.stop()
        swarm.to_the_end()
        assert victim not in owners_of(swarm.of(Step)[-1])
    yield directory, secrets


def owners_of(step: Step) -> set[str]:
    return {peer for units in step.owners.values() for peer in units.values()}


def prepare_for(directory: RunDirectory, run: RunConfig, texts: Path, name: str) -> Path:
    """Corpus of a machine that joins, prepared as its owner would, in its own folder."""
    from anabranch.config import DataSection
    from anabranch.data.corpus import materialise

    tokenizer = str(directory.corpus / "tokenizer.json")
    folder = directory.peer(name) / "private"
    materialise(DataSection(source="text", path=str(texts), tokenizer=tokenizer), folder)
    return folder


def contributions(directory: RunDirectory, name: str) -> list[Path]:
    """Files of a machine's contributions that count, as none of a late slot does."""
    logged = {
        digest
        for commit in history_of(directory).commits
        for part in commit.stages[1:]
        for digest in part.contributions
    }
    found = files_of(directory.peers_path / name / "contributions")
    return [path for path in found if read_header(path).digest in logged]


@pytest.mark.costly
@pytest.mark.slow
def test_zero_bits_differ_in_rounds_and_in_inner_steps(
    trained: tuple[RunDirectory, dict[str, str]],
) -> None:
    directory, _ = trained
    history = history_of(directory)
    check_exact(directory, history.t)
    report = verify(directory.path)
    slots = sum(len(filled(plan, history.commits[t - 1].stages)) for t, plan in history.plans.items()
                if t <= history.t)  # fmt: skip
    assert report.counts["contributions"].compared == slots >= 12
    assert not report.counts["inner steps"].compared and not report.left_out
    owner = verify(directory.path, private_data=[directory.peers_path / "relay-1.3" / "private"])
    assert owner.holds and owner.counts["inner steps"].compared >= 4
    data = [directory.peers_path / name / "private" for name in RELAYS]
    everybody = verify(directory.path, private_data=data)
    assert everybody.holds and everybody.counts["inner steps"].compared == slots
    assert everybody.counts["losses"].compared > report.counts["losses"].compared


@pytest.mark.slow
def test_no_token_leaves_its_machine(trained: tuple[RunDirectory, dict[str, str]]) -> None:
    """Searched: all bytes that any peer sent, and all files of the run outside of the owner's folder."""
    directory, secrets = trained
    sent = {name: (directory.peers_path / name / SENT).read_bytes() for name in RELAYS}
    assert all(len(data) > 10_000 for data in sent.values())
    for name, secret in secrets.items():
        own = directory.peers_path / name
        forms = forms_of(secret)
        tokens = (own / "private" / "train.tokens").read_bytes()
        assert any(form in tokens for form in forms)  # the search finds what is there
        for path in directory.path.rglob("*"):
            if path.is_file() and (path.name == SENT or own not in path.parents):
                data = path.read_bytes()
                assert not any(form in data for form in forms), (name, path)
    # The payload of a slot is one byte; ids of a microbatch are those of a synchronous step.
    words = (directory.peers_path / "data-0" / "output.txt").read_text()
    assert sorted(map(int, re.findall(r"^sent (\d+)$", words, re.M))) == [1, 34]


@pytest.mark.slow
def test_one_bit_of_a_contribution_is_found_by_name(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path
) -> None:
    directory = copied(trained[0], tmp_path)
    path = contributions(directory, "relay-1.2")[3]
    about, data = read_header(path), path.read_bytes()
    begin = 4 + int.from_bytes(data[:4], "little")
    values = bytearray(zlib.decompress(data[begin + 4 :]))
    values[1000] ^= 4
    packed = zlib.compress(bytes(values))
    path.write_bytes(data[:begin] + len(packed).to_bytes(4, "little") + packed)
    report = verify(directory.path)
    assert not report.holds
    where = f"the contribution of slot {about.slot} to round {about.t}, by relay-1.2"
    [problem] = report.problems
    assert problem.startswith(where) and str(path) in problem and "do not have the digest" in problem
    # Another contribution of the same machine under its name is not the log's, either.
    other = contributions(directory, "relay-1.2")[5]
    renamed = msgspec.structs.replace(read_header(other), t=about.t, slot=about.slot)
    header, data = msgspec.json.encode(renamed), other.read_bytes()
    begin = 4 + int.from_bytes(data[:4], "little")
    path.write_bytes(len(header).to_bytes(4, "little") + header + data[begin:])
    [problem] = verify(directory.path).problems
    assert problem.startswith(where) and "is not the one that the log has" in problem


@pytest.mark.costly
@pytest.mark.slow
def test_contributions_that_are_not_what_was_summed_are_found(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path
) -> None:
    """Log and file agree on another contribution than the one that was added, as if a machine had sent a
    false one to those who sum. With its owner's data the machine is named."""
    directory = copied(trained[0], tmp_path)
    path = contributions(directory, "relay-1.2")[3]
    about, run = read_header(path), load_run_file(directory.run_file)
    model = model_config(run.model, run.model.vocab_size or 0)
    layout = stage_layout(run_model(run, model, torch.device("cpu")), partition(model, run.pipeline)[1])
    _, change = read_contribution(path, layout, torch.float32)
    change[17] += 1.0
    false = msgspec.structs.replace(about, digest=contribution_digest(layout, change))
    ContributionFolder(path.parent, 1 << 30).keep(false, change)

    def lie(commit: Commit) -> Commit:
        stages = list(commit.stages)
        known = list(stages[1].contributions)
        known[about.slot] = false.digest
        stages[1] = msgspec.structs.replace(stages[1], contributions=tuple(known))
        return msgspec.structs.replace(commit, stages=tuple(stages))

    change_step(directory, about.t, lie)
    report = verify(directory.path)
    assert not report.holds and not report.problems and report.counts["digests"].differ >= 1
    assert report.counts["digests"].first == f"step {about.t}, stage 1"
    owner = verify(directory.path, private_data=[directory.peers_path / "relay-1.2" / "private"])
    assert owner.counts["inner steps"].first == f"step {about.t}, contribution of slot {about.slot}"


@pytest.mark.costly
@pytest.mark.slow
def test_rounds_without_a_contribution_are_named_and_the_rest_is_checked(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path
) -> None:
    directory = copied(trained[0], tmp_path)
    end = history_of(directory).t
    kept = {read_header(path).t: path for path in contributions(directory, "relay-1.0")}
    lost = min(t for t in kept if t > 9)
    after = next((t for t in directory.checkpoints() if t >= lost), end)
    kept[lost].unlink()
    report = verify(directory.path)
    assert report.holds and list(report.left_out) == list(range(lost, after + 1))
    assert report.steps == end - len(report.left_out)
    assert "could not be checked" in report.verdict()
    assert any(f"to round {lost}, by relay-1.0" in note and "is not here" in note for note in report.notes)
    shutil.move(directory.peers_path / "relay-1.2" / "contributions", tmp_path / "sent to us")
    assert len(verify(directory.path).left_out) > len(report.left_out)
    again = verify(directory.path, contributions=[tmp_path / "sent to us"])
    assert again.holds and again.left_out == report.left_out
    # With the data the contribution is computed again, and compared with its digest in the log.
    own = verify(
        *(directory.path, 1, False, None, False, [tmp_path / "sent to us"]),
        [directory.peers_path / "relay-1.0" / "private"],
    )
    assert own.holds and not own.left_out


def rename_corpus(path: Path, corpus: str) -> None:
    """Have a kept contribution name another corpus."""
    header = msgspec.json.encode(msgspec.structs.replace(read_header(path), corpus=corpus))
    data = path.read_bytes()
    begin = 4 + int.from_bytes(data[:4], "little")
    path.write_bytes(len(header).to_bytes(4, "little") + header + data[begin:])


@pytest.mark.costly
@pytest.mark.slow
def test_a_machine_may_have_had_several_corpora(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path
) -> None:
    """Each contribution is compared with the corpus that it names: an owner who joins again with more text is
    not said to have computed falsely before."""
    directory = copied(trained[0], tmp_path)
    files = contributions(directory, "relay-1.2")
    data = [directory.peers_path / name / "private" for name in ("relay-1.2", "relay-1.0")]
    before = verify(directory.path, private_data=data[:1])
    rename_corpus(files[3], open_corpus(data[1]).fingerprint)
    one = verify(directory.path, private_data=data[:1])
    assert one.holds and any("1 contribution of theirs were not" in note for note in one.notes)
    assert one.counts["inner steps"].compared == before.counts["inner steps"].compared - 1
    about = read_header(files[3])
    both = verify(directory.path, private_data=data)
    assert both.counts["inner steps"].differ == 1  # it was made of the other one, in truth
    assert both.counts["inner steps"].first == f"step {about.t}, contribution of slot {about.slot}"


@pytest.mark.slow
def test_what_is_left_out_is_not_called_compared(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the replay goes on from is not compared with itself, and Ctrl+C after a gap does not
    say that no bit differs."""
    directory = copied(trained[0], tmp_path)
    whole = verify(directory.path)
    last = max(contributions(directory, "relay-1.0"), key=lambda path: read_header(path).t)
    after = [t for t in directory.checkpoints() if t >= read_header(last).t]
    last.unlink()
    report = verify(directory.path)
    assert after and report.holds and report.left_out
    assert report.counts["weights"].compared < whole.counts["weights"].compared

    def stopped(history: object, stepper: object, observers: object, count: Any, *rest: object) -> None:
        count(20.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.audit.verify.replay", stopped)
    with pytest.raises(KeyboardInterrupt, match="the same command begins again"):
        verify(directory.path)


@pytest.mark.slow
def test_data_that_no_contribution_names_are_refused(
    trained: tuple[RunDirectory, dict[str, str]], tmp_path: Path
) -> None:
    directory, _ = trained
    with pytest.raises(UserError, match="no contribution that is here was made of this corpus"):
        verify(directory.path, private_data=[directory.corpus])
    with pytest.raises(UserError, match="--independent does not work where data are private"):
        verify(directory.path, independent=True)


def copied(directory: RunDirectory, folder: Path) -> RunDirectory:
    shutil.copytree(directory.path, folder / "run")
    return RunDirectory.open(folder / "run")
