"""Memory that a relay of two pipeline islands takes, as torch counts it, beside what it says to have for
them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from anabranch.protocol.interface import tasks
from anabranch.train.workers import machine_capacity
from anabranch.train.workers.workers import make_worker
from support.small_islands import first_round, island_run
from support.small_training import done, small_model, with_section

CAPACITY, ROWS = 4, 32


@pytest.mark.soak
def test_a_machine_that_can_hold_two_islands_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are open with all their microbatches under way, compute some forwards again, and close."""
    run = with_section(island_run(late="drop"), "batch", microbatches=2 * CAPACITY, rows=ROWS)
    run = with_section(run, "model", dim=128, ffn=384)
    model, slots = small_model(run), (0, 1)
    monkeypatch.setattr(machine_capacity, "free_memory_bytes", lambda: 1 << 50)
    kept = CAPACITY // 2

    def holds(most: int) -> bool:
        return machine_capacity.shared_capacity(run, model, CAPACITY, most) >= kept

    least, most = 0, 1 << 32
    while least + 1 < most:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    values = torch.zeros(ROWS, run.batch.sequence, model.dim)
    byte = torch.zeros(1, dtype=torch.uint8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        worker, t = make_worker(run, model, 1), first_round(run)
        done(worker.run(tasks.InitState(0)))
        for skipped in range(1, t):
            done(worker.run(tasks.Skip(skipped)))
        for slot in slots:
            done(worker.run(tasks.Forward(t, slot, True, True, 1), (byte,)))
            for number in range(CAPACITY):
                forward = tasks.InnerForward(t, slot, 1, number, number < kept)
                done(worker.run(forward, (values.clone(),)))
        for number in range(CAPACITY):
            for slot in slots:
                backward = tasks.InnerBackward(t, slot, 1, number, number >= kept)
                done(worker.run(backward, (values.clone(),)))
        for slot in slots:
            done(worker.run(tasks.InnerStep(t, slot, 1)))
            done(worker.run(tasks.InputGradient(t, slot), (byte,)))
            done(worker.run(tasks.WeightGradient(t, slot)))
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert 0.7 * most < peak <= most, (peak, most)
