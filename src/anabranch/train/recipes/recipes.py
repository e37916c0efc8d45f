"""Training recipes of the named model sizes, and warnings about run files that stray far from them.

Imports no torch. Sources, by the names that the recipes use:

- GPT-3: Brown et al. 2020, arXiv 2005.14165, table 2.1 (Small: 6e-4, Medium: 3e-4, both 0.5 M tokens, 2048
  of them in a sequence; GPT-2's 1024 where positions are learnt) and appendix B (Adam with betas 0.9 and
  0.95, clipping at 1.0, weight decay 0.1, linear warm-up over 375 M tokens, cosine to a tenth).
- TinyLlama: Zhang et al. 2024, arXiv 2401.02385, section 2 and the model card (1.1 B parameters: 4e-4, 2 M
  tokens, 2048 of them in a sequence, 2000 steps of warm-up).
- Llama 2: Touvron et al. 2023, arXiv 2307.09288, section 2.2 and table 1 (7B: 3e-4, 4 M tokens, 2000 steps
  of warm-up, 4096; cosine to a tenth).
- Llama 3: Grattafiori et al. 2024, arXiv 2407.21783, table 3 (8B: 3e-4) and section 3.4.1, which gives the
  405B's and calls the 8B's similar (8000 steps of warm-up; 4 M tokens at first, later 8 and 16 M in sequences
  of 8192; cosine to a hundredth, here to a tenth as for all sizes).
- Chinchilla: Hoffmann et al. 2022, arXiv 2203.15556 (about 20 tokens per parameter).
- Small init: Nguyen and Salazar 2019, arXiv 1910.05895 (deviation sqrt(2 / (5 dim))).
- Repetition: Muennighoff et al. 2023, arXiv 2305.16264 (up to 4 epochs are nearly as good as new text).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.config import BatchSection, RunConfig, relays_by_stage, with_changes
from anabranch.train.model.rounds import rounds_of
from anabranch.train.model.sizes import ModelConfig, cut_bytes, named_size, total_parameters

#: Size of a run without a run file.
DEFAULT_SIZE = "llama-tiny"
#: Tokens per parameter of a run that spends its computation best (Chinchilla).
TOKENS_PER_PARAMETER = 20
#: Tokens over which the learning rate rises (GPT-3, appendix B).
WARMUP_TOKENS = 375_000_000
#: Largest share of a run that warm-up takes in a recipe; a plain choice, for runs far shorter than GPT-3's.
WARMUP_SHARE = 0.1
#: Epochs up to which repeated text is nearly as good as new text (Repetition).
GOOD_EPOCHS = 4
#: Parameters below which a model is a toy, whose batch, sequence and vocabulary are not warned about.
TOY_PARAMETERS = 20_000_000
#: Learning rate in multiples of the recipes' from which it is warned about, from scratch and with imported
#: weights. Plain choices: published runs of one size differ by a factor of up to 3.
RATE_FACTOR, CONTINUED_RATE_FACTOR = 3.0, 1.0
#: Batch and vocabulary as shares of the recipe's below which they are warned about; plain choices.
BATCH_SHARE, VOCABULARY_SHARE = 1 / 32, 1 / 4
#: Rounds of islands below which a run is warned about; a plain choice.
FEW_ROUNDS = 3
#: Tokens of a sequence below which a model that is no toy is warned about; a plain choice.
SHORT_SEQUENCE = 256


#: Bytes of an element in each dtype of computing.
_WIDTHS = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Recipe:
    """Training settings of a named size. batch_tokens: tokens per step, approximately; sequence: tokens;
    rows: sequences of a microbatch; vocabulary: ids of the tokenizer, a BPE of the corpus unless the user
    names another; steps, warmup_steps: 0 to derive them from the parameters and from WARMUP_TOKENS."""

    lr: float
    batch_tokens: int
    sequence: int
    rows: int
    vocabulary: int
    source: str
    dtype: str = "fp32"
    warmup_steps: int = 0
    steps: int = 0
    initial_std: float = 0.02


#: Deviation of the tiny sizes' initial weights: Small init at dim 128. With GPT-2's 0.02 the embedding is so
#: small that the attention's first updates cancel it before a norm: at step 17 of the default run the loss
#: rose from 5.4 to 7.2 and the gradient's norm to 51. Over all 400 steps the norm stays below 2 with this.
_TINY_STD = 0.056
_TINY = Recipe(
    5e-3, 4096, 128, 4, 512, "chosen for two cores and three minutes",
    warmup_steps=30, steps=400, initial_std=_TINY_STD,
)  # fmt: skip
_RECIPES = {
    "llama-tiny": _TINY,
    "gpt-tiny": _TINY,
    "gpt2-124m": Recipe(6e-4, 1 << 19, 1024, 4, 50_257, "GPT-3 Small"),
    "gpt2-350m": Recipe(3e-4, 1 << 19, 1024, 4, 50_257, "GPT-3 Medium"),
    "llama-160m": Recipe(6e-4, 1 << 19, 2048, 2, 32_000, "GPT-3 Small"),
    "llama-350m": Recipe(3e-4, 1 << 19, 1024, 4, 32_000, "GPT-3 Medium"),
    "llama-1b": Recipe(4e-4, 1 << 21, 2048, 1, 128_256, "TinyLlama", dtype="bf16", warmup_steps=2000),
    "llama-7b": Recipe(3e-4, 1 << 22, 4096, 1, 32_000, "Llama 2 7B", dtype="bf16", warmup_steps=2000),
    "llama-8b": Recipe(3e-4, 1 << 22, 8192, 1, 128_256, "Llama 3 8B", dtype="bf16", warmup_steps=8000),
}


def recipe_of(size: str) -> Recipe:
    """Recipe of a named size. Raises ConfigError if there is no such size."""
    named_size(size)
    return _RECIPES[size]


def recipe_values(size: str, batch: BatchSection | None = None, steps: int = 0) -> dict[str, object]:
    """Values of a named size's recipe by dotted key of the run file. batch: the batch if it is chosen already
    (by a plan), in place of the recipe's. steps: length of the run; 0: the recipe's, or where it names none
    TOKENS_PER_PARAMETER tokens for each parameter. Warm-up is the recipe's, or where it names none takes
    WARMUP_TOKENS, but at most WARMUP_SHARE of the steps. Raises ConfigError for an unknown size."""
    recipe = recipe_of(size)
    if batch is None:
        microbatches = max(1, recipe.batch_tokens // (recipe.rows * recipe.sequence))
        batch = BatchSection(microbatches, recipe.rows, recipe.sequence)
    tokens = batch_tokens(batch)
    steps = steps or recipe.steps or _steps_by_tokens(size, tokens)
    warmup = recipe.warmup_steps or math.ceil(WARMUP_TOKENS / tokens)
    return {
        "run.steps": steps,
        "model.size": size,
        "model.initial_std": recipe.initial_std,
        "data.vocab_size": recipe.vocabulary,
        "batch.microbatches": batch.microbatches,
        "batch.rows": batch.rows,
        "batch.sequence": batch.sequence,
        "optimizer.lr": recipe.lr,
        "optimizer.warmup_steps": min(warmup, max(1, int(steps * WARMUP_SHARE))),
        "compute.dtype": recipe.dtype,
    }


def recipe_run(size: str) -> RunConfig:
    """Default run file with a named size and its recipe. Raises ConfigError for an unknown size."""
    return with_changes(RunConfig(), recipe_values(size))


def batch_tokens(batch: BatchSection) -> int:
    """Tokens of an iteration."""
    return batch.microbatches * batch.rows * batch.sequence


def boundary_bytes(run: RunConfig, model: ModelConfig) -> int:
    """Bytes of activations and gradients that cross stage boundaries and are kept until the step is released,
    at the node with the largest share of the microbatches (see `config.check_fleet_holds`)."""
    width, tensors = _WIDTHS[run.compute.dtype], 4 * (1 + run.iteration.delay)
    share = math.ceil(run.batch.microbatches / min(run.fleet.data_nodes, *relays_by_stage(run)))
    if run.pipeline.whole:  # token ids, and answers of a few bytes
        return share * 4 * run.batch.rows * (run.batch.sequence + 1) * 4
    return share * tensors * max(cut_bytes(model, run.wire, run.batch.rows * run.batch.sequence, width))


def cut_line(run: RunConfig, model: ModelConfig) -> str:
    """Sentence on the bytes per token that cross each cut with the run's codecs and subspace, and on where
    the docs say what they cost; "" for a dense model without a codec."""
    width, wire, named = _WIDTHS[run.compute.dtype], run.wire, list[str]()
    if model.subspace:
        named.append(f"model.subspace = {model.subspace}")
    if {wire.activations, wire.gradients} != {"none"} and not run.pipeline.whole:
        named.append(f"cuts in {wire.activations} (activations) and {wire.gradients} (gradients)")
    if not named:
        return ""
    cost = "the loss falls more slowly (docs/explanation/subspace.md)"
    if not model.subspace:
        cost = "what that costs is in docs/explanation/thin-lines.md"
    return (
        f"{' and '.join(named)}: {sum(cut_bytes(model, wire, 1, width)):,} bytes per token and cut, forward "
        f"and backward, instead of {2 * model.dim * width:,}; {cost}"
    )


def recipe_line(run: RunConfig, model: ModelConfig) -> str:
    """Sentence that names a run's parameters, batch, steps, tokens and rate, with the recipe's source."""
    tokens, parameters = batch_tokens(run.batch), total_parameters(model)
    return (
        f"{run.model.size}: {_count(parameters)} parameters, {_count(tokens)} tokens a step, "
        f"{run.run.steps:,} steps = {_count(tokens * run.run.steps)} tokens "
        f"({tokens * run.run.steps / parameters:.3g} per parameter), learning rate {run.optimizer.lr:g} "
        f"({recipe_of(run.model.size).source})"
    )


def warnings_about(run: RunConfig, model: ModelConfig) -> list[str]:
    """Sentences about settings that are far from every published run of such a model, each with a remedy;
    empty if there are none. Raises ConfigError for an unknown size."""
    recipe, optimizer, batch = recipe_of(run.model.size), run.optimizer, run.batch
    parameters, tokens = total_parameters(model), batch_tokens(batch)
    imported = run.model.initial_weights != "seed"
    continued = imported and not run.lora.rank  # adapters begin at zero, and bear the usual rates
    found = []
    usual = _usual_rate(parameters)
    if optimizer.lr > usual * (CONTINUED_RATE_FACTOR if continued else RATE_FACTOR):
        what = "continuing from trained weights" if continued else f"{_count(parameters)} parameters"
        found.append(
            f"optimizer.lr = {optimizer.lr:g} is high for {what}: about "
            f"{usual / (10 if continued else 1):.1g} "
            f"is usual{', a tenth of the first training' if continued else ''}; the loss may diverge"
        )
    if optimizer.warmup_steps >= run.run.steps > 1:
        found.append(
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is not less than run.steps = "
            f"{run.run.steps}: the "
            f"rate never reaches optimizer.lr; {max(1, run.run.steps // 10)} would be a tenth"
        )
    found += _few_rounds(run)
    if parameters < TOY_PARAMETERS:
        return found
    if tokens < recipe.batch_tokens * BATCH_SHARE:
        found.append(
            f"a step has {_count(tokens)} tokens (batch.microbatches * rows * sequence), where "
            f"{recipe.source} has "
            f"{_count(recipe.batch_tokens)}: gradients will be noisy; raise batch.microbatches"
        )
    if batch.sequence < min(SHORT_SEQUENCE, model.max_sequence):
        found.append(
            f"batch.sequence = {batch.sequence} is short: the model learns nothing about longer texts; "
            f"{recipe.source} has {recipe.sequence}"
        )
    if tokens * run.run.steps < parameters and not imported:
        wanted = _steps_by_tokens(run.model.size, tokens)
        found.append(
            f"run.steps = {run.run.steps} are {_count(tokens * run.run.steps)} tokens for "
            f"{_count(parameters)} "
            f"parameters; {TOKENS_PER_PARAMETER} per parameter (Chinchilla) would be {wanted:,} steps"
        )
    small = run.data.vocab_size < recipe.vocabulary * VOCABULARY_SHARE
    if run.data.tokenizer in ("auto", "bpe") and not imported and small:
        found.append(
            f"data.vocab_size = {run.data.vocab_size} is small: the size is made for {recipe.vocabulary:,}; "
            f"raise it, "
            "or name a tokenizer.json with data.tokenizer"
        )
    if run.data.source == "stdlib":
        found.append(
            'data.source = "stdlib" has a few million tokens, which such a model learns by heart; set '
            "data.source and "
            "data.path to your own text (`anabranch init --data PATH`)"
        )
    return found


def _few_rounds(run: RunConfig) -> list[str]:
    """List with a sentence if islands agree less than FEW_ROUNDS times; empty otherwise, and for a run
    without islands."""
    rounds = rounds_of(run)
    most = rounds.last or rounds.iterations(run.run.steps)
    if not run.round.slots or most - rounds.start >= FEW_ROUNDS:
        return []
    return [
        f"round.steps = {run.round.steps} is long for run.steps = {run.run.steps}, of which the first "
        f"{rounds.start} are synchronous: islands hardly agree; raise run.steps or lower round.steps"
    ]


def epochs_sentence(tokens_seen: float, corpus_tokens: int) -> str:
    """Sentence about how often the run reads its corpus, with a warning where that is too often. tokens_seen:
    tokens that the whole run trains on. corpus_tokens: tokens of the training part."""
    epochs = tokens_seen / max(1, corpus_tokens)
    shown = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    text = f"the run reads {_count(tokens_seen)} tokens, {shown} epochs"
    if epochs <= GOOD_EPOCHS:
        return text
    return f"{text}: after about {GOOD_EPOCHS} a model mostly learns by heart; add text or lower run.steps"


def _steps_by_tokens(size: str, tokens: int) -> int:
    return math.ceil(TOKENS_PER_PARAMETER * total_parameters(named_size(size)) / tokens)


def _usual_rate(parameters: int) -> float:
    """Usual learning rate at a number of parameters: the recipes', log-linear between two of them; beyond all
    of them that of the nearest."""
    known = sorted((total_parameters(named_size(size)), recipe.lr) for size, recipe in _RECIPES.items())
    below = [point for point in known if point[0] <= parameters] or known[:1]
    above = [point for point in known if point[0] >= parameters] or known[-1:]
    (n0, lr0), (n1, lr1) = below[-1], above[0]
    if n1 <= n0:
        return max(lr0, lr1)
    share = math.log(parameters / n0) / math.log(n1 / n0)
    return math.exp((1 - share) * math.log(lr0) + share * math.log(lr1))


def _count(value: float) -> str:
    """`value` with three digits and a letter: 1240000000 -> "1.24 B"."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"
