"""A stage on several devices: where its tensors lie, and that no bit changes. The devices are parts of the host."""

from __future__ import annotations

import pytest

from anabranch.config import RunConfig
from support.small_training import SmallSwarm, small_run, with_section


def split(run: RunConfig, devices: str = "cpu:0,cpu:1") -> RunConfig:
    return with_section(run, "compute", device=devices)


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_steps_on_two_devices_have_the_bits_of_steps_on_one(architecture: str) -> None:
    run = small_run(architecture)
    one, two = SmallSwarm(run, 1), SmallSwarm(split(run), 2)
    for t in range(1, 4):
        expected, found = one.step(t), two.step(t)
        assert found == expected
