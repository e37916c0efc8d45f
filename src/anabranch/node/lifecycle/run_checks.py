"""Checks of a new run before its corpus is read: values left to the program, model, tokenizer, fleet."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import RunConfig, check_fleet_holds, check_removed_options, with_changes
from anabranch.errors import ConfigError
from anabranch.node.driver.checkpoint_io import SPARE_BYTES

if TYPE_CHECKING:
    from anabranch.train.model.sizes import ModelConfig

#: Ids of the tokenizer "bytes": 256 bytes and the separator.
BYTES_VOCABULARY = 257
#: Values that a checkpoint holds for each parameter: the weight and AdamW's two moments.
VALUES_SAVED = 3

Tell = Callable[[str], None]


def resolved(run: RunConfig) -> RunConfig:
    """`run` with each "auto" replaced: the numerics by "strict"; the tokenizer by that in the folder of
    imported weights, or by "bpe" if no weights are imported. Raises ConfigError if there is no such folder,
    or no tokenizer in it."""
    changes: dict[str, object] = {}
    if run.run.numerics == "auto":
        changes["run.numerics"] = "strict"
    if run.data.tokenizer == "auto":
        changes["data.tokenizer"] = "bpe"
        if run.model.initial_weights != "seed":
            from anabranch.data.hub import model_folder

            folder = model_folder(run.model.initial_weights)
            if not folder.is_dir():
                raise ConfigError(f"model.initial_weights: there is no folder {folder}; correct the path")
            if not (folder / "tokenizer.json").is_file():
                raise ConfigError(
                    f'model.initial_weights: {folder} has no tokenizer.json, and data.tokenizer = "auto" '
                    f'asks for '
                    "it: save the tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained), or "
                    "set "
                    'data.tokenizer to another tokenizer.json, "bpe" or "bytes"'
                )
            changes["data.tokenizer"] = str(folder / "tokenizer.json")
    return with_changes(run, changes)


def checked_model(run: RunConfig, tell: Tell) -> ModelConfig:
    """Model of a resolved run file (`resolved`), once everything that needs no corpus is checked.

    tell: gets sentences that warn. Raises ConfigError for a shape, tokenizer, sequence, partition or fleet
    that cannot work. Reads imported weights.
    """
    from anabranch.checkpoint.hf import dropout_of, import_hf
    from anabranch.data.hub import model_folder
    from anabranch.train.model.sizes import model_config
    from anabranch.train.recipes.recipes import warnings_about
    from anabranch.train.stage.run_objects import check_shape

    vocabulary = tokenizer_size(run)
    if run.model.initial_weights == "seed":
        model = model_config(run.model, vocabulary)
    else:
        folder = model_folder(run.model.initial_weights)
        model, _ = import_hf(folder)
        if vocabulary > model.vocab_size:
            raise ConfigError(
                f"data.tokenizer: it has {vocabulary:,} ids, but the model in {folder} has "
                f"{model.vocab_size:,}; "
                'set data.tokenizer = "auto" for the folder\'s own'
            )
        if not _same_tokenizer(run.data.tokenizer, folder):
            tell(
                f'warning: data.tokenizer = "{run.data.tokenizer}" is not the tokenizer of {folder}: the '
                f'trained '
                'embeddings do not fit its ids; set data.tokenizer = "auto" for the folder\'s own'
            )
        if dropout := dropout_of(folder):
            shown = ", ".join(f"{key} = {value}" for key, value in dropout.items())
            tell(f"{folder}: trained with dropout ({shown}); this run goes on without dropout")
    check_shape(run, model)
    check_run(run, model)
    for sentence in warnings_about(run, model):
        tell(f"warning: {sentence}")
    return model


def room_warning(run: RunConfig, model: ModelConfig, path: Path) -> str:
    """Sentence for the user if the disk of a run directory that is to be made has no room for the checkpoints
    of the run, with a remedy; "" if it has, and for adapters, whose checkpoints are small."""
    from anabranch.train.model.sizes import total_parameters

    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    value_bytes = 8 if run.compute.dtype == "fp64" else 4
    one = total_parameters(model) * VALUES_SAVED * value_bytes
    most = one * (run.checkpoint.keep + 1)  # a new one is written before the oldest is deleted
    if run.lora.rank or free >= most + SPARE_BYTES:
        return ""
    return (
        f"the disk of {folder} has {free / 1e6:,.0f} MB free, but checkpoints take up to "
        f"{most / 1e6:,.0f} MB ({run.checkpoint.keep + 1} of {one / 1e6:,.0f} MB): without one the trained "
        "weights are lost at the end; make room, or give another --run-dir"
    )


def check_run(run: RunConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the model cannot be cut into the stages, the relays cannot hold the batch, or the
    run file has an option that was removed."""
    from anabranch.train.model.partition import partition
    from anabranch.train.stage.protocol_inputs import settings_of

    check_removed_options(run)
    partition(model, run.pipeline)
    if run.lora.rank:
        import torch

        from anabranch.train.adapters.lora import run_model

        run_model(run, model, torch.device("cpu"))
    check_fleet_holds(run, settings_of(run, "", model).activation_bytes)


def tokenizer_size(run: RunConfig) -> int:
    """Number of ids of a resolved run file's tokenizer: BYTES_VOCABULARY for "bytes", `data.vocab_size` for
    "bpe" (which is trained later), else one more than the largest id in its file. Raises ConfigError if that
    file cannot be used."""
    from anabranch.data.tokenizers import TextTokenizer, tokenizer_file

    if run.data.tokenizer == "bytes":
        return BYTES_VOCABULARY
    if run.data.tokenizer == "bpe":
        return run.data.vocab_size
    return TextTokenizer(tokenizer_file(run.data)).vocab_size


def _same_tokenizer(tokenizer: str, folder: Path) -> bool:
    """True if the tokenizer that a run file names (a file, or a folder with tokenizer.json) has the bytes of
    the folder's own. False if either is missing, also for "bpe" and "bytes"."""
    given, own = Path(tokenizer).expanduser(), folder / "tokenizer.json"
    given = given / "tokenizer.json" if given.is_dir() else given
    return given.is_file() and own.is_file() and given.read_bytes() == own.read_bytes()
