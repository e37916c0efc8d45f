"""The numerics class: equal for equal processes, different where bits may differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from anabranch.config import ComputeSection
from anabranch.train.numerics import numerics_class as numerics_class_module
from anabranch.train.numerics.numerics_class import configure, device_of, numerics_class

CPU = ComputeSection(device="cpu")


def in_another_process(threads: int) -> str:
    code = (
        "from anabranch.config import ComputeSection\n"
        "from anabranch.train.numerics.numerics_class import configure, numerics_class\n"
        f"configure({threads})\n"
        "print(numerics_class(ComputeSection(device='cpu'), 4, 128)[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return result.stdout.strip()


@pytest.mark.slow
def test_processes_configured_alike_are_of_one_class() -> None:
    here = numerics_class(CPU, 4, 128)[0]
    assert in_another_process(threads=1) == here
    torch.set_num_threads(2)
    try:
        assert numerics_class(CPU, 4, 128)[0] != here
    finally:
        torch.set_num_threads(1)


def test_shape_and_dtype_are_part_of_the_class() -> None:
    known, description = numerics_class(CPU, 4, 128)
    assert numerics_class(CPU, 4, 128) == (known, description)
    assert numerics_class(CPU, 8, 64)[0] != known
    assert numerics_class(ComputeSection(device="cpu", dtype="fp64"), 4, 128)[0] != known
    assert numerics_class(ComputeSection(device="cpu", dtype="bf16"), 4, 128)[0] != known
    assert description["torch"].startswith(torch.__version__)
    assert (description["threads"], description["deterministic"]) == ("1", "True")


def test_configure_sets_the_environment_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(variable, "")
    configure(1)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_auto_takes_an_accelerator_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_of(ComputeSection(device="auto")).type == expected
    assert device_of(CPU).type == "cpu"


def test_processors_of_two_makers_are_two_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL chooses kernels by the maker: an EPYC and a Xeon with AVX-512 and equal probes differed in the kept
    histories."""
    found = set()
    for maker in ("AuthenticAMD", "GenuineIntel"):
        monkeypatch.setattr(numerics_class_module, "_maker", str(maker).__str__)
        found.add(numerics_class(CPU, 1, 8)[0])
    assert len(found) == 2


def test_several_devices_are_of_the_class_of_one_if_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = numerics_class(CPU, 4, 128)[0]
    several = ComputeSection(device="cpu:0,cpu:1")
    assert numerics_class(several, 4, 128)[0] == alone

    def other(device: torch.device, *_: object) -> dict[str, str]:
        return {"accelerator": "Alpha" if device.index == 0 else "Beta"}

    monkeypatch.setattr(numerics_class_module, "_description", other)
    sizes = {0: 24, 1: 12}
    monkeypatch.setattr(numerics_class_module, "size_of", lambda device: sizes[device.index])
    first = numerics_class(ComputeSection(device="cpu:0"), 4, 128)[0]
    mixed, description = numerics_class(several, 4, 128)
    assert mixed not in (alone, first)
    assert "24 GiB" in description["devices"] and "Beta" in description["devices"]
    assert numerics_class(ComputeSection(device="cpu:1,cpu:0"), 4, 128)[0] != mixed, "other blocks on each"
    sizes[1] = 24
    assert numerics_class(several, 4, 128)[0] != mixed, "another division of the blocks"
