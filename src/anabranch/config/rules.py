"""Rules of the run file: every constraint on one key, and combinations of keys that cannot work.

No rule looks at the machine (files, devices, memory): a peer that gets the configuration applies the same.
"""

from __future__ import annotations

import math
from typing import Any

from anabranch.addresses import parse_addresses
from anabranch.config.schema import CONSTRAINTS, RunConfig
from anabranch.errors import ConfigError

#: Most squares of its own that an island may add in a round to the second moment that it holds, as a share
#: of that (`train.islands.agreed_moments`): H·(1 − β₂) squares of weight 1/K², each K times the agreed one.
#: A quarter makes its last step a tenth shorter; with more the agreed moment shrinks from round to round.
HELD_MOST = 0.25


def check_rules(config: RunConfig, where: str) -> None:
    """Raise ConfigError at the first value or combination that is not allowed; `where` begins the message."""
    for key, constraint in CONSTRAINTS.items():
        value = _value(config, key)
        for each in value if isinstance(value, tuple) else (value,):
            problem = constraint.problem(each) if each is not None else ""
            if problem:
                raise ConfigError(f"{where}: {key} {problem}")
    network = config.network
    for sentence in (
        _model_problem(config),
        _lora_problem(config),
        _data_problem(config),
        _schedule_problem(config),
        _muon_problem(config),
        _pipeline_problem(config),
        _fleet_problem(config),
        _delay_problem(config),
        _round_problem(config),
        _private_problem(config),
        _audit_problem(config),
        _device_problem(config),
        _wire_problem(config),
        address_problem(network.host, network.advertise, "network.host", "network.advertise"),
        _iroh_problem(config),
    ):
        if sentence:
            raise ConfigError(f"{where}: {sentence}")


def _device_problem(config: RunConfig) -> str:
    """Reason why a stage cannot lie on the devices that are named, "" if it can."""
    if problem := device_problem(config.compute.device):
        return f"compute.device = {problem}"
    return ""


def device_problem(text: str) -> str:
    """Clause that says why a stage cannot lie on the devices that a list names (each of the pattern of
    compute.device), "" if it can."""
    names = text.split(",")
    if len({name.partition(":")[0] for name in names}) > 1:
        return f'"{text}" mixes cpu and cuda, which compute other bits: name devices of one kind'
    numbers = [int(name.partition(":")[2] or 0) for name in names]
    twice = [name for name, number in zip(names, numbers, strict=True) if numbers.count(number) > 1]
    return f'"{text}" names {twice[-1]} twice: name each device once' if twice else ""


def _audit_problem(config: RunConfig) -> str:
    """Reason why the audits that the run file asks for cannot be made, "" if they can or there are none."""
    if config.audit.share and (config.run.numerics == "mixed" or config.run.reduction != "exact"):
        return 'audit.share needs run.numerics = "strict" and run.reduction = "exact": others may differ'
    return ""


def _iroh_problem(config: RunConfig) -> str:
    """Reason why peers cannot connect through iroh, "" if they can or shall not."""
    network = config.network
    if network.transport != "tcp" and not network.iroh_relay:
        return f'network.transport = "{network.transport}" needs a relay: set network.iroh_relay to its URL'
    return ""


def _wire_problem(config: RunConfig) -> str:
    """Reason why payloads cannot be encoded as the run file says, "" if they can."""
    if config.wire.block % 2:
        return f"wire.block {config.wire.block} is odd; write {config.wire.block + 1}"
    if config.wire.reduce == "coarse" and config.run.reduction != "exact":
        return 'wire.reduce = "coarse" needs run.reduction = "exact": coarse sums are integers, too'
    return ""


def check_removed_options(config: RunConfig) -> None:
    """Raise ConfigError for options that earlier releases had and this one does not. Not part of
    `check_rules`: run files of earlier releases stay readable, so that old runs can be verified."""
    if config.snapshots.redo != "replay":
        raise ConfigError(
            f'snapshots.redo = "{config.snapshots.redo}" was removed; set "replay", with snapshots.every = 1 '
            "or 2 if whole stages are often lost (a run begun with it goes on with the release that began it)"
        )
    if config.routing.policy == "auction" and config.routing.return_ == "own":
        raise ConfigError(
            'routing.return = "own" does not work with routing.policy = "auction", which plans for any data '
            'node; set routing.return = "any", or routing.policy = "gwtf", "swarm", "greedy" or "static" '
            "(a run begun with it goes on with the release that began it)"
        )


def relays_by_stage(config: RunConfig) -> tuple[int, ...]:
    """Number of relays of the local swarm at each of stages 1..S; without `relays_per_stage` an even split,
    whose remainder goes to the earlier stages."""
    if config.fleet.relays_per_stage:
        return config.fleet.relays_per_stage
    stages = config.pipeline.relay_stages
    share, extra = divmod(config.fleet.relays, stages)
    return tuple(share + (stage < extra) for stage in range(stages))


def check_fleet_holds(config: RunConfig, activation_bytes: int) -> None:
    """Raise ConfigError if the nodes of the local swarm cannot keep the boundary tensors of a batch until its
    step is released. activation_bytes: one microbatch's activation between two stages, as it is sent. For
    each microbatch a node keeps four tensors of that size: the activation it received and the one it sent,
    and the gradients of both. A stage's replicas share the batch, or two batches where two iterations are in
    flight."""
    budget = config.fleet.boundary_budget_bytes
    microbatches, tensors = config.batch.microbatches, 4 * (1 + config.iteration.delay)
    for stage, replicas in enumerate((config.fleet.data_nodes, *relays_by_stage(config))):
        share = math.ceil(microbatches / replicas)
        needed = share * tensors * activation_bytes
        if needed > budget:
            raise ConfigError(
                f"the fleet cannot hold the batch: at stage {stage} each of {replicas} "
                f"{'relays' if stage else 'data nodes'} keeps the boundaries of {share} of {microbatches} "
                f"microbatches until the step is released, {share} x {tensors} tensors x "
                f"{_bytes(activation_bytes)} = {_bytes(needed)}, but fleet.boundary_budget_bytes is "
                f"{_bytes(budget)}; raise it to {needed}"
                + _alternative(stage, microbatches, budget // (tensors * activation_bytes))
            )


def _alternative(stage: int, microbatches: int, fitting: int) -> str:
    """Clause at the end of the message of `check_fleet_holds`, with remedies other than a larger memory
    budget. stage: that of the node (0: data node). microbatches: number in a batch. fitting: number of
    microbatches whose tensors fit into one node's budget."""
    if fitting == 0:
        return " or lower batch.rows"
    key = "replicas of that stage (fleet.relays)" if stage else "fleet.data_nodes"
    return f", lower batch.microbatches or batch.rows, or raise {key} to {math.ceil(microbatches / fitting)}"


def address_problem(host: str, advertise: str, host_name: str, advertise_name: str) -> str:
    """Reason why others cannot dial a peer that listens on `host` and advertises `advertise`, "" if nothing
    speaks against it: `advertise` is malformed, or `host` stands for all addresses (0.0.0.0 or ::) and
    `advertise` is "". host_name, advertise_name: the run file's keys or the options that hold the two values.
    """
    if advertise:
        try:
            parse_addresses(advertise)
        except ValueError as error:
            return f"{advertise_name} is {error}"
    elif host in ("0.0.0.0", "::"):
        return f'{host_name} is "{host}", which nobody can dial; set {advertise_name} to a host:port'
    return ""


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), "return_" if name == "return" else name)


def _model_problem(config: RunConfig) -> str:
    model, batch = config.model, config.batch
    divided = not model.head_width and model.dim is not None and model.heads is not None
    if divided and (model.dim or 0) % (model.heads or 1):
        return f"model.dim {model.dim} is not a multiple of model.heads {model.heads}; change one of them"
    if model.heads is not None and model.kv_heads is not None and model.heads % model.kv_heads:
        return (
            f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}; "
            "change one of them"
        )
    if model.subspace and model.initial_weights != "seed":
        return (
            "model.subspace does not work with model.initial_weights: no dense model fits into the subspace; "
            'leave model.subspace out, or set model.initial_weights = "seed"'
        )
    if model.subspace and model.tied:
        return (
            "model.tied does not work with model.subspace, whose embedding is partly fixed and cannot be the "
            "head too; leave model.tied out, or set it to false"
        )
    if model.max_sequence is not None and model.max_sequence < batch.sequence:
        return (
            f"batch.sequence {batch.sequence} is longer than model.max_sequence {model.max_sequence}; "
            "shorten the one or lengthen the other"
        )
    return ""


def _lora_problem(config: RunConfig) -> str:
    if not config.lora.rank:
        return ""
    if config.model.initial_weights == "seed":
        return (
            "lora.rank needs trained weights: set model.initial_weights to a Hugging Face folder, or "
            "lora.rank to 0"
        )
    if config.round.slots:
        return "lora.rank does not work with round.slots: set one of them to 0"
    return ""


def _data_problem(config: RunConfig) -> str:
    data, vocabulary = config.data, config.model.vocab_size
    if data.weights and len(data.weights) != len(data.mixture):
        return (
            f"data.weights has {len(data.weights)} numbers for {len(data.mixture)} sources of data.mixture; "
            "give one number per source"
        )
    if config.pipeline.whole and (data.format, data.packing) != ("text", "stream"):
        return (
            'data.format = "chat" and data.packing = "whole" are for pipelines: set pipeline.stages to 1 or '
            "more, or leave them out"
        )
    if data.mixture:
        if data.source != "stdlib" or data.path:
            return "data.mixture takes the place of data.source and data.path: leave these out"
    elif data.source != "stdlib" and not data.path:
        return f'data.path is empty; data.source = "{data.source}" needs the file or folder to read'
    trained = data.tokenizer == "bpe" or (data.tokenizer == "auto" and config.model.initial_weights == "seed")
    if trained and vocabulary is not None and vocabulary < data.vocab_size:
        return (
            f"model.vocab_size {vocabulary} is smaller than the tokenizer's data.vocab_size "
            f"{data.vocab_size}; raise the one or lower the other"
        )
    return ""


def _schedule_problem(config: RunConfig) -> str:
    optimizer = config.optimizer
    if 0 < optimizer.decay_steps < optimizer.warmup_steps:
        return (
            f"optimizer.decay_steps {optimizer.decay_steps} ends before optimizer.warmup_steps "
            f"{optimizer.warmup_steps}; raise it, or set it to 0 for the length of the run"
        )
    return ""


def _muon_problem(config: RunConfig) -> str:
    if config.optimizer.kind != "muon":
        return ""
    if config.run.numerics == "mixed":
        return (
            'optimizer.kind = "muon" needs run.numerics = "strict": machines of different kinds would not '
            'orthogonalise to the same bits; set that, or optimizer.kind = "adamw"'
        )
    if config.round.slots:
        return 'optimizer.kind = "muon" does not work with round.slots: islands take AdamW steps'
    if config.wire.reduce == "coarse":
        return (
            'optimizer.kind = "muon" does not work with wire.reduce = "coarse", whose units follow from '
            "AdamW's second moments; leave one of them out"
        )
    if config.lora.rank:
        return 'optimizer.kind = "muon" does not work with lora.rank: adapters are trained by "adamw"'
    return ""


def _pipeline_problem(config: RunConfig) -> str:
    stages, split, blocks = config.pipeline.stages, config.pipeline.blocks_per_stage, config.model.blocks
    if split and config.pipeline.whole:
        return "pipeline.blocks_per_stage is for relay stages; with pipeline.stages = 0 leave it empty"
    if split and len(split) != stages:
        return (
            f"pipeline.blocks_per_stage has {len(split)} numbers for pipeline.stages = {stages}; "
            "give one number per stage"
        )
    if blocks is not None and stages > blocks:
        return (
            f"pipeline.stages {stages} is more than model.blocks {blocks}; every stage needs at "
            "least one block: use fewer stages or more blocks"
        )
    if split and blocks is not None and sum(split) != blocks:
        return (
            f"pipeline.blocks_per_stage sums to {sum(split)}, but model.blocks is {blocks}; "
            "make the sum equal to the blocks"
        )
    return ""


def _fleet_problem(config: RunConfig) -> str:
    fleet, stages = config.fleet, config.pipeline.relay_stages
    if fleet.relays_per_stage and len(fleet.relays_per_stage) != stages:
        return (
            f"fleet.relays_per_stage has {len(fleet.relays_per_stage)} numbers for "
            f"pipeline.stages = {stages}; give one number per stage"
        )
    if not fleet.relays_per_stage and fleet.relays < stages:
        return (
            f"fleet.relays {fleet.relays} cannot fill pipeline.stages {stages}; "
            f"every stage needs a relay: raise relays to at least {stages} or use fewer stages"
        )
    smallest = min(relays_by_stage(config))
    if fleet.minimum > smallest:
        return (
            f"fleet.minimum {fleet.minimum} is never reached: a stage has only {smallest} of the local "
            "swarm's relays; lower it or add relays"
        )
    return ""


def _delay_problem(config: RunConfig) -> str:
    """Reason why iterations cannot overlap as the run file says, "" if they can."""
    if not config.iteration.delay:
        return ""
    if config.pipeline.whole:
        return (
            "iteration.delay is for pipelines: set pipeline.stages to 1 or more, or iteration.delay to 0 "
            "(islands overlap nothing)"
        )
    if config.audit.share:
        return "audit.share does not work with iteration.delay: set one of them to 0"
    if config.optimizer.kind != "adamw":
        return 'iteration.delay needs optimizer.kind = "adamw", whose next update can be predicted'
    if config.lora.rank:
        return "lora.rank does not work with iteration.delay: set one of them to 0"
    return ""


def _round_problem(config: RunConfig) -> str:
    slots, microbatches = config.round.slots, config.batch.microbatches
    if config.pipeline.whole and config.fleet.park:
        return "fleet.park is for pipelines: set pipeline.stages to 1 or more, or fleet.park to 0"
    if config.pipeline.whole and config.model.subspace:
        return "model.subspace is for pipelines: set pipeline.stages to 1 or more, or model.subspace to 0"
    wire = config.wire
    if config.pipeline.whole and (wire.activations, wire.gradients, wire.reduce) != ("none", "none", "exact"):
        return (
            "the codecs of [wire] are for pipelines: set pipeline.stages to 1 or more, or leave them out "
            "(round.contributions has the codecs of islands)"
        )
    if not slots:
        return ""
    if config.audit.share and (refused := _audited_rounds_problem(config)):
        return refused
    if not config.pipeline.whole and (refused := _pipeline_islands_problem(config)):
        return refused
    if config.run.reduction != "exact":
        return 'round.slots needs run.reduction = "exact"'
    if config.round.start + config.round.end >= 1.0:
        return "round.start and round.end leave no step to the rounds: set them to less than 1 together"
    part = config.round
    if part.first_steps and part.overlap:
        return "round.first_steps does not work with round.overlap: set one of them to 0"
    if part.fragments > 1 or part.overlap:
        which = "round.fragments" if part.fragments > 1 else "round.overlap"
        if (part.unsent, part.first_moment) != ("local", "keep"):
            return f'{which} needs round.unsent = "local" and round.first_moment = "keep": set both'
        if part.select != "all":
            return f'{which} does not work with round.select: set that to "all"'
    elif part.mix:
        return "round.mix is for round.fragments and round.overlap: set it to 0"
    if part.first_moment == "agree" and (part.outer_momentum or part.select != "all"):
        return 'round.first_moment = "agree" needs round.outer_momentum = 0 and round.select = "all"'
    held = HELD_MOST * slots / (1.0 - config.optimizer.beta2)
    if part.first_moment == "agree" and part.steps > held:
        return (
            f'round.first_moment = "agree" needs round.steps of at most {math.floor(held + 1e-9)} here (a '
            "quarter of round.slots / (1 - optimizer.beta2)): lower round.steps, or raise optimizer.beta2"
        )
    if part.ahead == "keep" and (part.mix or not part.overlap):
        return 'round.ahead = "keep" needs round.overlap, and round.mix = 0'
    if part.overlap >= part.steps:
        return (
            f"round.overlap {part.overlap} is not less than round.steps {part.steps}, of which it takes "
            "some in advance; lower it"
        )
    if part.fragments > (config.model.blocks or part.fragments):
        return (
            f"round.fragments {part.fragments} is more than model.blocks {config.model.blocks}, of which "
            "each fragment has some; lower it"
        )
    if microbatches % slots:
        return (
            f"round.slots {slots} does not divide batch.microbatches {microbatches}, of which each island "
            "has an equal share; change one of them"
        )
    return ""


def _private_problem(config: RunConfig) -> str:
    """Reason why machines cannot train on data of their own as the run file says, "" if they can."""
    if not config.data.private:
        return ""
    if not config.pipeline.whole:
        return (
            "data.private needs pipeline.stages = 0: in a pipeline the tokens of a microbatch pass through "
            "several machines; set that, or data.private to false"
        )
    if not config.round.slots:
        return (
            "data.private is for rounds of islands, as every other step is on the run's own corpus: set "
            "round.slots to the number of machines, or data.private to false"
        )
    if config.audit.share:
        return (
            "audit.share does not work with data.private: nobody else has the data that a contribution was "
            "computed from; set audit.share to 0, or data.private to false"
        )
    return ""


def _audited_rounds_problem(config: RunConfig) -> str:
    """Reason why contributions of islands cannot be audited, "" if they can: an auditor computes a slot again
    from the state before the round alone."""
    part = config.round
    if not config.pipeline.whole:
        return "audit.share does not work with islands of several machines: set it or pipeline.stages to 0"
    plain = (
        ("first_moment", part.first_moment, ("zero", "estimate", "agree")),
        ("unsent", part.unsent, ("drop",)),
        ("select", part.select, ("all",)),
        ("late", part.late, ("drop", "wait")),
    )
    for key, value, able in plain:
        if value not in able:
            which = " or ".join(f'"{each}"' for each in able)
            return (
                f'audit.share does not work with round.{key} = "{value}", with which an island keeps what no '
                f"auditor has: set it to {which}, or audit.share to 0"
            )
    if part.overlap:
        return "audit.share does not work with round.overlap: set one of them to 0"
    return ""


def _pipeline_islands_problem(config: RunConfig) -> str:
    """Reason why islands of several machines do not work as the run file says, "" if they do."""
    if config.fleet.park:
        return "fleet.park does not work with round.slots: set one of them to 0"
    if config.iteration.delay:
        return "iteration.delay does not work with round.slots: set one of them to 0"
    if config.wire.reduce != "exact":
        return 'wire.reduce does not work with round.slots: set it to "exact" (see round.contributions)'
    if config.pipeline.stages == 1:
        return "round.slots works with pipeline.stages = 0 (an island is one machine) or with 2 and more"
    if config.round.late != "drop":
        return f'round.late = "{config.round.late}" is for islands of one machine: set it to "drop"'
    if config.round.overlap:
        return "round.overlap is for islands of one machine: set pipeline.stages or round.overlap to 0"
    return ""


def _bytes(size: int) -> str:
    """`size` in bytes as text: 1536 -> "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
