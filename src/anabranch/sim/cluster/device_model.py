"""Device model: seconds of each task, and number of microbatches that fit into memory.

Roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): a task takes the longer of its operations over the
device's rate and its bytes over the memory's. Devices are data with sources (`devices.json`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from anabranch.config.constraints import OneOf, Range
from anabranch.errors import UserError
from anabranch.protocol.interface import tasks
from anabranch.train.codec.sizes import BITS, coarse_bytes
from anabranch.train.model.sizes import (
    SCALED_BYTES,
    SUM_WIRE_BYTES,
    ModelConfig,
    activation_elements_kept,
    block_flops,
    block_parameters,
    cut_bytes,
    end_parameters,
    fixed_elements,
    head_flops,
    token_bytes,
    total_parameters,
)

#: Bytes per parameter in memory: master weight and Adam's two moments (fp32); the exact 64-bit sum of its
#: gradient (packed on the wire: SUM_WIRE_BYTES); the reduced gradient (fp32).
MASTER_BYTES, MOMENTS_BYTES, SUM_BYTES, GRADIENT_BYTES = 4, 8, 8, 4
STATE_BYTES = MASTER_BYTES + MOMENTS_BYTES
#: Bytes of a parameter with two iterations in flight: of the predicted weights in a state; in memory, those
#: of the second iteration and its gradient sum, besides.
AHEAD_BYTES = MASTER_BYTES
SECOND_BYTES = MASTER_BYTES + SUM_BYTES
#: Bytes of a parameter for a pipeline island: its own weights, their gradient, and Adam's two moments (fp32).
#: The committed state is beside them, with the outer momentum in place of the first moment.
ISLAND_BYTES = STATE_BYTES + GRADIENT_BYTES
#: Bytes of a parameter that it needs in place of these, and of activations, when it ends, with its change.
CLOSING_BYTES = 28
#: Factor on the duration of a task that begins while another process of the machine computes.
SHARED = 2.0
WIDTHS = {"fp32": 4, "fp16": 2}
#: Bytes of a parameter on the wire in a round: an island's contribution, and the result. With a scale for
#: each 64 values (`net.packing`).
CONTRIBUTION_BYTES = {
    "exact": SUM_WIRE_BYTES,
    "fp16": SUM_WIRE_BYTES,
    "int8": SCALED_BYTES[8],
    "int4": SCALED_BYTES[4],
}
RESULT_BYTES = {"exact": float(GRADIENT_BYTES), "int8": SCALED_BYTES[8], "int4": SCALED_BYTES[4]}
#: The same of a result that a machine fetches later: one of 4 bits has the form of 8 then.
LATER_RESULT_BYTES = {**RESULT_BYTES, "int4": SCALED_BYTES[8]}
Flops = Annotated[float, Meta(ge=1e7, le=1e17)]
Bytes = Annotated[float, Meta(ge=1e8, le=1e13)]
BytesPerSecond = Annotated[float, Meta(ge=1e8, le=1e15)]


@dataclass(frozen=True)
class WirePart:
    """Section [wire] of a scenario, with the keys and values of a run file's: codecs of what crosses the
    line. activations, gradients: codec of activations and of input gradients between stages. block: values
    that share a scale (int8, int4). reduce: exact or coarse gradient sums."""

    activations: Annotated[str, OneOf(*BITS)] = "none"
    gradients: Annotated[str, OneOf(*BITS)] = "none"
    reduce: Annotated[str, OneOf("exact", "coarse")] = "exact"
    block: Annotated[int, Range(8, 1 << 16)] = 64


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """Kind of device, with its published peak figures. The allowed ranges of the figures reach from a small
    computer to a rack. source: publication of the figures. host_link_bytes_per_s: rate of copies between
    device and host memory, in each direction (0: device and host share one memory). together: number of such
    devices in one machine that hold a stage together and compute in turn; all figures are those of one."""

    name: str
    source: Annotated[str, Meta(pattern=r"\S")]
    fp32_flops_per_s: Flops
    fp16_flops_per_s: Flops
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    host_link_bytes_per_s: Annotated[float, Meta(ge=0.0, le=1e13)] = 0.0
    together: Annotated[int, Meta(ge=1, le=8)] = 1

    def flops_per_s(self, dtype: str) -> float:
        return self.fp32_flops_per_s if dtype == "fp32" else self.fp16_flops_per_s


@dataclass(frozen=True)
class TaskLoad:
    """Work of a task: floating-point operations, and bytes read or written in device memory. Loads can be
    added."""

    flops: float
    moved_bytes: float

    def __add__(self, other: TaskLoad) -> TaskLoad:
        return TaskLoad(self.flops + other.flops, self.moved_bytes + other.moved_bytes)


@dataclass(frozen=True)
class Workload:
    """Sizes of a model divided into stages 1 to S, with microbatches of rows * sequence tokens.

    All stages have equal numbers of blocks; if that is impossible, the first ones have one more. dtype:
    precision of computing, and of payloads without a codec. wire: codecs at the cuts, units of gradient sums.
    microbatches: per iteration. whole: every relay holds the whole model (then stages is 1), and data nodes
    send token ids. value_bytes: bytes on the line of a value at a cut; of_sum_bytes, of_result_bytes: bytes
    on the line of a parameter in a reduce, to the peer that sums and back (each 0: by codec and dtype).
    delayed: True if two iterations are in flight. ends: slots of pipeline islands whose embedding and head a
    data node holds at once (0: a run without such islands).
    """

    model: ModelConfig
    stages: int
    rows: int
    sequence: int
    dtype: str = "fp32"
    wire: WirePart = field(default_factory=WirePart)
    microbatches: int = 8
    whole: bool = False
    value_bytes: float = 0.0
    of_sum_bytes: float = 0.0
    of_result_bytes: float = 0.0
    delayed: bool = False
    ends: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of a copied state: weight and two moments; with two iterations in flight the
        predicted weight, too."""
        return STATE_BYTES + AHEAD_BYTES * self.delayed

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def activation_bytes(self) -> int:
        """Bytes on the line of what is sent forward for one microbatch: its activation, in a subspace model
        with its token ids; for a whole model its token ids alone."""
        if self.whole:
            return self.rows * (self.sequence + 1) * token_bytes(self.model.vocab_size)
        activation, gradient = cut_bytes(self.model, self.wire, self.tokens, self.width)
        return activation - gradient + self.gradient_bytes if self.value_bytes else activation

    @property
    def gradient_bytes(self) -> int:
        """Bytes on the line of one microbatch's input gradient at a cut."""
        if self.value_bytes:
            return math.ceil(self.tokens * self.model.stream * self.value_bytes)
        return cut_bytes(self.model, self.wire, self.tokens, self.width)[1]

    @property
    def input_bytes(self) -> int:
        """Bytes in memory of one microbatch's input to a block. It has the model's full width, also in a
        subspace model."""
        return self.tokens * self.model.dim * self.width

    @property
    def fixed_bytes(self) -> int:
        """Bytes in the memory of each machine for the constant matrices of a subspace model; 0 for others."""
        return fixed_elements(self.model) * self.width

    @property
    def sum_bytes(self) -> float:
        """Bytes on the line per parameter of a gradient sum, from a member of a reduce to the peer that adds
        up."""
        if self.of_sum_bytes:
            return self.of_sum_bytes
        return SUM_WIRE_BYTES if self.wire.reduce == "exact" else coarse_bytes(self.microbatches)[0]

    @property
    def reduced_bytes(self) -> float:
        """Bytes on the line per parameter of the reduced gradient, from the peer that adds up to a member."""
        if self.of_result_bytes:
            return self.of_result_bytes
        return GRADIENT_BYTES if self.wire.reduce == "exact" else coarse_bytes(self.microbatches)[1]

    @property
    def reduce_bytes(self) -> float:
        """Bytes on the line per parameter in a reduce, for one member: `sum_bytes` to the peer that adds up
        and `reduced_bytes` back."""
        return self.sum_bytes + self.reduced_bytes

    def blocks(self, stage: int) -> int:
        each, more = divmod(self.model.blocks, self.stages)
        return each + (1 if stage <= more else 0)

    def parameters(self, stage: int) -> int:
        if self.whole:
            return total_parameters(self.model) if stage else 0
        return self.blocks(stage) * block_parameters(self.model) if stage else end_parameters(self.model)

    def step_bytes(self, stage: int) -> int:
        """Bytes that a stage keeps in memory from step to step: weights, moments, gradient sums and reduced
        gradient, twice where two iterations need it, and the weights, moments and gradients of pipeline
        islands (a relay is in one at a time, a data node in `ends`)."""
        second = SECOND_BYTES * self.delayed
        islands = ISLAND_BYTES * (min(1, self.ends) if stage else self.ends)
        return self.parameters(stage) * (self.state_bytes + SUM_BYTES + GRADIENT_BYTES + second + islands)

    def closing_bytes(self, stage: int) -> int:
        """Bytes that a stage keeps in memory while a pipeline island ends its slot there, as `step_bytes`;
        such a machine holds no activations then. A data node ends one island while its others go on. 0
        without pipeline islands."""
        more = (CLOSING_BYTES - ISLAND_BYTES) * self.parameters(stage)
        return self.step_bytes(stage) + more if self.ends else 0

    @property
    def block_bytes(self) -> int:
        """Bytes on the line per block of the model in a reduce (`reduce_bytes` of its parameters); for a
        whole model with the block's share of embedding and head."""
        return math.ceil(self.reduce_bytes * self.parameters(1) / self.blocks(1))

    @property
    def ends_bytes(self) -> int:
        """Bytes on the line of embedding and head (stage 0) in a reduce; 0 for a whole model."""
        return math.ceil(self.reduce_bytes * self.parameters(0))

    def kept_bytes(self, stage: int) -> int:
        """Bytes in memory that a stage keeps of one microbatch from its forward until its weight gradient is
        computed: input and output gradient of each linear layer."""
        return self.tokens * self.blocks(stage) * activation_elements_kept(self.model) * self.width

    def load(self, stage: int, task: type[tasks.Task]) -> TaskLoad:
        """Operations and bytes of a task of one microbatch at a stage; zero for tasks that are not modelled
        there. The input gradient costs what the forward does, and attention once more, as it has no weights;
        the weight gradient costs the linear layers once."""
        weights = self.parameters(stage) * self.width
        if stage == 0 and self.whole:
            return TaskLoad(0.0, 0.0)
        if stage == 0:
            head = TaskLoad(self.tokens * head_flops(self.model, self.sequence), weights + self.input_bytes)
            sums = TaskLoad(0.0, 2 * SUM_BYTES * self.parameters(0))
            embedded = TaskLoad(0.0, 2 * self.input_bytes)
            # The head's task is its forward and the gradient of the loss by the activation.
            of_stage_0 = {tasks.Embed: embedded, tasks.Head: head + head, tasks.WeightGradient: head + sums}
            return of_stage_0.get(task, TaskLoad(0.0, 0.0))
        blocks, tokens, dim = self.blocks(stage), self.tokens, self.model.dim
        attention = blocks * tokens * 4 * self.sequence * dim
        linear = blocks * tokens * block_flops(self.model, self.sequence) - attention
        kept = self.kept_bytes(stage)
        linear += self.tokens * head_flops(self.model, self.sequence) if self.whole else 0
        forward = TaskLoad(linear + attention, weights + kept)
        input_gradient = TaskLoad(linear + 2 * attention, weights + kept)
        weight_gradient = TaskLoad(linear, kept + 2 * SUM_BYTES * self.parameters(stage))
        of_relay = {
            tasks.Forward: forward,
            tasks.InputGradient: input_gradient,
            tasks.WeightGradient: weight_gradient,
            tasks.Recount: forward + input_gradient + weight_gradient,
        }
        return of_relay.get(task, TaskLoad(0.0, 0.0))

    def inner_loads(self, stage: int, task: type[tasks.Task]) -> dict[type[tasks.Task], TaskLoad]:
        """Load of a task of an island's inner step on one microbatch at a stage, in parts: {task of a
        synchronous step that the part resembles: its load}. Weight gradients are added as floats, not
        exactly. task: InnerForward or InnerBackward, at stage 0 InnerHead, too."""
        elements = self.parameters(stage)
        if not stage:
            added = self.load(0, tasks.Head).flops / 2
            of_head = TaskLoad(added, self.input_bytes + 2 * GRADIENT_BYTES * elements)
            rows = self.load(0, tasks.Embed)
            of_ends: dict[type[tasks.Task], dict[type[tasks.Task], TaskLoad]] = {
                tasks.InnerForward: {tasks.Embed: rows},
                tasks.InnerHead: {tasks.Head: self.load(0, tasks.Head), tasks.WeightGradient: of_head},
                tasks.InnerBackward: {tasks.Embed: rows},
            }
            return of_ends[task]
        forward = self.load(stage, tasks.Forward)
        if task is tasks.InnerForward:
            return {tasks.Forward: forward}
        of_weights = TaskLoad(forward.flops, self.kept_bytes(stage) + 2 * GRADIENT_BYTES * elements)
        return {
            tasks.InputGradient: self.load(stage, tasks.InputGradient),
            tasks.WeightGradient: of_weights,
        }

    def slot_load(self, stage: int, task: type[tasks.Task]) -> TaskLoad:
        """Load of the begin or end of a pipeline island's slot at a stage, or of adding its contribution to
        the sum: bytes that it copies, no operations. task: Embed or Forward for the begin, Head or
        InputGradient for the end, WeightGradient or Recount for the adding; others raise KeyError."""
        begun, ended = 2 * STATE_BYTES + GRADIENT_BYTES, 2 * MASTER_BYTES + GRADIENT_BYTES
        per_element: dict[type[tasks.Task], int] = {
            **dict.fromkeys((tasks.Embed, tasks.Forward), begun),
            **dict.fromkeys((tasks.Head, tasks.InputGradient), ended),
            **dict.fromkeys((tasks.WeightGradient, tasks.Recount), GRADIENT_BYTES + 2 * SUM_BYTES),
        }
        return TaskLoad(0.0, self.parameters(stage) * per_element[task])

    def step_load(self, stage: int, task: type[tasks.Task], members: int = 1) -> TaskLoad:
        """Load of a task that belongs to a step or a state, not to a microbatch, at a stage: bytes of the
        sums, gradients, weights and moments that it reads and writes; zero for tasks that are not modelled.
        members: replicas in the stage's reduce."""
        elements = self.parameters(stage)
        predicted = (STATE_BYTES + AHEAD_BYTES) * self.delayed
        per_element: dict[type[tasks.Task], float] = {
            tasks.Freeze: 2 * SUM_BYTES,
            tasks.SumPart: SUM_BYTES + GRADIENT_BYTES / members,
            tasks.Assemble: 2 * GRADIENT_BYTES,
            tasks.Apply: GRADIENT_BYTES + 2 * STATE_BYTES + predicted,
            tasks.InnerStep: GRADIENT_BYTES + 2 * STATE_BYTES,
            tasks.Snapshot: 2 * self.state_bytes,
            tasks.LoadState: 2 * self.state_bytes,
            tasks.CheckState: self.state_bytes,
            tasks.ProveState: self.state_bytes,
        }
        return TaskLoad(0.0, elements * per_element.get(task, 0.0))


#: Tasks of a microbatch; all others belong to a step.
OF_A_MICROBATCH = (
    tasks.Embed, tasks.Head, tasks.Forward, tasks.InputGradient, tasks.WeightGradient, tasks.Recount
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Machine that computes a workload on a device. achieved: share of the device's peak operations per
    second that is reached. speed: factor on all rates of this machine. measured: task -> measured seconds at
    speed 1, which replace the modelled ones."""

    device: Device
    work: Workload
    achieved: float = 1.0
    speed: float = 1.0
    measured: Mapping[type[tasks.Task], float] = field(default_factory=dict)

    def seconds(self, stage: int, task: type[tasks.Task], members: int = 1) -> float:
        """Seconds of a task at a stage, measured or modelled: of one microbatch, or of one step for tasks of
        a step. members: replicas in the stage's reduce."""
        work = self.work
        if task in self.measured:
            return self.measured[task] / self.speed
        if task in OF_A_MICROBATCH:
            load = work.load(stage, task)
        else:
            load = work.step_load(stage, task, members)
        return self._seconds(load)

    def inner_s(self, steps: int, microbatches: int) -> float:
        """Seconds of `steps` inner steps of an island that holds the whole model, each on `microbatches`
        microbatches. They include the optimizer steps, and the copies of weights and moments to the device
        before and of the change back."""
        work = self.work
        loads = [*work.inner_loads(1, tasks.InnerForward).values()]
        loads += work.inner_loads(1, tasks.InnerBackward).values()
        each = microbatches * sum(map(self._seconds, loads))
        update = self.seconds(1, tasks.InnerStep)
        copied = work.parameters(1) * (STATE_BYTES + GRADIENT_BYTES)
        link = self.device.host_link_bytes_per_s
        return steps * (each + update) + (copied / link if link else 0.0)

    def inner_task_s(self, stage: int, task: type[tasks.Task]) -> float:
        """Seconds of a task on one microbatch of a pipeline island's inner step, measured or modelled."""
        return sum(
            self.measured[like] / self.speed if like in self.measured else self._seconds(load)
            for like, load in self.work.inner_loads(stage, task).items()
        )

    def slot_s(self, stage: int, task: type[tasks.Task]) -> float:
        """Seconds that the begin or end of a pipeline island's slot takes at a stage beside its microbatches,
        or the adding of its contribution. task: as of `Workload.slot_load`."""
        return self._seconds(self.work.slot_load(stage, task))

    def _seconds(self, load: TaskLoad) -> float:
        flops_per_s = self.device.flops_per_s(self.work.dtype) * self.achieved * self.speed
        return max(load.flops / flops_per_s, load.moved_bytes / (self.device.memory_bytes_per_s * self.speed))

    def microbatch_s(self, stage: int) -> float:
        """Seconds of all tasks of one microbatch at a stage, forward and backward; Recount, a task of
        repairs, is left out."""
        first = (tasks.Embed, tasks.Head) if stage == 0 else (tasks.Forward, tasks.InputGradient)
        return sum(self.seconds(stage, task) for task in (*first, tasks.WeightGradient))

    def capacity(self, stage: int, islands: int = 1, inputs: int = 0) -> int:
        """Number of microbatches whose activations (at stage 0: inputs) fit into memory at a stage, beside
        weights, moments, gradient sums and reduced gradient. 0 if these alone, or what the end of a pipeline
        island's slot needs, do not fit, or if the devices that hold a relay stage together are more than its
        blocks. Of several such devices, the one with most blocks counts. islands: pipeline islands that a
        relay is of at one time; of more than one, the number for each. inputs: microbatches of each island of
        which it keeps the input, too."""
        work, together = self.work, self.device.together if stage else 1
        blocks = work.blocks(stage) if stage else 1
        if blocks < together:
            return 0
        share = -(-blocks // together) / blocks
        # Embedding and head of a whole model are on the first device.
        ends, all_of_it = end_parameters(work.model) if work.whole else 0, max(1, work.parameters(stage))
        part = (ends + (all_of_it - ends) * share) / all_of_it if stage else 1.0
        memory_bytes = self.device.memory_bytes - work.fixed_bytes
        memory_bytes -= (islands - 1) * ISLAND_BYTES * work.parameters(stage) * part
        kept = inputs * work.input_bytes * share
        closing = memory_bytes - work.closing_bytes(stage) * part - (islands - 1) * kept
        if closing < 0:
            return 0
        left = memory_bytes - work.step_bytes(stage) * part - islands * kept
        each = max(1, work.kept_bytes(stage) * share if stage else work.input_bytes)
        # The others hold theirs while one ends its slot.
        fit = left // (each * islands), *([closing // (each * (islands - 1))] if islands > 1 else ())
        return max(0, int(min(fit)))


def shipped_devices() -> Mapping[str, Device]:
    """Device models that come with the package, by name."""
    text = resources.files("anabranch.sim.cluster").joinpath("devices.json").read_text("utf-8")
    return parse_devices(text, "devices.json")


def read_devices(path: Path) -> Mapping[str, Device]:
    """Device models of a JSON file, by name. Raises UserError, with the file and what is wrong, if it cannot
    be read or a key or figure is not allowed."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_devices(text, str(path))


class KnownDevices(dict[str, Device]):
    """Device models by name. A look-up of "2xNAME" to "8xNAME" makes the model of so many NAMEs in one
    machine that hold a stage together; iteration does not list these. Other unknown names raise KeyError."""

    def __missing__(self, name: str) -> Device:
        count, _, one = name.partition("x")
        if not re.fullmatch("[2-8]", count) or not dict.__contains__(self, one):
            raise KeyError(name)
        return msgspec.structs.replace(self[one], name=name, together=int(count))

    def __contains__(self, name: object) -> bool:
        try:
            return bool(self[str(name)])
        except KeyError:
            return False


def known_devices(more: str) -> Mapping[str, Device]:
    """Device models by name, of the package and of the file `more` ("": of none), which may replace some. A
    look-up, or `in`, also answers to "2xNAME" to "8xNAME" (`KnownDevices`). Raises UserError as
    `read_devices`."""
    return KnownDevices({**shipped_devices(), **(read_devices(Path(more)) if more else {})})


def parse_devices(text: str | bytes, where: str) -> Mapping[str, Device]:
    """Device models of a JSON text, by name. Raises UserError, whose message begins with `where`, for other
    text, keys or figures."""
    found, name = {}, ""
    try:
        for name, figures in msgspec.json.decode(text, type=dict[str, dict[str, Any]]).items():
            found[name] = msgspec.convert({**figures, "name": name}, Device)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: {name + ': ' if name else ''}{error}") from None
    return found
