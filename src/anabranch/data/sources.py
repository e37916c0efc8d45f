"""Documents of a source, one text at a time, always in the same order.

Files come in sorted order of their path below the source's folder; records of one file in the order of the
file. Bytes that are not UTF-8 are replaced by U+FFFD, which `Documents.remarks` tells, and empty documents
are left out. Binary files are left out of a folder, which is told too; a single one is refused.
"""

from __future__ import annotations

import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.config import DataSection
from anabranch.data.chat import FIELDS, Piece, clean, pieces_of
from anabranch.data.hub import stream
from anabranch.errors import ConfigError

#: Folders of the standard library without ordinary program text: tests, tables, applications, packages.
STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo", "__phello__"}
    | {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}
)
#: Fewest files of a `text` source that is not cut; with fewer, no 20th document exists to hold out.
FEWEST_TEXT_FILES = 20
#: Approximate number of pieces of a source of few text files, cut at line ends; a 20th is held out.
TEXT_PIECES = 200
#: Leading bytes of a file that are searched for a zero byte, the mark of a binary file.
BINARY_PROBE_BYTES = 8192
#: First bytes of formats that may have no zero byte early: PDF, gzip, zip, bzip2, xz, zstandard, PNG, JPEG.
BINARY_BEGINNINGS = (
    *(b"%PDF-", b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"),
    *(b"\x89PNG", b"\xff\xd8\xff"),
)
#: Byte order marks of UTF-16, whose text has zero bytes.
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Document:
    """Text of one document. `name`: file and record; `position`: approximate bytes of the source up to its
    end; `pieces`: of a conversation, whose text they are together; `component`: number of its source in a
    mixture."""

    name: str
    text: str
    position: int
    pieces: tuple[Piece, ...] = ()
    component: int = 0


@dataclass(frozen=True)
class Documents:
    """Documents of a source, without empty ones; may be iterated over any number of times. The iteration
    raises ConfigError for contents that cannot be used. `size_bytes` is the total of which
    `Document.position` is the running part (both count records if the source is streamed; in tables it grows
    with each file); `label` is the setting and the path for messages. `files` are all that is read,
    `left_out` binary files of the folder; `replaced` counts the U+FFFD that stand for undecodable bytes, by
    file, for the files iterated over so far. `parts` are the sources of a mixture, each with its own
    `left_out` and `replaced`."""

    label: str
    size_bytes: int
    open: Callable[[], Iterator[Document]]
    files: tuple[Path, ...] = ()
    left_out: tuple[Path, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)
    parts: tuple[Documents, ...] = ()

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.open() if document.text)

    def remarks(self) -> list[str]:
        """Sentences for the user about files that were left out, and about text that is not UTF-8."""
        if self.parts:
            return [remark for part in self.parts for remark in part.remarks()]
        found = []
        if self.left_out:
            count, first = len(self.left_out), self.left_out[0]
            found.append(f"{self.label}: {count} binary file(s) are left out, e.g. {first}")
        if self.replaced:
            name, bad = max(self.replaced.items(), key=lambda item: item[1])
            found.append(
                f"warning: {len(self.replaced)} file(s) are not UTF-8 and {sum(self.replaced.values()):,} "
                f"places became U+FFFD, most in {name} ({bad:,}); convert them first, e.g. from Latin-1: "
                "iconv -f latin1 -t utf-8"
            )
        return found


def open_documents(section: DataSection) -> Documents:
    """Documents of the run file's source, or of its mixture one after another. Raises ConfigError if there is
    no source, or nothing to read in it; unreadable contents raise it during the iteration."""
    if not section.mixture:
        return _some(section)
    parts = [_some(_component(section, each)) for each in section.mixture]

    def documents() -> Iterator[Document]:
        before = 0
        for number, part in enumerate(parts):
            for document in part:
                yield replace(document, component=number, position=before + document.position)
            before += part.size_bytes

    return Documents(
        f"data.mixture = {list(section.mixture)}",
        sum(part.size_bytes for part in parts),
        documents,
        tuple(file for part in parts for file in part.files),
        parts=tuple(parts),
    )


def _component(section: DataSection, entry: str) -> DataSection:
    """Section of one source of a mixture, "SOURCE:PATH". Raises ConfigError if it is ill-formed."""
    source, _, path = entry.partition(":")
    if source not in OPENERS or not (path or source == "stdlib"):
        raise ConfigError(
            f'data.mixture: "{entry}" is not SOURCE:PATH with one of {", ".join(OPENERS)} before the colon'
        )
    return replace(section, source=source, path=path, mixture=(), weights=())


def _some(section: DataSection) -> Documents:
    """Documents of one source from `data.skip` on, `data.documents` at most (streams skip by themselves)."""
    documents = OPENERS[section.source](section)
    if not section.skip and not section.documents:
        return documents
    first = 0 if section.source == "hub" else section.skip
    end = first + section.documents if section.documents else None
    return replace(documents, open=lambda: islice(iter(documents), first, end))


def replace_undecodable(data: bytes) -> str:
    """Decode `data` as UTF-8, without a byte order mark; undecodable bytes become U+FFFD."""
    return data.decode("utf-8", errors="replace").removeprefix("\ufeff")


# ---- the standard library -------------------------------------------------------------------------


def stdlib_files(root: Path) -> list[Path]:
    """Python files below `root` that belong to the `stdlib` corpus, in sorted order."""
    return [
        path
        for path in _walk(root, skip=lambda name: name in STDLIB_LEFT_OUT or name.startswith("config-"))
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]


def _stdlib(section: DataSection) -> Documents:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_files(root) if root.is_dir() else []
    if not files:
        raise ConfigError(
            f'data.source = "stdlib": this Python keeps no library source text at {root}; '
            'set data.source = "text" and data.path to a folder of your own'
        )
    return _file_documents(f'data.source = "stdlib" ({root})', root, files)


# ---- local text -----------------------------------------------------------------------------------


def _text(section: DataSection) -> Documents:
    root, label = _existing_path(section), _label(section)
    found = [root] if root.is_file() else _walk(root)
    left_out = tuple(path for path in found if _looks_binary(path))
    files = [path for path in found if path not in set(left_out)]
    if not files:
        what = "is a binary file, not text" if root.is_file() else "holds no text file"
        raise ConfigError(
            f"{label} {what}; point data.path at a file or a folder of text, and convert other files first "
            "(UTF-16: iconv -f utf-16 -t utf-8; PDF: pdftotext; archives: unpack them)"
        )
    return _file_documents(label, root, files, len(files) < FEWEST_TEXT_FILES, left_out)


def _file_documents(
    label: str, root: Path, files: list[Path], cut: bool = False, left_out: tuple[Path, ...] = ()
) -> Documents:
    """Documents of text files: each file is one document, or all are `cut` at line ends, into about
    TEXT_PIECES. The iteration raises ConfigError for an unreadable file. label: setting and path, for
    messages. left_out: binary files of the folder."""
    total = _total_size(files)
    replaced: dict[str, int] = {}
    piece_bytes = max(1, math.ceil(total / TEXT_PIECES))

    def documents() -> Iterator[Document]:
        position = 0
        for path in files:
            try:
                data = path.read_bytes()
            except OSError as error:
                remedy = "make it readable or remove it"
                raise ConfigError(f"{label}: {path} cannot be read ({error.strerror}); {remedy}") from None
            name = path.name if path == root else path.relative_to(root).as_posix()
            if bad := _undecodable(data):
                replaced[name] = bad
            for number, piece in enumerate(_cut_at_line_ends(data, piece_bytes) if cut else [data]):
                position += len(piece)
                yield Document(f"{name}#{number}" if cut else name, replace_undecodable(piece), position)

    return Documents(label, total, documents, tuple(files), left_out, replaced)


def _cut_at_line_ends(data: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Cut `data` into pieces that end where a line ends, each of at least `piece_bytes` (except the last)."""
    start = 0
    while start < len(data):
        line_end = data.find(b"\n", start + piece_bytes - 1)
        end = len(data) if line_end < 0 else line_end + 1
        yield data[start:end]
        start = end


# ---- records --------------------------------------------------------------------------------------


def _jsonl(section: DataSection) -> Documents:
    files = _record_files(section, (".jsonl", ".ndjson"))
    label = _label(section)
    replaced: dict[str, int] = {}

    def documents() -> Iterator[Document]:
        position = 0
        replaced.clear()
        for path in files:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    position += len(line)
                    if not line.strip():
                        continue
                    if bad := _undecodable(line):
                        replaced[str(path)] = replaced.get(str(path), 0) + bad
                    name = f"{path}, line {number}"
                    try:
                        record = json.loads(replace_undecodable(line))
                    except (ValueError, RecursionError) as error:
                        raise ConfigError(f"{name} is not JSON ({error}); repair or remove it") from None
                    if not isinstance(record, dict):
                        raise ConfigError(f"{name} is not a JSON object; every line must be one record")
                    yield _document(name, record, section, position)

    return Documents(label, _total_size(files), documents, tuple(files), replaced=replaced)


def _parquet(section: DataSection) -> Documents:
    parquet = _import_arrow("pyarrow.parquet", section.source, "parquet")
    files = _record_files(section, (".parquet",))

    def open_table(path: Path) -> tuple[list[str], Iterator[Any]]:
        table = parquet.ParquetFile(path)
        names = list(table.schema_arrow.names)
        return names, table.iter_batches(columns=_columns(section, names))

    return _table_documents(section, files, open_table)


def _saved_dataset(section: DataSection) -> Documents:
    """Documents of a folder that `Dataset.save_to_disk` made; `state.json` lists its Arrow files in order.
    Raises ConfigError for another folder, or one with several splits."""
    ipc = _import_arrow("pyarrow.ipc", section.source, "datasets")
    root = _existing_path(section)
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent for path in root.glob("*/state.json"))
        named = f', e.g. "{splits[0]}"' if splits else ""
        raise ConfigError(f"{_label(section)} holds several splits; set data.path to one of them{named}")
    state = root / "state.json"
    if not state.is_file():
        raise ConfigError(
            f"{_label(section)} is not a saved dataset (no state.json); make one with Dataset.save_to_disk"
        )
    try:
        entries = json.loads(state.read_bytes())["_data_files"]
        files = [root / Path(entry["filename"]).name for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{state} is damaged; save the dataset again with Dataset.save_to_disk") from None

    def open_table(path: Path) -> tuple[list[str], Iterator[Any]]:
        stream = ipc.open_stream(path)
        return list(stream.schema.names), iter(stream)

    return _table_documents(section, files, open_table)


def _table_documents(
    section: DataSection, files: list[Path], open_table: Callable[[Path], tuple[list[str], Iterator[Any]]]
) -> Documents:
    """Documents of the rows of Arrow tables, one file after the other. open_table: file -> its column names
    and its record batches. The iteration raises ConfigError for an unreadable file."""

    def documents() -> Iterator[Document]:
        position = 0
        for path in files:
            try:
                columns, batches = open_table(path)
            except (OSError, ValueError) as error:  # Arrow's own errors derive from ValueError
                raise ConfigError(f"{path} cannot be read ({error}); see data.path") from None
            wanted = _columns(section, columns)
            if section.format == "text":
                _require_field(section.text_field, columns, str(path))
            row = 0
            for batch in batches:
                for record in batch.select(wanted).to_pylist():
                    yield _document(f"{path}, row {row}", record, section, position)
                    row += 1
            position += path.stat().st_size

    return Documents(_label(section), _total_size(files), documents, tuple(files))


def _hub(section: DataSection) -> Documents:
    """Documents of a dataset that is streamed; positions count records. The iteration raises ConfigError if
    the dataset or a record cannot be used."""

    def documents() -> Iterator[Document]:
        for number, record in enumerate(stream(section), start=1):
            yield _document(f"{section.path}, record {section.skip + number - 1}", record, section, number)

    return Documents(_label(section), max(1, section.documents), documents)


def _columns(section: DataSection, names: list[str]) -> list[str]:
    """Columns to read from a table that has the columns `names`: the text field; for the format "chat" also
    the columns that usually hold a conversation (`FIELDS`)."""
    wanted = (section.text_field, *FIELDS) if section.format == "chat" else (section.text_field,)
    return [name for name in dict.fromkeys(wanted) if name in names]


def _document(name: str, record: dict[str, Any], section: DataSection, position: int) -> Document:
    """Document of one record: its text field, or its conversation in pieces if the format is "chat". name:
    file and record, for messages. position: as in `Document`. Raises ConfigError if the text field is missing
    or no text (null is no error, but an empty text), or there is no conversation."""
    if section.format == "chat":
        pieces = pieces_of(record, section.text_field, section.template, name)
        return Document(name, "".join(piece.text for piece in pieces), position, pieces)
    _require_field(section.text_field, list(record), name)
    return Document(name, _field_text(record[section.text_field], section, name), position)


def _import_arrow(module: str, source: str, extra: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(
            f'data.source = "{source}" needs the pyarrow library; '
            f'install it with: pip install "anabranch[{extra}]"'
        ) from None


def _require_field(field: str, present: list[str], name: str) -> None:
    if field not in present:
        raise ConfigError(
            f'{name} has no field "{field}"; set data.text_field to one of: {", ".join(present) or "(none)"}'
        )


def _field_text(value: object, section: DataSection, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(
            f'{name}: field "{section.text_field}" holds {type(value).__name__}, not text; '
            "correct data.text_field"
        )
    return clean(value)


# ---- files ----------------------------------------------------------------------------------------


def _label(section: DataSection) -> str:
    return f'data.path = "{section.path}"'


def _existing_path(section: DataSection) -> Path:
    path = Path(section.path).expanduser()
    if not path.exists():
        raise ConfigError(f"{_label(section)} does not exist ({path.absolute()}); correct data.path")
    return path


def _record_files(section: DataSection, suffixes: tuple[str, ...]) -> list[Path]:
    root = _existing_path(section)
    files = [root] if root.is_file() else [path for path in _walk(root) if path.suffix in suffixes]
    if not files:
        raise ConfigError(f"{_label(section)} holds no {' or '.join(suffixes)} file; correct data.path")
    return files


def _walk(root: Path, skip: Callable[[str], bool] = lambda name: False) -> list[Path]:
    """Files below `root`, sorted by relative path, without hidden ones. skip(name): folders to leave out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and not skip(name)]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _undecodable(data: bytes) -> int:
    """Number of undecodable places in `data`: U+FFFD that decoding as UTF-8 adds to those of the text."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("utf-8", errors="replace").count("\ufffd") - data.count("\ufffd".encode())
    return 0


def _looks_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            probe = file.read(BINARY_PROBE_BYTES)
            return b"\0" in probe or probe.startswith(BINARY_BEGINNINGS + UTF_16_MARKS)
    except OSError:
        return False  # reading the file later reports the error with its name


def _total_size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files if path.exists())


#: Value of `data.source` -> function that opens it.
OPENERS: dict[str, Callable[[DataSection], Documents]] = {
    "stdlib": _stdlib,
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "dataset": _saved_dataset,
    "hub": _hub,
}
