"""Prepare the corpus of a run file, and say its documents, tokens and epochs.

examples:
  anabranch data run.toml                       prepare it, and tell; `train` need not tokenize it again
  anabranch data run.toml --out corpus          keep it: `anabranch join --corpus corpus` on a data node
  anabranch data run.toml --json

The same files and settings give the same corpus on every machine, so that a data node with the texts need not
copy it: the run compares fingerprints. An existing folder is checked instead of written again. Texts of a
megabyte or more are kept tokenized in ~/.anabranch/corpora (ANABRANCH_CORPORA: another folder, or "off")."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from anabranch.cli.support.arguments import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="run file, whose corpus is prepared")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to keep it in (default: none)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.config import load_run_file
    from anabranch.data.corpus import materialise
    from anabranch.data.corpus_cache import default_cache
    from anabranch.node.lifecycle.run_checks import resolved
    from anabranch.observe.console.progress import progress_bars
    from anabranch.observe.wording import plain
    from anabranch.train.recipes.recipes import batch_tokens, epochs_sentence

    config = resolved(load_run_file(args.run_file))
    said: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, progress_bars("bytes") as update:
        folder = args.out or Path(temporary) / "corpus"
        corpus = materialise(config.data, folder, update, said.append, default_cache())
        train, held_out = corpus.train, corpus.held_out
        seen = config.run.steps * batch_tokens(config.batch)
        result = {
            "documents": corpus.documents,
            "train_tokens": train.tokens,
            "held_out_tokens": held_out.tokens,
            "vocabulary": corpus.vocab_size,
            "tokens_read": seen,
            "epochs": seen / max(1, train.tokens),
            "fingerprint": corpus.fingerprint,
            "remarks": said,
            "position": corpus.position,
        }
        if config.data.documents and corpus.position:
            said.append(
                f"documents {config.data.skip:,} to {corpus.position - 1:,} of the source are read: "
                f"data.skip = {corpus.position} goes on behind them"
            )
    if args.json:
        print(json.dumps(result))
        return 0
    for sentence in said:
        print(plain(sentence))
    print(
        f"{result['documents']:,} documents; {train.tokens:,} tokens to train on, "
        f"{held_out.tokens:,} held out; {corpus.vocab_size:,} ids"
    )
    print(epochs_sentence(seen, train.tokens))
    print(f"fingerprint {corpus.fingerprint}" + (f"\nwrote {args.out}" if args.out else ""))
    return 0
