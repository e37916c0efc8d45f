"""Conversations, mixtures, packing and streamed datasets: what counts, in which shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anabranch
from anabranch.config import BatchSection, DataSection
from anabranch.data.batches import NOT_COUNTED, Batches, packed_rows, spread
from anabranch.data.chat import pieces_of
from anabranch.data.corpus import Corpus, materialise, open_corpus
from anabranch.data.corpus_cache import CorpusCache
from anabranch.data.hub import model_folder
from anabranch.errors import ConfigError

BATCH = BatchSection(microbatches=2, rows=2, sequence=32)
REVISION = "0123456789abcdef0123456789abcdef01234567"


def chat_file(folder: Path, count: int = 60, name: str = "chat.jsonl") -> Path:
    records: list[dict[str, Any]] = []
    for n in range(count):
        if n % 3 == 0:
            records.append({"instruction": f"add {n}", "input": "and 1", "output": f"it is {n + 1}"})
        else:
            turns = [("system", "be brief"), ("user", f"say {n}"), ("assistant", f"so: {n}")]
            records.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def corpus_of(folder: Path, **section: Any) -> Corpus:
    return materialise(DataSection(tokenizer="bytes", **section), folder)


def text(corpus: Corpus, ids: Any) -> str:
    return corpus.tokenizer.decode([int(each) for each in ids])


@pytest.mark.parametrize("template", ["plain", "chatml"])
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_only_the_answers_count(tmp_path: Path, template: str, packing: str) -> None:
    """The mean over what counts is the loss, in every iteration."""
    path = str(chat_file(tmp_path))
    kinds = {"source": "jsonl", "path": path, "format": "chat", "template": template, "packing": packing}
    corpus = corpus_of(tmp_path / "corpus", **kinds)
    batch = BatchSection(microbatches=2, rows=2, sequence=96)
    batches = Batches(corpus, batch, seed=1)
    said: list[str] = []
    for t in range(1, 20):
        found = 0
        for index in range(2):
            inputs, targets = batches.microbatch(t, index)
            counted = targets != NOT_COUNTED
            found += int(counted.sum())
            assert (targets[:, :-1] == inputs[:, 1:])[counted[:, :-1]].all()
            for row, these in zip(targets, counted, strict=True):
                said.append(text(corpus, row[these]))
        assert batches.weight(t) == pytest.approx(batches.tokens_per_iteration / max(1, found))
    spoken = "".join(said)
    assert "it is" in spoken and "so: " in spoken
    assert not any(word in spoken for word in ("add", "say", "brief", "User", "Assistant: ", "assistant"))
    again = Batches(open_corpus(tmp_path / "corpus"), batch, seed=1)
    assert again.manifest_hash(3) == batches.manifest_hash(3)
    assert batches.window_weight(0) > 1.0 and batches.iteration_bytes(1) > 0


def test_whole_documents_are_not_cut(tmp_path: Path) -> None:
    """A sequence holds documents as they are, in order; only a longer one is cut."""
    assert packed_rows([3, 5, 9, 30, 31], 10).tolist() == [[0, 9], [9, 19], [18, 28], [27, 31]]
    rows = packed_rows([4, 8, 12], 8)
    assert rows.tolist() == [[0, 8], [8, 12]]
    path = chat_file(tmp_path)
    batch = BatchSection(microbatches=2, rows=2, sequence=200)
    corpus = corpus_of(tmp_path / "c", source="jsonl", path=str(path), format="chat", packing="whole")
    batches = Batches(corpus, batch, seed=1)
    inputs, targets = batches.microbatch(1, 0)
    for row, mask in zip(inputs, targets, strict=True):
        said = text(corpus, row)
        assert said.startswith(("User", "be brief")) and said.rstrip().split("\n")[-1].startswith("Assistant")
        end = int(np.flatnonzero(row != corpus.separator)[-1])
        assert (mask[end + 1 :] == NOT_COUNTED).all(), "what fills up does not count"


def test_a_mixture_is_read_in_its_shares(tmp_path: Path) -> None:
    """Each source has its weight in every sum(weights) sequences, epoch after epoch, and none is repeated
    before all of a source were read."""
    assert Counter(source for source, _ in spread([3, 1, 2])) == {0: 3, 1: 1, 2: 2}
    assert spread([2, 1]) == ((0, 0), (1, 0), (0, 1))
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"{letter * 30}\n" for _ in range(60 if name == "a" else 200))
        )
    mixture = (f"text:{tmp_path / 'a.txt'}", f"text:{tmp_path / 'b.txt'}")
    corpus = corpus_of(tmp_path / "corpus", mixture=mixture, weights=(3, 1))
    batches = Batches(corpus, BATCH, seed=5)
    first = corpus.mixture[0].tokens // BATCH.sequence
    seen: list[int] = []
    for t in range(1, 41):
        numbers = [number for index in range(2) for number in batches.window_numbers(t, index)]
        inputs = np.concatenate([batches.microbatch(t, index)[0] for index in range(2)])
        letters = Counter("a" if (row == ord("a")).any() else "b" for row in inputs)
        assert letters == {"a": 3, "b": 1}
        seen += [number for number in numbers if number < batches._sources[1].first]
    of_a = batches._sources[0].windows.count
    assert of_a in (first, first - 1) and sorted(seen[:of_a]) == list(range(of_a))
    other = corpus_of(tmp_path / "other", mixture=mixture, weights=(1, 1))
    assert other.fingerprint != corpus.fingerprint, "the shares determine the batches"
    assert Batches(open_corpus(tmp_path / "corpus"), BATCH, 5).manifest_hash(7) == batches.manifest_hash(7)


def test_wrong_mixtures_and_records_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not SOURCE:PATH"):
        corpus_of(tmp_path / "c1", mixture=("nothing",))
    with pytest.raises(ConfigError, match=r"data\.weights has 1 numbers for 2 sources"):
        anabranch.Run.create({"data.mixture": ["text:a", "text:b"], "data.weights": [1]}, tmp_path / "r")
    with pytest.raises(ConfigError, match=r"takes the place of data\.source"):
        anabranch.Run.create(
            {"data.mixture": ["text:a"], "data.source": "text", "data.path": "x"}, tmp_path / "r"
        )
    with pytest.raises(ConfigError, match="are for pipelines"):
        anabranch.Run.create({"data.format": "chat", "pipeline.stages": 0}, tmp_path / "r")
    for record, problem in (
        ({"text": "hello"}, "its fields are text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "has role 'tool'"),
        ({"messages": ["x"]}, "has no role and content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nobody answers"),
    ):
        with pytest.raises(ConfigError, match=problem):
            pieces_of(record, "text", "plain", "record 1")


def test_text_never_becomes_a_marker() -> None:
    """A record that spells a marker is text."""
    record = {"prompt": "<|im_end|>", "answer": "<|im_start|>system"}
    markers = [piece for piece in pieces_of(record, "text", "chatml", "r") if piece.marker]
    assert [piece.text for piece in markers] == ["<|im_start|>", "<|im_end|>"] * 2


def test_a_cached_corpus_keeps_its_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.data.corpus.LEAST_BYTES", 1)
    cache = CorpusCache(tmp_path / "cache")
    path = str(chat_file(tmp_path))
    section = DataSection(source="jsonl", path=path, format="chat", packing="whole", tokenizer="bytes")
    told: list[str] = []
    first = materialise(section, tmp_path / "c1", None, told.append, cache)
    second = materialise(section, tmp_path / "c2", None, told.append, cache)
    assert first.fingerprint == second.fingerprint and any("cache" in each for each in told)
    assert second.train_mask is not None and second.train_ends is not None
    assert open_corpus(tmp_path / "c2").fingerprint == first.fingerprint


@pytest.mark.costly
def test_a_dataset_is_streamed_and_its_position_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder stands for the hub; a later run goes on behind what an earlier one read."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    # Read from the environment when they are imported, which may have been before.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(100)]
    (folder / "train.jsonl").write_text("".join(lines))
    first = corpus_of(tmp_path / "c1", source="hub", path=str(folder), documents=40)
    assert (first.train.documents, first.held_out.documents, first.position) == (38, 2, 40)
    second = corpus_of(tmp_path / "c2", source="hub", path=str(folder), documents=40, skip=40)
    assert second.position == 80 and "document 40 " in text(second, second.train_tokens[:200])
    assert (
        first.fingerprint
        == corpus_of(tmp_path / "c3", source="hub", path=str(folder), documents=40).fingerprint
    )
    (folder / "train.jsonl").write_text("".join(['{"text": ""}\n'] * 5 + lines))
    with_empty = corpus_of(tmp_path / "c6", source="hub", path=str(folder), documents=40)
    assert with_empty.position == 45, "data.skip counts empty records, too"
    monkeypatch.setattr("anabranch.data.corpus.LEAST_BYTES", 1)
    section = DataSection(source="hub", path=str(folder), documents=40, tokenizer="bytes")
    materialise(section, tmp_path / "c7", cache=CorpusCache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists(), "a stream counts records, and is not read once more for a hash"
    with pytest.raises(ConfigError, match="OWNER/NAME@REVISION"):
        corpus_of(tmp_path / "c4", source="hub", path="owner/name")
    with pytest.raises(ConfigError, match="cannot be read"):
        corpus_of(tmp_path / "c5", source="hub", path=f"owner/name@{REVISION}")


def test_a_model_is_taken_from_the_hub_s_cache_by_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without network; another revision is not there."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--owner--small" / "snapshots" / REVISION
    kept.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (kept / name).write_text("{}")
    assert model_folder(f"hub:owner/small@{REVISION}") == kept
    assert model_folder("~/x") == Path("~/x").expanduser()
    with pytest.raises(ConfigError, match="cannot be fetched"):
        model_folder(f"hub:owner/small@{REVISION[::-1]}")
    assert model_folder(f"hub:owner/small@{REVISION}", fetch=False) == kept
    for name in ("owner/small", "owner/small@main", f"../../x@{REVISION}"):
        with pytest.raises(ConfigError, match="OWNER/NAME@REVISION"):
            model_folder(f"hub:{name}")


def test_nothing_is_fetched_without_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file of others names a model; and a model that does not fit on the disk is not begun."""
    hub, asked = pytest.importorskip("huggingface_hub"), list[bool]()
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def download(name: str, local_files_only: bool, **others: object) -> str:
        asked.append(local_files_only)
        raise FileNotFoundError(name)

    def info(self: object, name: str, **others: object) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors", size=1 << 60)])

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "model_info", info)
    with pytest.raises(ConfigError, match="nothing is downloaded that a run file names unless you agree"):
        model_folder(f"hub:owner/small@{REVISION}", fetch=False)
    with pytest.raises(ConfigError, match="GiB free: delete files there"):
        model_folder(f"hub:owner/small@{REVISION}")
    assert asked == [True, True]


@pytest.mark.slow
def test_instructions_train_in_a_real_swarm(tmp_path: Path) -> None:
    """A mixture of conversations with masked prompts, whole in their rows: zero bits differ (I3)."""
    mixture = [f"jsonl:{chat_file(tmp_path, 80, f'{name}.jsonl')}" for name in ("one", "two")]
    config = {
        "model": {"dim": 32, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 48, "max_sequence": 64},
        "data": {"mixture": mixture, "weights": [2, 1], "format": "chat", "packing": "whole"},
        "data.tokenizer": "bytes",
        "batch": {"microbatches": 3, "rows": 2, "sequence": 64},
        "pipeline": {"stages": 1},
        "fleet": {"data_nodes": 2, "relays": 2},
        "evaluation": {"every": 2, "windows": 1},
        "compute": {"device": "cpu"},
        "run.steps": 5,
    }  # fmt: skip
    with anabranch.Run.create(config, tmp_path / "run") as run:
        losses = [step.loss for step in run.metrics() if step.loss is not None]
    report = run.verify()
    assert report.holds and report.promise == "bits" and report.steps == 5
    assert losses[-1] < losses[0] and 3.0 < losses[0] < 8.0, "the mean over what counts, not over all"
