"""View of a run: follows from its events, is bounded, and is the same when they are played again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.observe import events as log
from anabranch.observe.metrics.prometheus import metrics_text
from anabranch.observe.view import peers, recording, run_view, time_series
from anabranch.observe.view.recording import Cursor, Recording
from anabranch.observe.view.run_view import View
from anabranch.observe.view.tracked_state import Patch, TrackedState, merge
from anabranch.observe.wording import plain
from anabranch.protocol.log.records import STRANDED
from support.run_events import begin, step, view_of


def story(view: View, subject: str = "") -> list[str]:
    return [str(line[3]) for line in view.story.items if subject in ("", line[1])]


def test_a_step_is_a_flow_from_data_node_to_data_node() -> None:
    view = view_of(step(1))
    key = view.peers.key
    assert view.state.get("flow", "")["hops"] == [
        [column, key(start), key(end), key(source), count]
        for column, start, end, source, count in (
            (0, "d0", "a", "d0", 2), (0, "d1", "b", "d1", 2),
            (1, "a", "x", "d0", 1), (1, "a", "y", "d0", 1), (1, "b", "x", "d1", 1), (1, "b", "y", "d1", 1),
            (2, "x", "d0", "d0", 1), (2, "x", "d1", "d1", 1),
            (2, "y", "d0", "d0", 1), (2, "y", "d1", "d1", 1),
        )
    ]  # fmt: skip
    assert [view.peers.get(peer)["share"] for peer in ("d0", "a", "x")] == [2, 2, 2]
    assert view.state.get("run", "")["t"] == 1 and view.state.get("run", "")["phase"] == "training"
    assert view.state.get("run", "")["eta_s"] == pytest.approx(4.5)


def test_audits_are_counted_and_wrong_work_is_told() -> None:
    view = view_of(step(1))
    for verdict in ("same", "same", "different", "unable"):
        what = "part 0 of the sum" if verdict == "different" else ""
        view.take(log.Audit(t=1, stage=1, subject="a", auditor="b", verdict=verdict, what=what))
    assert (view.peers.get("a")["right"], view.peers.get("a")["wrong"]) == (2, 1)
    assert story(view, "trouble")[-1] == (
        "name-b finds the work of name-a in Tokyo at stage 1 in step 1 different: part 0 of the sum"
    )
    view.take(log.Audit(t=1, stage=1, subject="stranger", auditor="b", verdict="same"))


def test_a_round_without_machines_is_not_told_as_an_overflow() -> None:
    view = view_of(step(1))
    view.take(log.Skip(peer="d0", t=2, stage=1, tensor=STRANDED, index=3))
    assert story(view, "trouble")[-1] == "round 2 was skipped: none of its slots had its machines any more"
    view.take(log.Skip(peer="d0", t=3, stage=1, tensor="activation", index=3))
    assert "activation of microbatch 3 at stage 1 was not finite" in story(view, "trouble")[-1]


def test_a_crash_is_seen_at_once_and_told_with_who_redid_the_work() -> None:
    view = view_of(step(1))
    repair = log.Repair(
        time=104.0,
        peer="d0",
        t=2,
        index=1,
        stage=1,
        dead="a",
        replacement="",
        reason="forward: the link broke",
    )
    view.take(repair)
    assert view.peers.get("a")["state"] == "lost"
    view.take(log.PeerRemoved(time=104.5, peer="d0", subject="a", stage=1, reason="Connection refused"))
    assert view.peers.get("a")["state"] == "crashed" and view.peers.present(1) == 1
    view.take(step(2, first="bbbb", alive=[2, 1, 2]))
    assert story(view, "trouble") == [
        "name-a in Tokyo stopped answering name-d0; its work at stage 1 goes to others",
        "name-a in Tokyo is gone from stage 1 (Connection refused); 1 replica of stage 1 is left",
    ]
    assert story(view, "repair") == [
        "1 microbatch of name-a in Tokyo at stage 1 was redone by name-b; step 2 lost nothing"
    ]
    assert view.state.get("totals", "")["repairs"] == 1 and view.state.get("totals", "")["removals"] == 1
    assert view.peers.get("a")["share"] == 0 and view.peers.get("b")["share"] == 4


def test_leaving_is_no_crash() -> None:
    view = view_of(
        log.PeerRemoved(time=104.0, peer="d0", subject="a", stage=1, reason="left: stopped by its user"),
        log.PeerRemoved(
            time=104.0, peer="d0", subject="x", stage=2, reason="moves to stage 1, which is short"
        ),
    )
    assert [view.peers.get(peer)["state"] for peer in "ax"] == ["left", "moved"]
    assert not story(view, "trouble") and view.state.get("totals", "")["removals"] == 0


def test_a_suspicion_lasts_until_all_who_had_it_are_refuted() -> None:
    view = view_of(
        log.Suspected(time=104.0, peer="x", subject="a", reason="silent"),
        log.Suspected(time=104.0, peer="y", subject="a", reason="silent"),
        log.Suspected(time=105.0, peer="x", subject="a", reason="heard", verdict="refuted"),
    )
    assert view.peers.get("a")["state"] == "suspect" and view.peers.get("a")["why"] == "name-y says: silent"
    view.take(log.Suspected(time=106.0, peer="y", subject="a", reason="heard", verdict="refuted"))
    assert view.peers.get("a")["state"] == "active"


def test_what_was_rolled_back_or_taken_again_counts_once() -> None:
    view = view_of(
        step(1), step(2), step(3), log.Rollback(time=110.0, peer="d0", t=1), step(2, "bbbb", time=111.0)
    )
    assert view.peers.get("a")["total"] == 2 and view.peers.get("b")["total"] == 6
    again = view_of(step(1), step(2), step(1, time=110.0), step(2, time=111.0))
    assert again.peers.get("a")["total"] == 4


def test_an_iteration_is_split_as_the_relays_measured_it() -> None:
    def timing(peer: str, stage: int, compute: float) -> log.Timing:
        return log.Timing(
            time=103.5,
            peer=peer,
            t=1,
            stage=stage,
            forward_s=compute,
            span_s=1.0,
            reducing_s=0.1,
            transfer_s=0.2,
        )

    view = view_of(step(1), timing("a", 1, 0.3), timing("x", 2, 0.5), timing("d0", 0, 0.9))
    split = dict(zip(time_series.STEP_COLUMNS, view.steps.items[-1], strict=True))
    parts = [split[name] for name in ("compute", "transfer", "reduce", "waiting")]
    assert parts == pytest.approx([0.4, 0.2, 0.1, 0.3])
    assert view.peers.get("x")["busy"] == 0.5


def test_vitals_show_speed_and_round_trips_to_known_peers() -> None:
    view = view_of(
        log.Vitals(
            peer="a", stage=1, capacity=8, forward_s=0.02, backward_s=0.03, trips={"x": 0.004, "?": 1.0}
        ),
        log.Double(peer="a", t=1, stage=1, unit=0, kept="", subtracted="a"),
    )
    node = view.peers.get("a")
    assert node["trips"] == {view.peers.key("x"): 4.0} and node["forward_s"] == 0.02
    assert view.state.get("totals", "")["wasted_s"] == pytest.approx(0.05)


def test_a_peer_has_no_seconds_per_microbatch_before_its_vitals() -> None:
    """The seconds with which it joined are of one block."""
    vitals = log.Vitals(peer="a", stage=1, capacity=8, forward_s=0.02, backward_s=0.03)
    joined = log.PeerJoined(
        peer="d0", subject="a", name="a", region="", role="relay", stage=2, numerics_class="n",
        capacity=8, forward_s=0.007,
    )  # fmt: skip
    view = view_of(vitals, joined, log.Double(peer="a", t=1, stage=2, unit=0, kept="", subtracted="a"))
    node = view.peers.get("a")
    assert (node["forward_s"], node["backward_s"]) == (0.0, 0.0)
    assert view.state.get("totals", "").get("wasted_s", 0.0) == 0.0


def test_vitals_show_the_way_of_links_that_are_not_direct() -> None:
    view = view_of(log.Vitals(peer="a", stage=1, ways={"x": "d0", "d0": "punched", "?": "relayed"}))
    key = view.peers.key
    assert view.peers.get("a")["ways"] == {key("x"): key("d0"), key("d0"): "punched"}
    text = metrics_text(view)
    assert 'anabranch_indirect_links{way="carried"} 1' in text
    assert 'anabranch_indirect_links{way="punched"} 1' in text


def test_words_of_strangers_are_made_plain() -> None:
    assert plain("a\u202eb\x1b[31m\nc\u200b d") == "ab[31m c d"
    assert (
        plain("<script>alert(1)</script>") == "<script>alert(1)</script>"
    )  # text is only ever shown as text
    assert len(plain("x" * 10**6)) == 400 and plain("e" + "\u0301" * 50) == "e\u0301\u0301"
    name = "\ud83d".encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert plain(name + "\udcff") == name


def test_events_of_any_shape_are_folded_without_an_error() -> None:
    strange: list[log.Event] = [
        log.PeerActive(subject="nobody", stage=-5, from_iteration=1 << 60),
        log.PeerRemoved(subject="unheard", stage=-1, reason=""),
        log.Repair(t=-1, index=-1, stage=99, dead="", replacement="", reason=""),
        log.Suspected(subject="", reason="", verdict="?"),
        log.Timing(peer="unheard", t=0, stage=1, span_s=-1.0, forward_s=-5.0),
        step(3, seconds=0.0, loss=None, grad_norm=None, owners={5: {3: "z"}, 0: {1: "z"}}),
        log.Rollback(t=-9),
        log.Evaluation(time=1e300, t=1, loss=None, bits_per_byte=None, tokens=0),
    ]
    view = view_of(*strange)
    view.take(log.Unknown(kind="future", time=0.0, peer="", version=9, fields={}))
    msgspec.json.encode(view.state.sections)
    assert view.time < 1e11


def test_the_story_is_in_the_order_of_its_times_whatever_clocks_strangers_have() -> None:
    """The page searches the lines by time: those of a clock that lags would hide what lies around them."""
    late = [log.Note(time=at, peer="a", text="x") for at in (104.0, -1e300, 5.0, 1e12, 103.0)]
    view = view_of(step(1), *late, step(2, time=110.0), log.Rollback(time=111.0, t=1))
    times = [line[0] for line in view.story.items]
    assert times == sorted(times) and times[-1] == 111.0


def test_a_long_run_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, most in (
        (recording, "FRAMES_MAX", 40), (peers, "NODES_MAX", 20),
        (run_view, "STEPS_MAX", 50), (run_view, "STORY_MAX", 400),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, most)
    kept = Recording()
    for event in begin():
        kept.take(event)
    for t in range(1, 600):
        kept.take(step(t, time=200.0 + t))
        kept.take(log.PeerJoined(time=200.5 + t, subject=f"p{t}", name="p", region="", role="relay", stage=1,
                                 numerics_class=""))  # fmt: skip
        kept.take(log.PeerRemoved(time=200.6 + t, subject=f"p{t}", stage=1, reason="gone"))
    kept.cut()
    assert len(kept.frames) <= 40 and len(kept.view.state.sections["nodes"]) <= 300
    assert len(kept.view.steps.items) <= 50 and len(kept.view.story.items) <= 400
    assert kept.view.steps.items[-1][1] == 599 and kept.view.peers.get("a")["total"] == 2 * 599
    assert replayed(kept.document()) == kept.view.state.sections


def apply(state: dict[str, Any], patch: Patch) -> None:
    """Bring a state up to date, as the page does."""
    for section, records in patch.items():
        into = state.setdefault(section, {})
        for key, fields in records.items():
            if fields is None:
                into.pop(key, None)
            else:
                into.setdefault(key, {}).update(fields)


def replayed(document: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _, patch in plainly(document)["frames"]:
        apply(state, patch)
    return state


def plainly(document: dict[str, Any]) -> Any:
    """As a browser reads it."""
    return msgspec.json.decode(msgspec.json.encode(document))


def test_a_reader_who_comes_back_now_and_then_has_it_all() -> None:
    kept = Recording()
    state: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {name: [] for name in recording.LISTS}
    cursor = Cursor()
    events = [*begin(), *(step(t, time=110.0 + t) for t in range(1, 40))]
    for at, event in enumerate(events):
        kept.take(event)
        if isinstance(event, log.Step):
            kept.take(log.Timing(time=event.time, peer="a", t=event.t, stage=1, forward_s=0.1, span_s=0.5))
        if at % 7 == 0 or event is events[-1]:
            kept.cut()
            new, cursor = kept.since(cursor)
            for _, patch in plainly(new)["frames"]:
                apply(state, patch)
            for name, items in lists.items():
                if name in new:
                    items[new[name][0] :] = new[name][1]
    assert state == kept.view.state.sections
    assert lists == {"steps": kept.view.steps.items, "held_out": [], "story": kept.view.story.items}
    again, same = kept.since(cursor)
    assert same == cursor and not again["frames"] and "steps" not in again


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("kl"), st.integers(0, 3), st.booleans())))
def test_patches_together_do_what_they_do_one_by_one(writes: list[tuple[str, str, int, bool]]) -> None:
    board, patches = TrackedState(), []
    for section, key, value, keep in writes:
        if keep:
            board.set(section, key, v=value)
        else:
            board.drop(section, key)
        patches.append(board.take_patch())
    one_by_one: dict[str, Any] = {}
    together: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for patch in patches:
        apply(one_by_one, patch)
        whole = merge(whole, patch)
    apply(together, whole)
    assert one_by_one == {section: board.sections.get(section, {}) for section in one_by_one}
    assert {s: r for s, r in together.items() if r} == {s: r for s, r in one_by_one.items() if r}


@pytest.mark.parametrize("host", ["203.0.113.7", "[2001:db8::7]"])
def test_who_was_turned_away_at_the_door_is_told_without_its_address(host: str) -> None:
    why = f"a connection from {host}: it speaks no TLS 1.3"
    view = view_of(log.Refused(time=103.0, peer="b", subject="", reason=why, count=1))
    text = "name-b says that it refused a connection from its address: it speaks no TLS 1.3"
    assert story(view, "trouble") == [text]


def test_what_was_refused_is_told_without_the_name_of_a_message() -> None:
    why = "JoinRequest: there is no stage 9; stages are 0 to 2"
    view = view_of(log.Refused(time=103.0, peer="b", subject="a", reason=why, count=1))
    text = "name-b says that it refused name-a in Tokyo: there is no stage 9; stages are 0 to 2"
    assert story(view, "trouble") == [text]


def test_a_step_that_was_learnt_of_late_has_no_rate_and_does_not_move_the_time_to_go() -> None:
    """A returning founder reads many entries at once: seconds 0 says that nobody here timed them."""
    view = view_of(*(step(t) for t in range(1, 5)), *(step(t, seconds=0.0) for t in range(5, 8)))
    last = dict(zip(time_series.STEP_COLUMNS, view.steps.items[-1], strict=True))
    assert last["tps"] is None and last["seconds"] is None and last["learning"] == 0.1
    assert view.state.get("run", "")["eta_s"] == pytest.approx(3 * 0.5)


def test_one_long_step_hardly_moves_the_time_to_go() -> None:
    """Such as the first one after hours without peers."""
    view = view_of(*(step(t) for t in range(1, 5)), step(5, seconds=36_000.0))
    assert view.state.get("run", "")["eta_s"] < 5 * 2 * 0.5


def test_ordinary_waiting_is_no_trouble() -> None:
    waits = "waiting for peers of stage 1 (0 of 2)"
    view = view_of(log.Waiting(time=103.0, peer="d0", reason=waits))
    assert waits in story(view, "note") and not story(view, "trouble")
    view.take(step(1))
    view.take(log.Waiting(time=200.0, peer="d0", reason="waiting for a majority of the voters"))
    assert story(view, "trouble") == ["waiting for a majority of the voters"]
    ready = "0123abcd is ready, but cannot reach 89abcdef of its stage to reduce with"
    view.take(log.Waiting(time=300.0, peer="d0", reason=ready))
    assert ready in story(view, "note")


def test_ids_in_reasons_are_told_as_names() -> None:
    joined = log.PeerJoined(
        time=103.0, peer="d0", subject="0123abcd" + "0" * 56, name="ada", region="", role="relay", stage=1,
        numerics_class="n", capacity=8,
    )  # fmt: skip
    text = "iteration 51 goes on without 0123abcd of stage 1, not heard: 6 units go to others; 89abcdef stays"
    view = view_of(joined, log.Note(time=104.0, peer="d0", text=text))
    assert "goes on without ada of stage 1" in story(view)[-1] and "89abcdef stays" in story(view)[-1]


def test_a_replica_that_only_joins_is_none_that_is_left() -> None:
    joined = log.PeerJoined(
        time=103.0, peer="d0", subject="c", name="new", region="", role="relay", stage=1, numerics_class="n",
        capacity=8,
    )  # fmt: skip
    gone = [
        log.PeerRemoved(time=104.0 + n, peer="d0", subject=peer, stage=1, reason="silent")
        for n, peer in enumerate("ab")
    ]
    view = view_of(joined, *gone)
    assert story(view, "trouble")[0].endswith("; 1 replica of stage 1 is left")
    assert story(view, "trouble")[1].endswith("; no replica of stage 1 is left")


def test_a_founder_speaks_without_an_id_before_it_has_joined() -> None:
    view = View()
    view.take(begin()[0])
    view.take(log.Note(time=100.5, peer="d0", text="the run goes on from the checkpoint of step 5"))
    assert story(view)[-1] == "the run goes on from the checkpoint of step 5"
