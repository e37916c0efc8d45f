"""Trained models: loading one from a run directory or a Hugging Face folder, logits, sampling, export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import ConfigError, load_run_file
from anabranch.errors import UserError, os_errors_named

if TYPE_CHECKING:
    from torch import Tensor

    from anabranch.data.tokenizers import TextTokenizer
    from anabranch.train.model.interface import Model
    from anabranch.train.model.sizes import ModelConfig

#: Temperature below which sampling is greedy: logits divided by a smaller one could be infinite.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class TrainedModel:
    """Model with its weights (by name, in the master dtype, on the CPU) and its tokenizer.

    t: step after which the weights are those of the run; 0 for a Hugging Face folder. path: run directory or
    folder that it was loaded from. config: shape of the model. adapters: of a run that trained adapters,
    by name, which are merged into `weights`, too; {} else.

    >>> import anabranch
    >>> model = anabranch.load("runs/tiny")                       # doctest: +SKIP
    >>> model([[1, 2, 3]]).shape                                  # doctest: +SKIP
    torch.Size([1, 3, 512])
    """

    path: Path
    config: ModelConfig
    t: int
    weights: dict[str, Tensor] = field(repr=False)
    tokenizer_file: Path = field(repr=False)
    adapters: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the model, read from `tokenizer_file`. Raises ConfigError if its file is missing or is
        not one."""
        from anabranch.data.tokenizers import TextTokenizer

        return TextTokenizer(self.tokenizer_file)

    @cached_property
    def _functions(self) -> Model:
        from anabranch.train.model.interface import build

        some = next(iter(self.weights.values()))
        return build(self.config, some.device, some.dtype)

    def __call__(self, ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Logits (rows, sequence, vocabulary) of token ids (rows, sequence), without gradients."""
        import torch

        from anabranch.train.model.interface import logits_of
        from anabranch.train.model.linear import PlainWeights

        with torch.inference_mode():
            ids = torch.as_tensor(ids, dtype=torch.long)
            return logits_of(self._functions, PlainWeights(self.weights), ids)

    def sample(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int = 1,
    ) -> Iterator[int]:
        """Ids of up to `tokens` tokens that continue the prompt, each as soon as it is drawn; a drawn
        separator token ends them.

        temperature: 0 takes the most likely token each time. top_k: draw from this many most likely tokens, 0
        from all. seed: of the draws; the same arguments give the same ids. Raises UserError for a value out
        of range, once the first id is asked for.
        """
        from anabranch.train.reference.generate import generate as draw

        if not (math.isfinite(temperature) and temperature >= 0 and min(tokens, top_k, seed) >= 0):
            raise UserError("temperature, tokens, top_k and seed must be finite and not negative")
        temperature = temperature if temperature >= MIN_TEMPERATURE else 0.0
        stop, ids = self.tokenizer.separator, self.prompt_ids(prompt)
        try:
            yield from draw(self.weights, self.config, ids, tokens, temperature, top_k, seed, stop)
        except ValueError as error:
            raise UserError(str(error)) from None

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt; an empty one is the separator alone, after which a document begins."""
        return self.tokenizer.encode(prompt) or [self.tokenizer.separator]

    def decode(self, prompt: str, ids: Sequence[int]) -> str:
        """Text of a prompt and the `ids` after it, decoded together, as a character's bytes may be split;
        separators and other special tokens are left out."""
        return self.tokenizer.decode([*self.prompt_ids(prompt), *ids])

    def generate(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int = 1,
    ) -> str:
        """Text that begins with the prompt and goes on with up to `tokens` tokens drawn from the model. The
        parameters, and the errors raised, are those of `sample`."""
        return self.decode(prompt, list(self.sample(prompt, tokens, temperature, top_k, seed)))

    def export(self, out: str | Path) -> Path:
        """Write the model as a folder that Hugging Face transformers loads; returns the folder.

        With the weights of a run that has a log goes a model card made from it, README.md: data, steps,
        contributors. Raises UserError if `out` exists and is not an empty folder, or cannot be written, a
        file of the run cannot be read, or transformers has no class for the architecture.
        """
        from anabranch.checkpoint.hf import export_hf

        return self._export(
            Path(out), lambda: export_hf(self.weights, self.config, self.tokenizer_file, Path(out))
        )

    def export_adapters(self, out: str | Path) -> Path:
        """Write the adapters alone as a folder that Hugging Face's PEFT loads, with a model card; returns the
        folder.

        Raises UserError if the run trained no adapters, or as `export` does.
        """
        from anabranch.checkpoint.peft import export_peft
        from anabranch.train.adapters.lora import adapted

        if not self.adapters:
            raise UserError(f"{self.path}: the run trained no adapters (lora.rank = 0): export it to hf")
        run = load_run_file(RunDirectory.open(self.path).run_file)
        model = adapted(run, self.config)
        base = run.model.initial_weights
        return self._export(
            Path(out), lambda: export_peft(self.adapters, model, base, Path(out))
        )

    def _export(self, out: Path, write: Callable[[], None]) -> Path:
        """Call `write`, which writes the folder `out`; for a run directory add the model card. Returns `out`.
        Raises UserError if either fails."""
        try:
            with os_errors_named(f"cannot write {out}"):
                write()
        except ConfigError:
            raise
        except ValueError as error:
            raise UserError(f"the checkpoint of step {self.t} does not fit its run file: {error}") from error
        if (self.path / "log.jsonl").is_file():
            from anabranch.api.model_card import model_card

            card = model_card(self.path, self.t, self.config.vocab_size)
            with os_errors_named(f"cannot write {out}"):
                (out / "README.md").write_text(card, "utf-8")
        return out


def load(path: str | Path, step: int | None = None) -> TrainedModel:
    """Load a model from a run directory, or from a Hugging Face folder of a supported architecture.

    step: the checkpoint after this step (None: the newest); ignored for a Hugging Face folder. Configures
    torch for the whole process as the run does (threads, deterministic kernels; one thread for a Hugging Face
    folder), so that the same call gives the same bits each time. Raises UserError for what is missing or
    damaged.
    """
    if (Path(path) / "config.json").is_file():
        return _load_hf(Path(path))
    directory = RunDirectory.open(path)
    run = load_run_file(directory.run_file)
    t = directory.latest_checkpoint() if step is None else step

    from anabranch.train.numerics.numerics_class import configure

    configure(run.compute.threads)  # before torch is imported

    from anabranch.checkpoint.weights import load_weights
    from anabranch.data.corpus import TOKENIZER, open_corpus
    from anabranch.train.model.sizes import model_config

    weights = load_weights(directory, t)
    corpus = open_corpus(directory.corpus)
    config = model_config(run.model, corpus.vocab_size)
    adapters: dict[str, Tensor] = {}
    if run.lora.rank:
        from anabranch.train.adapters.frozen import FrozenStore, whole_frozen
        from anabranch.train.adapters.lora import adapted, merged

        model, adapters = adapted(run, config), weights
        model.use(whole_frozen(run, model, FrozenStore(directory.frozen)))
        weights = merged(model, adapters)
    return TrainedModel(directory.path, config, t, weights, directory.corpus / TOKENIZER, adapters)


def _load_hf(folder: Path) -> TrainedModel:
    from anabranch.train.numerics.numerics_class import configure

    configure(threads=1)

    from anabranch.checkpoint.hf import import_hf

    config, weights = import_hf(folder)
    return TrainedModel(folder, config, 0, weights, folder / "tokenizer.json")


def generate(
    path: str | Path,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 1,
    step: int | None = None,
) -> str:
    """Text that begins with the prompt and goes on with up to `tokens` tokens drawn from the trained model at
    `path`; a drawn separator ends it. Special tokens are not in the text.

    path, step: as in `load`, which configures torch for the whole process. temperature, top_k, seed: as in
    `TrainedModel.sample`. Raises UserError as these do.
    """
    return load(path, step).generate(prompt, tokens, temperature, top_k, seed)


def export(path: str | Path, out: str | Path, step: int | None = None) -> Path:
    """Write a trained model as a folder that Hugging Face transformers loads; returns the folder.

    path, step: as in `load`. out: a new or an empty folder. Raises UserError as `load` and
    `TrainedModel.export` do.
    """
    return load(path, step).export(out)
