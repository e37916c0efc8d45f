"""Model card of a run, made from its commit log and run file: data, steps, contributors, how to verify it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from anabranch import __version__
from anabranch.audit.contributions import Ledger, ledger
from anabranch.audit.log_check import log_lines
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, load_run_file
from anabranch.data.hub import PREFIX
from anabranch.errors import UserError
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Audit, Evaluation
from anabranch.observe.wording import NAME_MAX, SENTENCE_MAX, plain
from anabranch.protocol.log.hash_chain import LogError
from anabranch.train.model.rounds import inner_microbatches
from anabranch.train.model.sizes import model_config, total_parameters

#: Names of optimizers by `optimizer.kind`.
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for matrices of blocks, AdamW for the rest"}
#: Contributors that the card names; more are counted.
NAMED = 50
#: Name of a data set on the hub, with a revision or without.
HUB_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*(?:@[\w./-]+)?")


def read_ledger(run_dir: Path) -> Ledger:
    """Work of each peer in the committed steps of the run in `run_dir`, with the audits of it. Raises
    UserError for a file that cannot be read."""
    directory = RunDirectory.open(run_dir)
    run = load_run_file(directory.run_file)
    tokens, inner = run.batch.rows * run.batch.sequence, inner_microbatches(run)
    audits = events_of(directory.events, Audit) if directory.events.exists() else []
    try:
        return ledger(log_lines(directory.log)[0], audits, tokens, inner)
    except LogError as error:
        raise UserError(f"{directory.log} is damaged: {error}; restore it from a voter's copy") from None


def model_card(run_dir: Path, t: int, vocabulary: int) -> str:
    """Model card (Markdown, with the metadata that model hubs read) of the weights of the run in `run_dir`
    after step t. vocabulary: number of tokens, used where the run file leaves it open. Raises UserError for a
    file of the run that cannot be read."""
    directory = RunDirectory.open(run_dir)
    run, found = load_run_file(directory.run_file), read_ledger(run_dir)
    shape = model_config(run.model, run.model.vocab_size or vocabulary)
    tokens = run.batch.microbatches * run.batch.rows * run.batch.sequence
    imported = run.model.initial_weights
    origin = "the run's seed" if imported == "seed" else f"`{_public(imported)}`"
    stages = sorted(directory.manifest(t).stages.items())
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["anabranch", "decentralized-training", shape.architecture],
    }
    facts = {
        "Architecture": f"{shape.architecture}, {total_parameters(shape):,} parameters, "
        f"{shape.blocks} blocks, width {shape.dim}",
        "Initial weights": origin + (f", frozen; {_adapters(run)}" if run.lora.rank else ""),
        "Steps": f"{t:,} of {run.run.steps:,}, {tokens:,} tokens each, {found.skipped:,} skipped",
        "Data": _data(run, directory),
        "Optimizer": f"{OPTIMIZERS[run.optimizer.kind]}, peak learning rate {run.optimizer.lr:g}, "
        f"{run.optimizer.warmup_steps:,} steps of warm-up, weight decay {run.optimizer.weight_decay:g}",
        "Held-out loss": _held_out(directory, t),
        "Numerics": f"`{run.run.numerics}`, `{run.run.reduction}` sums, `{run.compute.dtype}`",
    }
    return "\n".join(
        [
            "---",
            json.dumps(head, indent=2),
            "---",
            "",
            f"# {_safe(run.run.name)}",
            "",
            f"Trained with anabranch {__version__} by machines that their owners lent.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "## Contributors",
            "",
            *_contributors(found),
            "",
            "## Verify it",
            "",
            f"Whoever has the run directory{_kept(run)} can compute every step again on one machine and "
            "compare:",
            "",
            "```",
            f"anabranch verify {_safe(directory.path.name)}",
            "```",
            "",
            f"The weights are those of the checkpoint after step {t:,}, whose state has the fingerprints",
            "",
            *(f"- stage {stage}: `{one.fingerprint}`" for stage, one in stages),
            "",
        ]
    )


def _data(run: RunConfig, directory: RunDirectory) -> str:
    """Text of the card: the corpus' source, without the path on the owner's machine, and fingerprint."""
    try:
        manifest = json.loads((directory.corpus / "manifest.json").read_text("utf-8"))
        fingerprint = f", fingerprint `{_safe(str(manifest['fingerprint']))}`"
    except (OSError, ValueError, KeyError, TypeError):
        fingerprint = ""
    sources = [(run.data.source, run.data.path)]
    if run.data.mixture:
        sources = [(source, path) for source, _, path in (one.partition(":") for one in run.data.mixture)]
    named = (f"{_safe(source)} `{_public(path, source)}`" if path else source for source, path in sources)
    own = "; in its rounds each machine trained on data of its own, of which the run knows nothing"
    return " + ".join(named) + fingerprint + own * run.data.private


def _kept(run: RunConfig) -> str:
    """Words for what a verification of the run needs besides its directory; "" if it needs nothing more."""
    return " and the machines' contributions" if run.data.private else ""


def _public(name: str, source: str = "") -> str:
    """Name of a folder or file that may be published, escaped for Markdown: without the folders in which it
    lies on the owner's machine; the whole text if it names a model or data set of the hub. source: kind of
    data (`data.source`), "" for a model."""
    of_hub = source == "hub" and HUB_NAME.fullmatch(name) and not Path(name).exists()
    whole = name.startswith(PREFIX) or of_hub
    return _safe(name if whole else Path(name).name, SENTENCE_MAX)


def _adapters(run: RunConfig) -> str:
    """Words for the adapters that were trained beside frozen weights."""
    targets = _safe(", ".join(run.lora.targets) or "all linear layers", SENTENCE_MAX)
    return f"LoRA adapters of rank {run.lora.rank} (alpha {run.lora.alpha:g}) on {targets}"


def _held_out(directory: RunDirectory, t: int) -> str:
    """Loss of the last evaluation up to step t, in words; "not evaluated" if there is none."""
    if not directory.events.exists():
        return "not evaluated"
    evaluations = events_of(directory.events, Evaluation)
    known = [event for event in evaluations if event.t <= t and event.loss is not None]
    if not known:
        return "not evaluated"
    last = known[-1]
    bits = "" if last.bits_per_byte is None else f", {last.bits_per_byte:.3f} bits per byte"
    return f"{last.loss:.4f} nats per token{bits}, after step {last.t:,}"


def _contributors(found: Ledger) -> list[str]:
    """Markdown lines: the share of all units of work of each name that members chose (the NAMED largest), of
    all other names together, and of peers without a name."""
    units: dict[str, int] = {}
    for person in found.people():
        name = _safe(person.sources[0].name)
        units[name] = units.get(name, 0) + person.total
    unnamed, total = units.pop("", 0), max(1, found.stage_units.total())
    ranked = sorted(units.items(), key=lambda pair: (-pair[1], pair[0]))
    lines = [f"- {name}: {count / total:.1%} of the work" for name, count in ranked[:NAMED]]
    more = sum(count for _, count in ranked[NAMED:])
    if more:
        lines.append(f"- {len(ranked) - NAMED} others with a name: {more / total:.1%}")
    if unnamed:
        lines.append(f"- peers without a name: {unnamed / total:.1%}")
    return lines or ["Nobody yet: no step is committed."]


def _safe(text: str, most: int = NAME_MAX) -> str:
    """A stranger's text, escaped for Markdown: one line of at most `most` characters, without markup."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]()<>|#!" else sign for sign in plain(text, most))
