"""Sections and keys of the run file, with the type, default and constraint of each key.

Each section is a frozen dataclass. The sentence under a field is its comment in the run file that
`anabranch init` writes. Units are in the names. `docs/reference/formats.md` documents the file.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from anabranch.config.constraints import OneOf, Pattern, Range

#: Version of the run file; raised when a key changes its meaning.
RUN_FILE_VERSION = 1

Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open_low=True)]
Fraction = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, open_high=True)]
#: Names of a device, or of several of one machine with commas between; "cpu:N" in a list is a part of the
#: host, which serves to try a list where there is no GPU.
DEVICE = r"auto|cpu|cuda(:\d+)?|(cpu|cuda):\d+(,(cpu|cuda):\d+)+"
DEVICE_WORDS = '"auto", "cpu", "cuda", "cuda:N", or several with commas between, e.g. "cuda:0,cuda:1"'
#: Microbatches beyond the capacity, as a multiple of it.
ExtraShare = Annotated[float, Range(0, 16)]


@dataclass(frozen=True)
class RunSection:
    """The run as a whole."""

    name: Annotated[
        str,
        Pattern(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", "a folder name of letters, digits, '.', '_' and '-'"),
    ] = "tiny"
    """Name of the run; its directory is runs/NAME unless --run-dir names another."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 1
    """Seed of every random choice of the run (weights, sampling)."""
    steps: Count = 400
    """Iterations (optimizer steps) to commit."""
    numerics: Annotated[str, OneOf("auto", "strict", "mixed")] = "auto"
    """"strict" admits peers of one numerics class only (alike processors, GPUs and torch builds); "mixed"
    admits any and reports distances; "auto" is "mixed" where `anabranch start` listens to other machines,
    else "strict"."""
    reduction: Annotated[str, OneOf("exact", "fast")] = "exact"
    """"exact" sums gradients as 64-bit integers (bit-for-bit reproducible); "fast" as floats."""
    note: Annotated[str, Pattern(r"[^\x00-\x1f\x7f]{0,500}", "one line of at most 500 characters")] = ""
    """Sentence on the run, which changes nothing: printed when it is created and kept in its log. `anabranch
    plan --wire auto` says there which codecs and delay it chose, and why."""


@dataclass(frozen=True)
class ModelSection:
    """The model. A key that is not set has the value of the named size."""

    size: str = "llama-tiny"
    """A named size (`anabranch init --help` lists them); the keys below override it."""
    architecture: Annotated[str, Pattern(r"[a-z][a-z0-9_-]{0,63}", "a name of small letters")] | None = None
    """"llama", "gpt", a relative of llama ("mistral", "qwen2", "gemma"), or the name of a model that is
    registered on every machine of the run."""
    dim: Count | None = None
    """Width of the residual stream."""
    blocks: Count | None = None
    """Transformer blocks, over all relay stages."""
    heads: Count | None = None
    """Attention heads; must divide `dim`."""
    kv_heads: Count | None = None
    """Key and value heads (grouped-query attention, not gpt); must divide `heads`."""
    ffn: Count | None = None
    """Width of the feed-forward layer."""
    vocab_size: Annotated[int, Range(2)] | None = None
    """Rows of the embedding; at least the tokenizer's size, which is the default."""
    max_sequence: Count | None = None
    """Longest sequence (tokens) that the model accepts; learned positions have this many rows."""
    tied: bool | None = None
    """True if the head shares the embedding's weights."""
    rope_theta: Positive | None = None
    """Base of the rotary embedding's wavelengths (not gpt)."""
    norm_eps: Positive | None = None
    """Added to the variance inside the norms."""
    rope_factor: Annotated[float, Range(1)] | None = None
    """Factor by which Llama 3.1's rule stretches long rotary wavelengths (not gpt): 8 in Llama 3.1, 32 in
    Llama 3.2, 1 for none."""
    head_width: Natural | None = None
    """Width of an attention head (mistral, qwen2, gemma); 0 for dim / heads."""
    window: Natural | None = None
    """Tokens that a token attends to, itself included (mistral, qwen2, gemma); 0 for all before it."""
    subspace: Natural | None = None
    """Values per token that a cut between stages carries instead of `dim`: the residual stream is confined to
    a fixed subspace of this width (docs/explanation/subspace.md); 0 for none. The head is then untied, and
    data nodes have one more block, at full width."""
    initial_weights: str = "seed"
    """"seed", the path of a Hugging Face folder to continue from, or hub:OWNER/NAME@REVISION with a whole
    commit hash."""
    initial_std: Positive = 0.02
    """Standard deviation of initial weights drawn from the seed; those that write into the residual stream
    have it divided by sqrt(2 * blocks)."""


@dataclass(frozen=True)
class LoraSection:
    """Fine-tuning by low-rank adapters (Hu et al. 2021, arXiv 2106.09685): the weights of the folder
    model.initial_weights stay as they are, and only the adapters are trained, reduced and saved."""

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of the adapters; 0 trains all weights of the model."""
    alpha: Positive = 16.0
    """Adapters count alpha / rank times."""
    targets: tuple[str, ...] = ()
    """Linear layers of the blocks that get adapters, by the last part of their names, e.g. ["q_proj",
    "v_proj"]; empty means all of them."""
    frozen: tuple[str, ...] = ()
    """Hashes of the frozen weights of stages 0, 1, ...: filled in when the run is made."""


@dataclass(frozen=True)
class DataSection:
    """The corpus and its tokenizer."""

    source: Annotated[str, OneOf("stdlib", "text", "jsonl", "parquet", "dataset", "hub")] = "stdlib"
    """"stdlib" (the Python standard library's source text), "text", "jsonl", "parquet", "dataset" (a folder
    of save_to_disk) or "hub" (a dataset of the Hugging Face Hub, streamed)."""
    path: str = ""
    """File or folder of the source; not used by "stdlib". Of "hub" OWNER/NAME@REVISION with a whole commit
    hash, or a folder that the datasets library loads."""
    mixture: tuple[str, ...] = ()
    """Several sources instead of one, e.g. ["text:/data/code", "jsonl:/data/wiki.jsonl"]."""
    weights: tuple[Count, ...] = ()
    """Shares in which the sources of `mixture` are read, e.g. [3, 1]: of every 4 sequences 3 are of the
    first; empty means equal shares."""
    subset: str = ""
    """Configuration of a dataset with several (hub)."""
    split: str = "train"
    """Split of the dataset (hub)."""
    skip: Natural = 0
    """Documents of each source that are left out at its beginning, e.g. those that an earlier run read."""
    documents: Natural = 0
    """Most documents to read of each source; 0 = all."""
    text_field: str = "text"
    """Field or column that holds a document's text, or its messages (jsonl, parquet, dataset, hub)."""
    format: Annotated[str, OneOf("text", "chat")] = "text"
    """"text", or "chat": each record is a conversation or a prompt with its answer, and only what the
    assistant says is trained on."""
    template: Annotated[str, OneOf("plain", "chatml")] = "plain"
    """Text around the turns of a conversation: "plain" (User: ... Assistant: ...) or "chatml"."""
    packing: Annotated[str, OneOf("stream", "whole")] = "stream"
    """Sequences are cut from the "stream" of all documents, or hold "whole" documents in order, as many as
    fit, and are filled up with separators, which do not count; only a document longer than a sequence is
    cut."""
    tokenizer: str = "auto"
    """"auto" (the tokenizer of the folder model.initial_weights; without one "bpe"), "bytes", "bpe" (trained
    on the corpus), or the path of a tokenizer.json."""
    # At least the 256 bytes and the document separator.
    vocab_size: Annotated[int, Range(257, 1 << 20)] = 512
    """Size of the locally trained BPE vocabulary."""
    private: bool = False
    """True: in rounds each machine takes its inner steps on a corpus of its own (`anabranch join
    --private-data`), which never leaves it; this section's corpus is for the synchronous steps and the
    held-out windows. Needs pipeline.stages = 0 and round.slots."""


@dataclass(frozen=True)
class BatchSection:
    """Size of an iteration's batch. Which tokens are in it is a pure function of corpus, tokenizer, seed and
    iteration."""

    microbatches: Count = 8
    """Microbatches per iteration."""
    rows: Count = 4
    """Sequences per microbatch; a microbatch is never split or merged."""
    sequence: Annotated[int, Range(2)] = 128
    """Tokens per sequence."""


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW or Muon; the learning rate rises linearly, then falls by a schedule."""

    kind: Annotated[str, OneOf("adamw", "muon")] = "adamw"
    """"adamw", or "muon" for the matrices of the blocks (embedding, head, norms and biases have AdamW); it
    needs run.numerics = "strict"."""
    momentum: Decay = 0.95
    """Momentum of "muon"."""
    lr: Positive = 5e-3
    """Peak learning rate."""
    warmup_steps: Natural = 30
    """Iterations over which the learning rate rises linearly to `lr`."""
    schedule: Annotated[str, OneOf("cosine", "linear", "wsd")] = "cosine"
    """"cosine" and "linear" fall from the warm-up's end on; "wsd" (warm-up, stable, decay) stays at `lr` and
    falls linearly over the last part only, so that a longer run can go on from its stable part."""
    min_lr_ratio: Fraction = 0.1
    """The schedule ends at lr * min_lr_ratio."""
    decay_steps: Natural = 0
    """Iteration at which the schedule ends; 0 means run.steps."""
    decay_share: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Part of the iterations up to the schedule's end over which "wsd" falls."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of matrices; vectors have none."""
    beta1: Decay = 0.9
    """Decay of the first moment (mean of gradients)."""
    beta2: Decay = 0.95
    """Decay of the second moment (mean of squared gradients)."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    clip: Annotated[float, Range(0)] = 1.0
    """Largest global gradient norm, to which larger ones are scaled down; 0 turns clipping off."""


@dataclass(frozen=True)
class PipelineSection:
    """Partition of the model into pipeline stages."""

    stages: Natural = 3
    """Relay stages 1..S; stage 0 (embedding, final norm, head, loss) is on the data nodes. 0: every relay
    holds the whole model, and the data nodes send token ids only."""
    blocks_per_stage: tuple[Count, ...] = ()
    """Uneven split, e.g. [2, 1, 1]; empty means balanced by cost."""

    @property
    def whole(self) -> bool:
        """True if every relay holds the whole model."""
        return self.stages == 0

    @property
    def relay_stages(self) -> int:
        """Stages that relays hold: S, or 1 where each holds the whole model."""
        return max(1, self.stages)


@dataclass(frozen=True)
class IterationSection:
    """Iterations that overlap, so that nobody waits for the reduce of a step. Needs pipeline.stages of 1 or
    more."""

    delay: Annotated[int, Range(0, 1)] = 0
    """Steps that an iteration does not wait for: 0, or 1 (two iterations are in flight; each computes on
    weights that are predicted one step ahead). Not with audits, LoRA, Muon, or pipeline.stages = 0."""
    delay_from: Fraction = 0.1
    """Share of run.steps that is synchronous before the first delayed iteration (at least two steps; fewer
    than about 300 cost much loss)."""


@dataclass(frozen=True)
class RoundSection:
    """Islands, which each take several optimizer steps by themselves and agree in rounds: machines that hold
    the whole model (pipeline.stages = 0), or crews of one relay of each stage and a data node."""

    slots: Natural = 0
    """Most islands that work at one time; must divide batch.microbatches, of which each has its share. 0 =
    none: every step is synchronous."""
    steps: Count = 20
    """Inner steps of an island in a round, on average: quick machines take more. A round counts as so many of
    run.steps."""
    start: Fraction = 0.25
    """Share of run.steps that is synchronous before the first round (at least one step)."""
    first_steps: Natural = 0
    """Inner steps of the first round, which double from round to round up to `steps`. 0 = all rounds have
    `steps`."""
    end: Fraction = 0.0
    """Share of run.steps that is synchronous again at the end, after the last round."""
    outer_lr: Positive = 0.7
    """Factor of the islands' mean change in an outer step."""
    outer_momentum: Decay = 0.9
    """Nesterov momentum of the outer step; 0 = plain SGD."""
    first_moment: Annotated[str, OneOf("zero", "estimate", "keep", "agree")] = "zero"
    """Adam's first moment at the beginning of a round: "zero", an "estimate" from the outer momentum, "keep":
    each island goes on with its own moments, the second one too, or "agree": both moments are those of the
    run, which each round's mean change brings on; needs outer_momentum = 0."""
    select: Annotated[str, OneOf("all", "largest", "significant")] = "all"
    """Values of an island's change that are sent: "all", the "largest" ones, or those that are "significant"
    beside their weight."""
    select_share: Annotated[float, Range(0, 1, open_low=True)] = 0.02
    """Share of the values that "largest" sends, of each 4,096."""
    threshold: Annotated[float, Range(0)] = 0.01
    """Change from which a value is "significant", as a share of its weight; it falls with the root of the
    number of rounds."""
    unsent: Annotated[str, OneOf("drop", "feedback", "local")] = "drop"
    """Treatment of values that are not sent, rounding included: "drop" forgets them, "feedback" adds them to
    the next change (error feedback), "local" leaves them in the island's own weights."""
    unsent_decay: Fraction = 1.0
    """Factor of what was not sent before "feedback" adds it."""
    fragments: Count = 1
    """Groups of tensors that have their turns in the rounds, one in each; needs unsent = "local" and
    first_moment = "keep"."""
    overlap: Natural = 0
    """Inner steps of the next round that an island takes before it needs the result of this one, during the
    exchange; only where an island is one machine."""
    mix: Decay = 0.0
    """Share of its own weights that an island keeps where it takes a result (with `fragments` or
    `overlap`)."""
    ahead: Annotated[str, OneOf("mix", "keep")] = "mix"
    """Change of the steps of `overlap` when the result comes: "mix" gives it up, but for the share `mix`;
    "keep" adds it to the agreed weights, so that the next contribution has it. With "keep" quick machines,
    which have more steps in a round, take more of these steps, too."""
    contributions: Annotated[str, OneOf("exact", "fp16", "int8", "int4", "int2")] = "int4"
    """An island's change on the wire: "exact", "fp16", or integers with a scale for each 64 values."""
    results: Annotated[str, OneOf("exact", "int8", "int4")] = "int8"
    """The mean change on the wire, rounded as `contributions`; what is sent is what everybody applies."""
    late: Annotated[str, OneOf("drop", "carry", "wait")] = "drop"
    """Islands that are late: the round ends without them ("carry": their change counts in the next round), or
    waits."""
    grace: Annotated[float, Range(0.05, 100)] = 0.5
    """Time that late islands have, as a share of the time in which three quarters of them were ready."""


@dataclass(frozen=True)
class FleetSection:
    """The machines: how many, and what each can hold."""

    data_nodes: Count = 2
    """Data nodes of a local swarm (`anabranch train`)."""
    relays: Count = 6
    """Relays of a local swarm, spread over the stages."""
    relays_per_stage: tuple[Count, ...] = ()
    """Uneven replicas of a local swarm, e.g. [3, 1, 2]; overrides `relays`."""
    minimum: Count = 1
    """Replicas that every stage must have before the first iteration opens."""
    capacity: Natural = 0
    """Microbatches that a node can hold at once; 0 means measured from its free memory."""
    park: ExtraShare = 0.0
    """Further microbatches, as a multiple of the capacity, whose activations a relay with a GPU offloads to
    host memory, as far as its free memory allows; a relay that computes on its CPU offloads nothing."""
    recompute: ExtraShare = 0.0
    """Further microbatches, as a multiple of the capacity, for which a relay keeps only the stage's input and
    recomputes the forward pass when the gradient arrives."""
    rebalance: Natural = 0
    """Consecutive steps for which one stage must be the bottleneck before a relay moves to it from a stage
    that can spare one (no wait where a replica was lost and nobody moved for so many steps); 0: no moves."""
    deal: Annotated[str, OneOf("arrival", "links")] = "arrival"
    """Initial stages of relays that asked for none: "arrival" (in the order in which they join) or "links"
    (once all have joined, by the measured links between them)."""
    spread: Annotated[str, OneOf("links", "program", "never", "always")] = "links"
    """Help from peers of adjacent stages in summing a stage's gradient: "links" (where links between its
    replicas are slow and their links to others are not), "program" (shares of a linear program over lines
    and links, as in DeDLOC), "never", or "always" (at random, for trials)."""
    spare: Annotated[str, OneOf("links", "never", "always")] = "never"
    """Standby replicas, which get no microbatch while others of their stage can take it: "links"
    (replicas whose upload delays the step for longer than their work saves), "never", or "always" (drawn at
    random, for trials)."""
    voters: Annotated[int, Range(1, 5)] = 1
    """Most peers that keep the commit log (an odd number is used): 1 (the leading data node), 3, or 5 (above
    fifty peers). With three the run survives the loss of any one of them."""
    boundary_budget_bytes: Count = 4 << 30
    """Host memory per node for kept boundaries (activations and gradients sent and received)."""


@dataclass(frozen=True)
class ComputeSection:
    """Device and precision of a peer's computation."""

    device: Annotated[str, Pattern(DEVICE, DEVICE_WORDS)] = "auto"
    """"auto", "cpu", "cuda", "cuda:1", ...; several, as in "cuda:0,cuda:1", hold the blocks of a relay's
    stage in order, each a share by its memory."""
    dtype: Annotated[str, OneOf("fp32", "fp64", "bf16")] = "fp32"
    """"fp32", "fp64", or "bf16" (fp32 master weights and moments)."""
    threads: Annotated[int, Range(1, 1024)] = 1
    """torch threads per process; part of the numerics class."""


@dataclass(frozen=True)
class WireSection:
    """Fewer bytes on the line, at the price of precision. These keys are part of the run's definition: every
    peer rounds alike, and `verify` does, too."""

    activations: Annotated[str, OneOf("none", "bf16", "fp16", "int8", "int4")] = "none"
    """Activations between stages: "none" (as they are computed), "bf16", "fp16", or integers of 8 or 4 bits
    with a scale for each block ("int8", "int4")."""
    gradients: Annotated[str, OneOf("none", "bf16", "fp16", "int8", "int4")] = "none"
    """Input gradients between stages, with the same choices."""
    gradient_rounding: Annotated[str, OneOf("nearest", "stochastic")] = "nearest"
    """Rounding of input gradients in "int8" and "int4": "nearest", or "stochastic" (unbiased; the draws are a
    function of seed, iteration, microbatch and stage)."""
    reduce: Annotated[str, OneOf("exact", "coarse")] = "exact"
    """Gradient sums between the replicas of a stage: "exact" (contributions in units of 2^-48, some 9 bytes a
    parameter and step), or "coarse" (in units of a share of the gradient's usual size, 2 to 4 bytes; the sum
    of the rounded contributions is exact, too). Needs run.reduction = "exact"."""
    block: Annotated[int, Range(8, 1 << 16)] = 64
    """Values that share a scale in "int8" and "int4"; an even number."""


@dataclass(frozen=True)
class EvaluationSection:
    """Loss on documents that are held out of training."""

    every: Natural = 100
    """Iterations between held-out evaluations (also before the first and after the last); 0 = never."""
    windows: Count = 16
    """Held-out windows (each of a microbatch's shape) per evaluation."""


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints in the run directory."""

    every: Count = 100
    """Iterations between checkpoints; one is always written at the end."""
    keep: Count = 2
    """Checkpoints kept; older ones are deleted."""


@dataclass(frozen=True)
class SnapshotsSection:
    """Copies of each stage's state on peers of other stages, for a stage that loses all its replicas."""

    every: Natural = 0
    """Iterations between snapshots; 0 = as many as add at most a quarter to the traffic between peers."""
    copies: Natural = 2
    """Peers outside a stage that keep its state; 0 = none, and a lost stage makes the run wait."""
    budget_bytes: Natural = 4 << 30
    """Host memory per peer for the copies that it keeps."""
    redo: Annotated[str, OneOf("replay", "gradients")] = "replay"
    """Recovery of a lost stage: "replay" (all stages go back to the last snapshot and compute again). Runs of
    earlier releases may have "gradients", which no new run can have."""


@dataclass(frozen=True)
class AuditSection:
    """Audit of relays' work, for runs with guests whom the owner does not know."""

    share: Fraction = 0.0
    """Probability that a relay's microbatch is computed again by another replica of its stage; 0 = no audits.
    All of a relay's microbatches in a step are drawn together, a little more often if they are several (0.059
    for four, 0.073 for eight or more, at a share of 0.05). Above 0, work that is far off the others' is
    computed again too, whatever is drawn. In rounds (`round.slots`) the inner steps of an island are computed
    again, by an auditor only (`anabranch audit`): without one nothing is found there. Needs numerics =
    "strict" and reduction = "exact", and islands of one machine that keep nothing from round to round."""


@dataclass(frozen=True)
class RoutingSection:
    """Choice of the replica that each microbatch is sent to."""

    policy: Annotated[
        str,
        OneOf(
            "auction", "greedy", "gwtf", "static", "swarm",
            note='"optimal" needs every link\'s cost in one place: only "anabranch route" has that',
        ),
    ] = "auction"  # fmt: skip
    """"auction" (peers plan the cheapest flow together, and leave the plan for a shorter queue), "gwtf" (the
    published flow algorithm, followed as planned), "swarm" (SWARM's queues by virtual time), "greedy" (least
    cost among peers with free capacity) or "static" (replica = index mod replicas)."""
    return_: Annotated[str, OneOf("any", "own")] = "any"
    """Data node that computes the loss of a microbatch: "any", or its "own", which sent it out (not
    by "auction")."""


@dataclass(frozen=True)
class NetworkSection:
    """Addresses of the leading data node, and the lifetime of its tickets."""

    host: Annotated[str, Pattern(r"\S+", "an address to listen on, e.g. 127.0.0.1 or 0.0.0.0")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65535)] = 0
    """Port to listen on; 0 picks a free one."""
    advertise: Annotated[str, Pattern(r"\S*", "empty or host:port")] = ""
    """host:port that peers dial, where it differs from the listening address."""
    transport: Annotated[str, OneOf("tcp", "iroh", "auto")] = "tcp"
    """How peers connect: TCP, iroh (QUIC with hole punching; `pip install anabranch[iroh]`), or both, TCP
    first."""
    iroh_relay: Annotated[str, Pattern(r"(https?://\S+)?", "empty or an URL, e.g. https://relay.my.host")] = (
        ""
    )
    """URL of the iroh relay at which peers find each other, if `transport` is not "tcp"; one of your own."""
    ticket_hours: Positive = 168.0
    """Hours until the printed tickets expire."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run; equal configurations describe the same run."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    lora: LoraSection = field(default_factory=LoraSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    iteration: IterationSection = field(default_factory=IterationSection)
    round: RoundSection = field(default_factory=RoundSection)
    fleet: FleetSection = field(default_factory=FleetSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    wire: WireSection = field(default_factory=WireSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    snapshots: SnapshotsSection = field(default_factory=SnapshotsSection)
    audit: AuditSection = field(default_factory=AuditSection)
    routing: RoutingSection = field(default_factory=RoutingSection)
    network: NetworkSection = field(default_factory=NetworkSection)


def key_of(field_name: str) -> str:
    """Name of a field in the file: the field `return_` is the key `return`, a keyword of Python."""
    return field_name.rstrip("_")


def _constraint(hint: Any) -> Any:
    """Constraint inside a type such as `Count | None` or `tuple[Count, ...]`; None if there is none."""
    if hasattr(hint, "__metadata__"):
        return hint.__metadata__[0]
    return next(filter(None, map(_constraint, typing.get_args(hint))), None)


#: Constraint of each key that has one, by its dotted name.
CONSTRAINTS: dict[str, Range | OneOf | Pattern] = {
    f"{section.name}.{key_of(name)}": constraint
    for section in fields(RunConfig)
    for name, hint in typing.get_type_hints(section.default_factory, include_extras=True).items()
    if (constraint := _constraint(hint)) is not None
}
