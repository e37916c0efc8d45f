"""Inputs of a replay, read from a run directory: run file, model, batches and initial weights.

No tensor that a peer sent is among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anabranch.checkpoint.directory import RunDirectory
from anabranch.checkpoint.hf import import_hf
from anabranch.config import RunConfig, load_run_file, render_run_file
from anabranch.config.load import parse_toml
from anabranch.data.batches import Batches
from anabranch.data.corpus import Corpus, open_corpus
from anabranch.data.hub import model_folder
from anabranch.errors import UserError
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.rounds.plan import Plan, plan_problem
from anabranch.train.adapters.frozen import FrozenStore, whole_frozen
from anabranch.train.adapters.lora import adapted
from anabranch.train.model.rounds import rounds_of
from anabranch.train.model.sizes import ModelConfig, model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.reference.reference import PrivateRounds, Reference

#: Prefixes of run file keys that determine the run's numbers; the other keys may change during a run.
DETERMINING_KEYS = (
    *("run.seed", "run.reduction", "run.numerics", "compute.dtype", "compute.threads"),
    *("model.", "lora.", "batch.", "optimizer.", "pipeline.", "wire.", "iteration.", "data.private"),
)


@dataclass(frozen=True)
class Inputs:
    """Everything that a replay starts from. batches: token ids of each iteration. initial: imported tensors,
    or None if the seed gives the initial weights (in a run of adapters: those of the adapters). frozen:
    weights that a run of adapters does not train, checked against the hashes in the run file; None in other
    runs."""

    directory: RunDirectory
    run: RunConfig
    corpus: Corpus
    model: ModelConfig
    batches: Batches
    initial: Mapping[str, Tensor] | None
    frozen: Mapping[str, Tensor] | None = None

    def reference(self, private: PrivateRounds | None = None) -> Reference:
        """New reference model at the initial weights. private: contributions and data at hand of a run whose
        data are private (None: another run)."""
        return Reference(self.run, self.model, self.batches, self.initial, self.frozen, private)


def open_inputs(run_dir: Path, fetch: bool = False) -> Inputs:
    """Open a run directory, and set this process's numerics to the run's. Checks every corpus file against
    its hash. fetch: True to download imported weights from the hub that the run file names, which may be a
    stranger's. Raises UserError for anything missing or damaged."""
    directory = RunDirectory.open(run_dir)
    run = load_run_file(directory.run_file)
    configure(run.compute.threads)
    corpus = open_corpus(directory.corpus)
    initial = frozen = None
    if run.model.initial_weights != "seed" and not run.lora.rank:
        _, initial = import_hf(model_folder(run.model.initial_weights, fetch))
    model = model_config(run.model, corpus.vocab_size)
    if run.lora.rank:
        frozen = whole_frozen(run, adapted(run, model), FrozenStore(directory.frozen))
    return Inputs(directory, run, corpus, model, Batches(corpus, run.batch, run.run.seed), initial, frozen)


def check_replayable(inputs: Inputs, genesis: Genesis, plans: Mapping[int, Plan], last: int) -> None:
    """Raise UserError if run file and log do not allow a replay up to iteration `last`: other numbers of
    stages or microbatches, or rounds that the run file does not have. plans: slots of each round."""
    run, path = inputs.run, inputs.directory.log
    if genesis.stages != run.pipeline.relay_stages or genesis.microbatches != run.batch.microbatches:
        raise UserError(
            f"{inputs.directory.run_file} has {run.pipeline.relay_stages} stages and "
            f"{run.batch.microbatches} microbatches, but the log is of a run with {genesis.stages} and "
            f"{genesis.microbatches}"
        )
    for t in range(1, last + 1):
        if wrong := plan_problem(rounds_of(run), t, plans.get(t, ()), run.pipeline.relay_stages):
            raise UserError(f"{path}: step {t} cannot be taken again: {wrong}")


def compare_with_genesis(inputs: Inputs, genesis: Genesis) -> list[str]:
    """Differences between the run directory and the log's genesis record that change numbers (settings,
    corpus, tokenizer), as sentences; [] if there are none."""
    problems = []
    ours, logged = _keys(render_run_file(inputs.run)), _keys(genesis.config)
    # Runs of earlier releases lack the keys that came later, whose defaults are what they did.
    logged = _keys(render_run_file(RunConfig())) | logged
    # Without optimizer.decay_steps the learning rate's cosine ends with the run.
    determining = DETERMINING_KEYS if inputs.run.optimizer.decay_steps else (*DETERMINING_KEYS, "run.steps")
    if inputs.run.iteration.delay:
        determining = (*determining, "run.steps")
    if inputs.run.round.slots:
        determining = (*determining, "round.", "run.steps")
    keys = (key for key in ours.keys() | logged.keys() if key.startswith(determining))
    changed = sorted(key for key in keys if ours.get(key) != logged.get(key))
    if changed:
        problems.append(f"the run file has another {', '.join(changed)} than the log's genesis record")
    if inputs.corpus.fingerprint != genesis.corpus_fingerprint:
        problems.append("the corpus is not the one that the log's genesis record names")
    if inputs.corpus.tokenizer_hash != genesis.tokenizer_hash:
        problems.append("the tokenizer is not the one that the log's genesis record names")
    return problems


def _keys(run_file: str) -> dict[str, Any]:
    """{"section.key": value} of all settings in the text of a run file; empty if the text is not TOML."""
    try:
        sections = parse_toml(run_file)
    except ValueError:
        return {}
    return {
        f"{section}.{key}": value
        for section, keys in sections.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
