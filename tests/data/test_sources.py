"""Sources of text: folders, files, datasets, the interpreter's own library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.config import DataSection
from anabranch.data.sources import FEWEST_TEXT_FILES, TEXT_PIECES, open_documents
from anabranch.errors import ConfigError
from support.small_corpus import write_folder

FIXTURES = Path(__file__).parent / "fixtures"


def texts(section: DataSection) -> list[str]:
    return [document.text for document in open_documents(section)]


def refused(section: DataSection) -> str:
    with pytest.raises(ConfigError) as caught:
        texts(section)
    return str(caught.value)


def test_stdlib_is_program_text_of_this_machine_without_tests_and_tables() -> None:
    documents = list(open_documents(DataSection()))
    names = [document.name for document in documents]
    assert len(names) > 300
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert names == sorted(names, key=lambda name: tuple(name.split("/")))
    assert "heapq.py" in names and "json/decoder.py" in names
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert "json" in folders and not folders & {"test", "tests", "encodings", "idlelib", "site-packages"}
    assert documents[-1].position == open_documents(DataSection()).size_bytes


def test_text_folder_comes_in_sorted_order_whatever_the_order_of_creation(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a/b/c.md", "c.txt", *(f"d{number:02d}.txt" for number in range(20))]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    documents = list(open_documents(DataSection(source="text", path=str(tmp_path))))
    assert [document.name for document in documents][:4] == ["a/b/c.md", "a/z.txt", "b.txt", "c.txt"]
    assert documents[0].text == "text of a/b/c.md"


def test_hidden_binary_and_empty_files_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, FEWEST_TEXT_FILES)
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / "empty.txt").write_text("")
    assert len(texts(DataSection(source="text", path=str(tmp_path)))) == FEWEST_TEXT_FILES


def test_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path, FEWEST_TEXT_FILES)
    (tmp_path / "part-000.txt").write_bytes(b"caf\xe9 ol\xc3\xa9")
    assert texts(DataSection(source="text", path=str(tmp_path)))[0] == "caf\ufffd olé"


def test_what_is_left_out_or_replaced_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path, FEWEST_TEXT_FILES)
    (tmp_path / "part-000.txt").write_bytes(b"caf\xe9 ol\xe9")
    (tmp_path / "paper.txt").write_bytes(b"%PDF-1.7 " + b"x" * 100)
    documents = open_documents(DataSection(source="text", path=str(tmp_path)))
    for _ in range(2):
        assert len(list(documents)) == FEWEST_TEXT_FILES
    left_out, replaced = documents.remarks()
    assert "1 binary file(s) are left out" in left_out and "paper.txt" in left_out
    assert "1 file(s) are not UTF-8 and 2 places" in replaced and "part-000.txt" in replaced
    assert "iconv -f latin1" in replaced


def test_latin_1_in_json_lines_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "plain"}\n')
    documents = open_documents(DataSection(source="jsonl", path=str(tmp_path)))
    assert len(list(documents)) == 2
    assert "1 places became U+FFFD" in documents.remarks()[0]


@pytest.mark.parametrize("data", [b"PK\x03\x04zip", b"a\0b", "größer".encode("utf-16")])
def test_a_single_binary_file_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"texts.txt.* is a binary file, not text.*iconv -f utf-16"):
        open_documents(DataSection(source="text", path=str(file)))


def test_a_single_file_is_cut_at_line_ends_without_losing_a_byte(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line {number} of the one file\n" for number in range(2000)))
    pieces = texts(DataSection(source="text", path=str(file)))
    assert "".join(pieces) == file.read_text()
    assert all(piece.endswith("\n") for piece in pieces)
    assert TEXT_PIECES / 2 < len(pieces) <= TEXT_PIECES


def test_jsonl_reads_the_field_and_skips_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"body": "third"}\n')
    lines = ['{"body": "first", "n": 1}', "", '{"body": "second \\ud800!"}', '{"body": null}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    section = DataSection(source="jsonl", path=str(tmp_path), text_field="body")
    assert texts(section) == ["first", "second \ufffd!", "third"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"text": "a"', ["line 2", "not JSON"]),
        ("[1]", ["line 2", "not a JSON object"]),
        ('{"body": "a", "n": 1}', ["line 2", 'no field "text"', "data.text_field", "body, n"]),
        ('{"text": 7}', ["line 2", "int, not text", "data.text_field"]),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path: Path, line: str, parts: list[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    message = refused(DataSection(source="jsonl", path=str(file)))
    assert all(part in message for part in [str(file), *parts]), message


def test_parquet_reads_the_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, values in {"b": ["three"], "a": ["one", None, "two ✓"]}.items():
        table = pyarrow.table({"body": values, "n": [1] * len(values)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    section = DataSection(source="parquet", path=str(tmp_path), text_field="body")
    assert texts(section) == ["one", "two ✓", "three"]
    message = refused(DataSection(source="parquet", path=str(tmp_path)))
    assert 'no field "text"' in message and "body, n" in message
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    assert "a.parquet cannot be read" in refused(section)


def test_dataset_saved_on_disk(tmp_path: Path) -> None:
    """The fixture was written by `datasets.Dataset.save_to_disk` in two shards."""
    pytest.importorskip("pyarrow")
    folder = FIXTURES / "saved_dataset"
    section = DataSection(source="dataset", path=str(folder / "train"))
    assert texts(section) == ["one", "two ✓", "three", "four"]
    assert f"{folder / 'train'}" in refused(DataSection(source="dataset", path=str(folder)))
    assert "no state.json" in refused(DataSection(source="dataset", path=str(tmp_path)))
    (tmp_path / "dataset_dict.json").write_text('{"splits": []')  # cut off
    assert "several splits" in refused(DataSection(source="dataset", path=str(tmp_path)))


@pytest.mark.parametrize(("source", "extra"), [("parquet", "parquet"), ("dataset", "datasets")])
def test_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, extra: str
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
        monkeypatch.setitem(sys.modules, module, None)
    message = refused(DataSection(source=source, path=str(tmp_path)))
    assert f'pip install "anabranch[{extra}]"' in message


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "dataset"])
def test_missing_paths_and_empty_folders_name_the_key(tmp_path: Path, source: str) -> None:
    if source in ("parquet", "dataset"):
        pytest.importorskip("pyarrow")
    missing = tmp_path / "missing"
    assert f'data.path = "{missing}" does not exist' in refused(DataSection(source=source, path=str(missing)))
    assert str(tmp_path) in refused(DataSection(source=source, path=str(tmp_path)))


def test_documents_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(3)))
    documents = open_documents(DataSection(source="jsonl", path=str(file)))
    read: Callable[[], list[str]] = lambda: [document.text for document in documents]  # noqa: E731
    assert read() == read() == ["number 0", "number 1", "number 2"]
