"""Tokens per second and MFU of one stage on a device, and the cost of the proof, beside plain PyTorch.

    python -m benchmarks.overhead.stage_gpu [--device cuda] [--dtype bf16] [--peak-tflops 165]

One stage of llama blocks takes whole steps, nothing crosses a network. Plain PyTorch: the same blocks by
autograd, gradients accumulated in the compute dtype, `torch.optim.AdamW`. Ours: input gradient first, weight
gradients later, exact sums, sums of squares, digest, our AdamW, fingerprint. On CUDA the parts are timed on
the wall with the device synchronised before and after, on a CPU by the thread's CPU time. `--device cpu` with
small shapes checks the program; what it prints says nothing about accelerators.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from anabranch.train.numerics.numerics_class import configure
from benchmarks import harness

configure(1)  # before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from anabranch.config import OptimizerSection, PipelineSection  # noqa: E402
from anabranch.train.model.interface import (  # noqa: E402
    DTYPES,
    INITIAL_STD,
    Model,
    build,
    initial_weights,
    stage_layout,
)
from anabranch.train.model.linear import PlainWeights  # noqa: E402
from anabranch.train.model.partition import partition  # noqa: E402
from anabranch.train.model.sizes import ModelConfig, block_flops  # noqa: E402
from anabranch.train.numerics import exact  # noqa: E402
from anabranch.train.stage.optimizer import StepScalars, adamw  # noqa: E402
from anabranch.train.stage.run_objects import working_weights  # noqa: E402
from anabranch.train.stage.stage import Stage  # noqa: E402
from anabranch.train.stage.state import StageState  # noqa: E402

SCALARS = StepScalars(1e-4, 1.0, 0.1, 0.05)
#: Parts that exist for the proof, and would not be in an ordinary trainer.
PROOF = ("exact sums", "sums to the host", "round the sums", "digest", "fingerprint")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shape:
    """Shape of the stage and its step."""

    dim: int
    ffn: int
    heads: int
    blocks: int
    rows: int
    sequence: int
    microbatches: int
    subspace: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence * self.microbatches

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            "llama", self.dim, self.blocks, self.heads, self.heads, self.ffn, 512, self.sequence,
            tied=False, subspace=self.subspace,
        )  # fmt: skip

    @property
    def flops(self) -> float:
        """Floating-point operations of a step: forward, and twice as many backward."""
        return 3.0 * self.tokens * self.blocks * block_flops(self.model, self.sequence)


class Parts:
    """Seconds of the parts of a step, over the steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []

    def begin_step(self) -> None:
        self.steps.append(defaultdict(float))

    def take(self, name: str, work: Callable[[], _T]) -> _T:
        begin = self._now()
        result = work()
        self.steps[-1][name] += self._now() - begin
        return result

    def seconds(self, *names: str) -> float:
        """Median over the steps but the first of the sum of these parts; of all parts without a name."""
        counted = self.steps[1:] or self.steps
        return statistics.median(sum(step[name] for name in names or step) for step in counted)

    def _now(self) -> float:
        if self.device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Bench:
    """A stage on a device, and its inputs."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.model: Model = build(shape.model, device, dtype)
        self.spec = partition(shape.model, PipelineSection(stages=1))[1]
        self.layout = stage_layout(self.model, self.spec)
        flat = initial_weights(self.model, self.layout, 1, torch.float32, INITIAL_STD)
        self.flat = flat.to(device)
        generator = torch.Generator().manual_seed(1)
        size, stream = (shape.rows, shape.sequence), self.model.stream
        self.x = torch.zeros(*size, stream.columns)
        stream.values(self.x).normal_(generator=generator)
        self.dy = torch.randn(*size, stream.width, generator=generator) * 1e-5
        self.x, self.dy = self.x.to(dtype).to(device), self.dy.to(dtype).to(device)

    def plain(self, steps: int) -> Parts:
        """Steps by autograd and torch's own AdamW."""
        parts = Parts(self.device)
        weights = {name: view.clone().to(self.dtype) for name, view in self.layout.views(self.flat)}
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        optimizer = torch.optim.AdamW(leaves.values(), lr=1e-4)
        for _ in range(steps):
            parts.begin_step()
            for _ in range(self.shape.microbatches):
                x = self.x.clone().requires_grad_()
                y = parts.take("forward", lambda x=x: self._blocks(leaves, x))  # type: ignore[misc]
                values = self.model.stream.values(y)
                parts.take("backward", lambda values=values: values.backward(self.dy))  # type: ignore[misc]
            parts.take("optimizer", optimizer.step)
            optimizer.zero_grad()
        return parts

    def _blocks(self, leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        weights = PlainWeights(leaves)
        for block in self.spec.blocks:
            x = self.model.block(weights, block, x)
        return x

    def ours(self, steps: int) -> Parts:
        """Steps as a peer takes them."""
        parts, layout = Parts(self.device), self.layout
        state = StageState.initial(layout, self.flat.clone())
        contributions = dict.fromkeys(layout.names, self.shape.microbatches)
        sums = exact.ExactAccumulator(layout, contributions, torch.float32, self.device)
        weights: dict[str, Tensor] = working_weights(state, self.dtype)
        stage = Stage(self.model, self.spec, weights, _Timed(sums, parts))
        for _ in range(steps):
            parts.begin_step()
            for index in range(self.shape.microbatches):
                parts.take("forward", lambda index=index: stage.forward(index, self.x))  # type: ignore[misc]
                parts.take("input gradient", lambda index=index: stage.input_gradient(index, self.dy))  # type: ignore[misc]
                before = parts.steps[-1]["exact sums"]
                parts.take("weight gradients", lambda index=index: stage.weight_gradient(index))  # type: ignore[misc]
                parts.steps[-1]["weight gradients"] -= parts.steps[-1]["exact sums"] - before
            (host,) = parts.take("sums to the host", lambda: exact.cut(sums.flat, 1))
            whole = parts.take("round the sums", lambda host=host: exact.reduced(host, torch.float32))  # type: ignore[misc]
            gradient = parts.take("gradient to the device", lambda whole=whole: whole.to(self.device))  # type: ignore[misc]
            parts.take("sums of squares", lambda gradient=gradient: exact.squares(layout, gradient))  # type: ignore[misc]
            parts.take("digest", lambda whole=whole: exact.digest(layout, whole))  # type: ignore[misc]
            parts.take("optimizer", lambda g=gradient: adamw(state, g, SCALARS, OptimizerSection()))  # type: ignore[misc]
            parts.take("fingerprint", state.fingerprint)
            weights.update(working_weights(state, self.dtype))
            stage.clear()
        return parts


class _Timed:
    """Accumulator whose additions are timed apart."""

    def __init__(self, inner: exact.ExactAccumulator, parts: Parts) -> None:
        self.inner, self.parts, self.flat = inner, parts, inner.flat

    def add(self, name: str, gradient: Tensor, sign: int = 1) -> None:
        self.parts.take("exact sums", lambda: self.inner.add(name, gradient, sign))

    def add_rows(self, name: str, rows: Tensor, gradient: Tensor, sign: int = 1) -> None:
        self.inner.add_rows(name, rows, gradient, sign)

    def clear(self) -> None:
        self.inner.clear()


def measure(
    shape: Shape, device: torch.device, dtype: torch.dtype, steps: int, peak_flops: float = 0.0
) -> dict[str, Any]:
    """Figures of both sides. peak_flops: of the device, per second; 0 leaves the MFU out."""
    bench = Bench(shape, device, dtype)
    sides = {"plain": bench.plain(steps), "ours": bench.ours(steps)}
    figures: dict[str, Any] = {"elements": bench.layout.elements}
    for name, parts in sides.items():
        seconds = parts.seconds()
        figures[name] = {
            "step_s": seconds,
            "tokens_per_s": shape.tokens / seconds,
            "mfu": shape.flops / seconds / peak_flops if peak_flops else None,
            "parts_s": {part: parts.seconds(part) for part in parts.steps[-1]},
        }
    figures["proof_share"] = sides["ours"].seconds(*PROOF) / sides["ours"].seconds()
    return figures


def body_of(figures: dict[str, Any], shape: Shape, where: str) -> str:
    """Markdown of the result."""
    rows = []
    for side in ("plain", "ours"):
        one = figures[side]
        mfu = "not known" if one["mfu"] is None else f"{one['mfu']:.1%}"
        rows.append([
            {"plain": "plain PyTorch", "ours": "anabranch"}[side],
            f"{one['step_s'] * 1e3:,.0f}", f"{one['tokens_per_s']:,.0f}", mfu,
        ])  # fmt: skip
    parts = [
        [part, f"{seconds * 1e3:,.1f}", "proof" if part in PROOF else ""]
        for part, seconds in figures["ours"]["parts_s"].items()
    ]
    return (
        f"{where}: {shape.blocks} llama blocks of width {shape.dim}, {figures['elements'] / 1e6:.1f} M "
        f"parameters, {shape.microbatches} microbatches of {shape.rows} x {shape.sequence} tokens a step. "
        f"The proof takes {figures['proof_share']:.1%} of a step.\n\n"
        f"{harness.table(['side', 'ms a step', 'tokens/s', 'MFU'], rows)}\n\n"
        f"{harness.table(['part of a step of anabranch', 'ms', ''], parts)}"
    )


def main() -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=list(DTYPES), help="default: bf16 on CUDA, else fp32")
    add("--peak-tflops", type=float, default=0.0, help="dense peak of the device in that dtype, for the MFU")
    add("--steps", type=int, default=6, help="steps of each side; the first does not count")
    add("--dim", type=int, help="width (default: 2048 on CUDA, else 256)")
    add("--blocks", type=int, help="blocks (default: 4 on CUDA, else 2)")
    add("--subspace", type=int, default=0, help="model.subspace")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    dim = args.dim or (2048 if cuda else 256)
    rows, sequence, microbatches = (4, 2048, 16) if cuda else (2, 128, 4)
    shape = Shape(dim, dim * 11 // 4, max(1, dim // 64), args.blocks or (4 if cuda else 2), rows, sequence,
                  microbatches, args.subspace)  # fmt: skip
    dtype = args.dtype or ("bf16" if cuda else "fp32")
    figures = measure(shape, device, DTYPES[dtype], args.steps, args.peak_tflops * 1e12)
    name = torch.cuda.get_device_name(device) if cuda else "CPU, one thread, CPU seconds"
    where = f"{name}, {dtype}" if cuda else f"Accelerators: not measured. {name}, {dtype}"
    value = f"{figures['proof_share']:.1%}" if cuda else "not measured"
    goals = [harness.goal("cost of the proof on an accelerator, share of a step", "said", value, None)]
    harness.write("stage-gpu", "One stage on an accelerator", body_of(figures, shape, where),
                  goals=goals, data=figures, dry=args.dry)  # fmt: skip


if __name__ == "__main__":
    main()
