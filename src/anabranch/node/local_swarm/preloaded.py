"""Modules that the peers of a local swarm share: imported once, in the fork server, before it forks them.

Importing torch takes longer than anything else that a peer of a small run does before its first step. None of
the modules starts a thread.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    # The first gradient imports this, which takes more than a second with its own imports.
    "torch.fx.experimental.symbolic_shapes",
    "anabranch.checkpoint.directory",
    "anabranch.cli.join",
    "anabranch.cli.main",
    "anabranch.cli.resume",
    "anabranch.cli.support.lead_run",
    "anabranch.data.batches",
    "anabranch.data.corpus",
    "anabranch.node.driver.tensor_codec",
    "anabranch.node.lifecycle.create_run",
    "anabranch.node.lifecycle.join",
    "anabranch.node.lifecycle.lead",
    "anabranch.observe.console.event_console",
    "anabranch.train.model.gpt",
    "anabranch.train.model.llama",
    "anabranch.train.stage.protocol_inputs",
    "anabranch.train.stage.worker",
    "anabranch.train.workers.workers",
)

for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # no collection in a peer then touches, and copies, the shared pages
