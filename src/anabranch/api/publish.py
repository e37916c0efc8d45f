"""Pushing a run's checkpoints, or the model as a folder for transformers, to a store that fsspec knows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.api.model import load
from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError, missing_package_named
from anabranch.observe.console.progress import Ticker

#: Name of the file that is pushed last: a checkpoint that has it is complete.
MANIFEST = "manifest.json"
CHECKPOINT, HF = "checkpoint", "hf"


def push(path: str | Path, url: str, step: int | None = None, kind: str = CHECKPOINT) -> str:
    """Copy the checkpoint after `step` (None: the newest) to a store; returns the address of the copy.

    url: an address of fsspec, such as s3://bucket/folder, gs://..., hf://datasets/NAME/REPO or
    file:///folder. The copy is the folder URL/step-000400 with the run file beside it; one that is complete
    there stays as it is. Of kind "hf" it is the model as a folder for transformers with its model card, at
    URL itself, written anew each time. Raises UserError for a checkpoint or store that cannot be used.
    """
    directory = RunDirectory.open(path)
    t = directory.latest_checkpoint() if step is None else step
    with Ticker() as ticker:
        ticker.begin(f"preparing the copy of step {t}")
        return _pushed(directory, url, t, kind, ticker)


def _pushed(directory: RunDirectory, url: str, t: int, kind: str, ticker: Ticker) -> str:
    store, root = _opened(url)
    if kind == HF:
        with tempfile.TemporaryDirectory() as folder:
            made = load(directory.path, t).export(Path(folder) / "model")
            _copy(store, url, [(one, f"{root}/{one.name}") for one in sorted(made.iterdir())], ticker)
        return url
    target = directory.checkpoint_path(t)
    remote = f"{root}/{target.name}"
    if _exists(store, url, f"{remote}/{MANIFEST}"):
        return f"{url.rstrip('/')}/{target.name}"
    names = sorted(stage.name for stage in directory.manifest(t).stages.values())
    for stage in directory.manifest(t).stages:
        directory.read_stage(t, stage)  # size and hash are checked: nothing damaged is published
    files = [(directory.run_file, f"{root}/run.toml")]
    files += [(target / name, f"{remote}/{name}") for name in [*names, MANIFEST]]
    _copy(store, url, files, ticker)
    return f"{url.rstrip('/')}/{target.name}"


def push_new(
    path: str | Path, url: str, kind: str = CHECKPOINT, pushed: Callable[[str], None] = lambda address: None
) -> int:
    """Copy checkpoints of the run directory `path` to the store `url`; returns the number of checkpoints in
    `path`.

    kind: "checkpoint" copies all that the store lacks, "hf" the newest one as a Hugging Face folder. pushed:
    called with the address of each copy, also of those that were there. Raises UserError as `push` does.
    """
    directory = RunDirectory.open(path)
    steps = directory.checkpoints()
    for t in steps[-1:] if kind == HF else steps:
        pushed(push(directory.path, url, t, kind))
    return len(steps)


def _opened(url: str) -> tuple[Any, str]:
    """File system of fsspec for the address `url`, and the path in it. Raises UserError if a package that it
    needs is missing or the address is bad."""
    missing = UserError("push needs the package fsspec: pip install 'anabranch[remote]'")
    with missing_package_named(missing):
        from fsspec.core import url_to_fs
    try:
        store, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return store, str(root).rstrip("/")


def _exists(store: Any, url: str, path: str) -> bool:
    try:
        return bool(store.exists(path))
    except Exception as error:  # its type depends on the store
        raise UserError(f"{url} cannot be read: {error}") from None


def _copy(store: Any, url: str, files: list[tuple[Path, str]], ticker: Ticker) -> None:
    """Copy files in order to the store of the address `url`, each given as (local file, path in the store),
    and show them on `ticker`. Raises UserError if the store fails."""
    try:
        for number, (source, target) in enumerate(files, 1):
            size = f"{source.stat().st_size / 1e6:,.1f} MB"
            ticker.begin(f"copying {source.name} ({size}), file {number} of {len(files)}")
            store.makedirs(target.rpartition("/")[0], exist_ok=True)
            store.put_file(str(source), target)
    except Exception as error:  # its type depends on the store
        raise UserError(f"{url} cannot be written: {error}; the run goes on, push again later") from None
