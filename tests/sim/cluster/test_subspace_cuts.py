"""Bytes of cuts of a subspace model, and of values in a codec, in a scenario."""

from __future__ import annotations

import pytest

from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.planning.runfile import run_config
from anabranch.sim.planning.search import named_fleet
from anabranch.train.model.sizes import model_config
from benchmarks.placement.plan import plans


def test_bytes_of_a_cut() -> None:
    dense = load_scenario("eight-homes").work
    assert dense.activation_bytes == dense.gradient_bytes == 4 * 1024 * 1024 * 2
    thin = load_scenario("eight-homes", {"model.subspace": 160}).work
    assert thin.gradient_bytes == 4 * 1024 * 160 * 2
    assert thin.activation_bytes - thin.gradient_bytes == 4 * 1024 * 4  # an id of 32,000: two bf16 values
    int8 = {"wire.activations": "int8", "wire.gradients": "int8"}
    both = load_scenario("eight-homes", {"model.subspace": 160, **int8}).work
    assert both.gradient_bytes == 4 * 1024 * 165
    assert both.activation_bytes - both.gradient_bytes == 4 * 1024 * 4


def test_a_thin_stage_computes_less_and_holds_the_fixed_embedding() -> None:
    dense, thin = (load_scenario("eight-homes", {"model.subspace": k}).work for k in (0, 160))
    assert thin.load(1, tasks.Forward).flops < dense.load(1, tasks.Forward).flops
    assert thin.parameters(1) < dense.parameters(1)
    assert (dense.fixed_bytes, thin.fixed_bytes) == (0, (32_000 + 160) * 1024 * 2)


def test_a_planned_run_has_the_subspace_of_its_scenario() -> None:
    homes = find_profile("homes")
    scenario = named_fleet(load_scenario("eight-homes", {"model.subspace": 160}), homes)
    config = run_config(plans(scenario, homes, [8])[0])
    model = model_config(config.model, 32_000)
    assert (config.compute.dtype, model.subspace, model.tied) == ("bf16", 160, False)


def test_a_subspace_as_wide_as_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.subspace = 1024: llama-350m has a width of 1024"):
        load_scenario("eight-homes", {"model.subspace": 1024})
