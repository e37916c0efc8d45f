"""Names of the Hugging Face Hub with a pinned revision: datasets that are streamed, and folders of models.

A name is OWNER/NAME@REVISION with a whole commit hash, so that it means the same bytes on every day.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anabranch.config import DataSection
from anabranch.errors import ConfigError, missing_package_named

#: Beginning of a model's name in `model.initial_weights`.
PREFIX = "hub:"
GIB = 1 << 30
#: Files of a model's repository that are read.
WANTED = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
_NAME = re.compile(r"((?:[\w.-]+/)?[\w.-]+)@([0-9a-f]{40})", re.ASCII)


def split_name(name: str, key: str) -> tuple[str, str]:
    """(OWNER/NAME, REVISION) of a pinned name. key: of the run file, for messages. Raises ConfigError for a
    name without a whole commit hash."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise ConfigError(
            f'{key} = "{name}": write OWNER/NAME@REVISION with the commit hash of 40 digits, which the page '
            "of the repository shows under its commits"
        )
    return match.group(1), match.group(2)


def model_folder(initial_weights: str, fetch: bool = True) -> Path:
    """Folder of the model that `model.initial_weights` names: a path, which is returned unchecked, or
    "hub:OWNER/NAME@REVISION", which is taken from the cache of huggingface_hub, or downloaded into it, which
    a line on stderr says. fetch: False to download nothing. Raises ConfigError for a name without revision,
    without the library, or if it cannot be fetched, or must not be."""
    if not initial_weights.startswith(PREFIX):
        return Path(initial_weights).expanduser()
    repository, revision = split_name(initial_weights.removeprefix(PREFIX), "model.initial_weights")
    missing = ConfigError(
        f'model.initial_weights = "{initial_weights}" needs the huggingface_hub library; install it '
        'with: pip install "anabranch[hf]"'
    )
    with missing_package_named(missing):
        from huggingface_hub import snapshot_download
    for offline in (True, False):
        if not offline and not fetch:
            raise ConfigError(
                f'model.initial_weights = "{initial_weights}" is not in the cache of this machine, and '
                "nothing is downloaded that a run file names unless you agree: repeat the command with "
                f"--fetch, or fetch it with: hf download {repository} --revision {revision}"
            )
        if not offline:
            _check_room(repository, revision, initial_weights)
        try:
            folder = Path(
                snapshot_download(
                    repository, revision=revision, allow_patterns=WANTED, local_files_only=offline
                )
            )
        except Exception as error:  # the library and its HTTP client raise many kinds
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
                return folder
            problem = f"{folder} has no config.json with *.safetensors"
    raise ConfigError(f'model.initial_weights = "{initial_weights}" cannot be fetched ({problem})')


def _check_room(repository: str, revision: str, initial_weights: str) -> None:
    """Raise ConfigError if the files of a model are larger than what is free in the cache; else print on
    stderr what will be downloaded. Does nothing if the hub does not answer; a file whose size it does not
    tell counts as empty."""
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception:  # the download itself says why
        return
    files = [file for file in found.siblings or () if any(fnmatch(file.rfilename, name) for name in WANTED)]
    needed = sum(file.size or 0 for file in files)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f'model.initial_weights = "{initial_weights}" has {needed / GIB:.2f} GiB, and {cache} has '
            f"{free / GIB:.2f} GiB free: delete files there, or set HF_HOME to a folder with more room"
        )
    print(f"downloading {repository} ({needed / GIB:.2f} GiB) into {cache}", file=sys.stderr, flush=True)


def stream(section: DataSection) -> Iterator[dict[str, Any]]:
    """Records of a run file's dataset (a folder of this machine, or a pinned name of the Hub), as they
    arrive, from `section.skip` on. Raises ConfigError during the iteration if it cannot be read."""
    missing = ConfigError(
        'data.source = "hub" needs the datasets library; install it with: pip install "anabranch[datasets]"'
    )
    with missing_package_named(missing):
        import datasets
    local = Path(section.path).expanduser()
    name, revision = (str(local), None) if local.is_dir() else split_name(section.path, "data.path")
    try:
        records = datasets.load_dataset(
            name, section.subset or None, split=section.split, revision=revision, streaming=True
        )
        if section.skip:
            records = records.skip(section.skip)
        yield from records
    except Exception as error:  # the library and its HTTP client raise many kinds
        text = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f'data.path = "{section.path}" cannot be read ({type(error).__name__}: {text}); correct '
            "data.path, data.subset or data.split, or see whether the hub is reachable"
        ) from None
