"""Snapshots of a stage: round trip, and refusal of anything damaged or foreign."""

from __future__ import annotations

import json
import pickle
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from anabranch.train.model.layout import Layout
from anabranch.train.stage.state import Ahead, SnapshotError, StageState, parse_snapshot

CPU = torch.device("cpu")
LAYOUT = Layout({"w": (4, 3), "b": (5,)})


def state_of(layout: Layout = LAYOUT, dtype: torch.dtype = torch.float32) -> StageState:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(layout.elements, generator=generator).to(dtype) for _ in range(3)]
    return StageState(layout, *vectors, t=9, adam_step=8)  # type: ignore[misc]


def parse(data: bytes, layout: Layout = LAYOUT, dtype: torch.dtype = torch.float32) -> StageState:
    return parse_snapshot(data, layout, dtype, CPU)


def test_round_trip() -> None:
    state = state_of()
    again = parse(state.to_bytes())
    assert again.fingerprint() == state.fingerprint()
    assert (again.t, again.adam_step) == (9, 8)


def test_the_fingerprint_sees_weights_moments_counter_and_not_the_iteration() -> None:
    known = state_of().fingerprint()
    for vector in ("weights", "exp_avg", "exp_avg_sq"):
        state = state_of()
        getattr(state, vector)[-1] += 1e-6
        assert state.fingerprint() != known
    state = state_of()
    state.adam_step = 7
    assert state.fingerprint() != known
    state = state_of()
    state.t = 30
    assert state.fingerprint() == known


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_truncated(keep: int) -> None:
    with pytest.raises(SnapshotError, match=r"^the snapshot"):
        parse(state_of().to_bytes()[:keep])


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        ({"w": (4, 3), "b": (5,), "c": (1,)}, torch.float32, "lacks weights of c"),
        ({"w": (3, 4), "b": (5,)}, torch.float32, r"weights of w is .*\(4, 3\), not .*\(3, 4\)"),
        ({"w": (4, 3), "b": (5,)}, torch.float64, "not torch.float64"),
        ({"b": (5,)}, torch.float32, "which this stage does not have"),
    ],
)
def test_another_model_stage_or_dtype(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(SnapshotError, match=message):
        parse(state_of().to_bytes(), Layout(shapes), dtype)


def test_a_pickle_is_not_executed_and_foreign_files_are_refused() -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('executed')",)

    for data in (pickle.dumps(Trap()), b"\xff" * 100, save({"w": torch.zeros(2)})):
        with pytest.raises(SnapshotError):
            parse(data)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"format": "other"}, {"t": "x"}, {"t": "1"}, {"adam_step": "-1"}, {"t": "9" * 5000}],
)
def test_counters_that_make_no_sense(metadata: dict[str, str]) -> None:
    state = state_of()
    good = {"format": "anabranch-stage-1", "t": "9", "adam_step": "8"}
    data = save(state.tensors(), {**good, **metadata} if metadata else None)
    with pytest.raises(SnapshotError):
        parse(data)
    assert parse(save(state.tensors(), good)).t == 9


def test_a_deeply_nested_header_is_refused() -> None:
    header = b"[" * 100_000
    with pytest.raises(SnapshotError):
        parse(len(header).to_bytes(8, "little") + header)


def test_a_counter_beyond_all_numbers_is_refused() -> None:
    """1e999 is read as infinity, of which there is no integer."""
    header = b'{"__metadata__":{"format":"anabranch-stage-1","t":"3","adam_step":1e999}}'
    with pytest.raises(SnapshotError, match="cannot be read"):
        parse(len(header).to_bytes(8, "little") + header)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_damage_is_refused_or_changes_the_fingerprint(at: int, junk: bytes) -> None:
    state = state_of()
    data = bytearray(state.to_bytes())
    at = min(at, len(data) - len(junk))
    if bytes(data[at : at + len(junk)]) == junk:
        return
    data[at : at + len(junk)] = junk
    header_end = 8 + int.from_bytes(state.to_bytes()[:8], "little")
    try:
        damaged = parse(bytes(data))
    except SnapshotError:
        return
    if at >= header_end:
        assert damaged.fingerprint() != state.fingerprint()


def test_the_format_is_plain_safetensors_with_counters() -> None:
    data = state_of().to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "anabranch-stage-1", "t": "9", "adam_step": "8"}
    assert set(header) - {"__metadata__"} == {
        f"{kind}/{name}" for kind in ("weights", "exp_avg", "exp_avg_sq") for name in ("w", "b")
    }


def test_the_header_of_a_snapshot_has_one_order() -> None:
    """The library writes the metadata in any order."""
    data = state_of().to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header) == sorted(header)
    assert list(header["__metadata__"]) == ["adam_step", "format", "t"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_are_the_librarys_file_with_a_sorted_header(dtype: torch.dtype) -> None:
    state = state_of(Layout({"w": (4, 3), "b": (5,), 'é"': (1,), "none": (0, 2)}), dtype)
    state.rate, state.corrections = 0.5, (0.1, 0.2)
    state.ahead = Ahead(state.weights + 1.0, torch.arange(7, dtype=torch.int32))
    metadata = {"format": "anabranch-stage-1", "t": "9", "adam_step": "8"}
    metadata["last_step"] = " ".join(value.hex() for value in (0.5, 0.1, 0.2))
    tensors = {**state.tensors(), "ahead_units": torch.arange(7, dtype=torch.int32)}
    library = save(tensors, metadata)
    size = int.from_bytes(library[:8], "little")
    header = json.dumps(json.loads(library[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    padded = header.ljust(-(-len(header) // 8) * 8)
    expected = len(padded).to_bytes(8, "little") + padded + library[8 + size :]
    assert state.to_bytes() == expected
    assert b"".join(bytes(piece.numpy()) for piece in state.pieces()) == expected


def test_pieces_are_made_by_torch_which_does_not_stop_other_threads() -> None:
    """A copy of a large state by Python itself, as bytes, stops all threads of its process meanwhile: the
    heartbeats of a machine with 24 million parameters and a fifth of a core did not come for eight
    seconds."""
    layout = Layout({"w": (1 << 20,)})
    state = StageState.initial(layout, torch.zeros(layout.elements))
    tracemalloc.start()
    try:
        state.pieces()
        assert tracemalloc.get_traced_memory()[1] < layout.elements
    finally:
        tracemalloc.stop()
