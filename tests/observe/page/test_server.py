"""The page's server shows what it has to whom it may, and nothing else; the report holds all in one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from anabranch.errors import UserError
from anabranch.observe import events as log
from anabranch.observe.event_log import EventLog, read_events
from anabranch.observe.metrics.prometheus import METRICS
from anabranch.observe.page.html_report import report_html
from anabranch.observe.page.page_thread import PageThread
from anabranch.observe.page.server import CONNECTIONS_MAX, HEAD_MAX
from anabranch.observe.page.static_files import MODULES, joined_script, served, text_of
from anabranch.observe.view.recording import Recording
from support.run_events import begin, step

HOSTILE = "</script><img src=x onerror=alert(1)>"


@contextmanager
def page_of(events: Path, **options: Any) -> Iterator[tuple[str, int, str]]:
    """Host, port and fragment of a served page."""
    page = PageThread(events, **options)
    parts = urlsplit(page.start())
    try:
        yield str(parts.hostname), int(parts.port or 0), parts.fragment
    finally:
        page.close()


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        for event in [*begin(), step(1)]:
            file.write(event)
    return path


def get(
    host: str, port: int, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """The answer; what follows its head is not read yet."""
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse()


def messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Server-sent events, as they come."""
    while line := answer.readline():
        event, data = line.decode().strip(), answer.readline().decode()
        assert answer.readline() == b"\n"
        yield event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_page_and_its_files_come_with_a_strict_policy(events: Path) -> None:
    with page_of(events) as (host, port, _):
        assert host == "127.0.0.1"
        for path in ["/", *served()]:
            answer = get(host, port, path)
            assert answer.status == 200 and answer.read()
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert get(host, port, "/../../etc/passwd").status == 404
        assert get(host, port, "/tickets.json").status == 404
        assert get(host, port, "/stream", "POST").status == 405


def test_the_page_shows_loss_rate_and_gradient_norm(events: Path) -> None:
    with page_of(events) as (host, port, _):
        markup, program = (get(host, port, path).read().decode() for path in ("/", "/numbers.js"))
    for chart in ("chart-loss", "chart-learning", "chart-norm"):
        assert f'id="{chart}"' in markup and chart in program, "a place for it, and a program that draws it"


def test_the_stream_begins_with_all_and_goes_on_with_what_is_new(events: Path) -> None:
    with page_of(events) as (host, port, _), closing(get(host, port, "/stream")) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        stream = messages(answer)
        steps: list[Any] = []
        for number in range(200):
            event, message = next(stream)
            assert event == ("all" if number == 0 else "more") or event == "beat"
            if "steps" in message:
                steps[message["steps"][0] :] = message["steps"][1]
            if len(steps) == 1:
                with EventLog(events) as file:
                    file.write(step(2))
            if len(steps) == 2:
                break
        assert [point[1] for point in steps] == [1, 2]


def test_a_secret_is_asked_for_wherever_others_can_look(events: Path) -> None:
    with pytest.raises(UserError, match="give --secret"):
        PageThread(events, host="0.0.0.0").start()
    with page_of(events, host="0.0.0.0", secret="abc123") as (_, port, fragment):
        assert fragment == "secret=abc123"
        assert get("127.0.0.1", port, "/").status == 200
        assert get("127.0.0.1", port, "/stream").status == 403
        for wrong in ("", "Bearer ", "Bearer abc124", "Bearer abc1234", "abc12\xe9"):
            assert get("127.0.0.1", port, "/stream", headers={"Authorization": wrong}).status == 403
        right = get("127.0.0.1", port, "/stream", headers={"Authorization": "Bearer abc123"})
        assert right.status == 200
        right.close()


class Obedient:
    """An owner's hand that notes what it was asked for."""

    actions = ("stop", "kill")

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def ask(self, action: str, name: str, steps: int = 0) -> str:
        self.asked.append((action, name or str(steps or "")))
        return "" if action in self.actions else "there is no such action"


def test_only_the_owner_acts_and_what_cannot_be_is_said(events: Path) -> None:
    owner = Obedient()

    def act(port: int, secret: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/act", body, {"Authorization": f"Bearer {secret}"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    with page_of(events) as (_, port, _):
        assert act(port, "", b'{"action": "stop"}')[0] == 403  # nobody owns it
    page = PageThread(events, secret="look", owner=owner)
    port = int(urlsplit(page.start()).port or 0)
    mine = page.owner_address.rpartition("=")[2]
    try:
        for secret in ("", "look", mine[:-1], mine + "0"):
            assert act(port, secret, b'{"action": "stop"}')[0] == 403
        assert owner.asked == []
        assert act(port, mine, b'{"action": "kill", "peer": "a"}') == (200, b"done\n")
        assert act(port, mine, b'{"action": "kill", "peer": "no such"}') == (200, b"done\n")
        assert act(port, mine, b'{"action": "fly"}') == (409, b"there is no such action\n")
        assert act(port, mine, b'{"action": "steps", "steps": 40}')[0] == 409  # not of these actions
        assert owner.asked == [("kill", "name-a"), ("kill", ""), ("fly", ""), ("steps", "40")]
        for body in (b"", b"[]", b'{"action": 3}', b"{" * 4000, b'"' + b"x" * 5000):
            assert act(port, mine, body)[0] == 400
        for secret, actions in (("look", None), (mine, ["stop", "kill"])):
            with closing(
                get("127.0.0.1", port, "/stream", headers={"Authorization": f"Bearer {secret}"})
            ) as answer:
                assert next(messages(answer))[1].get("actions") == actions
    finally:
        page.close()


def test_operators_get_figures_with_names_and_units(events: Path) -> None:
    with EventLog(events) as file:
        file.write(log.PeerRemoved(peer="d0", subject="b", stage=1, reason="Connection refused"))
        file.write(log.Evaluation(t=1, loss=None, bits_per_byte=None, tokens=1))
    with page_of(events, secret="abc") as (_, port, _):
        assert get("127.0.0.1", port, "/metrics").status == 403
        text = ""
        for _ in range(200):
            answer = get("127.0.0.1", port, "/metrics", headers={"Authorization": "Bearer abc"})
            text = answer.read().decode()
            if "crashed_peers_total 1" in text:
                break
            time.sleep(0.05)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples["anabranch_step"] == "1" and float(samples["anabranch_loss_nats"]) == pytest.approx(4.9)
    assert samples['anabranch_peers{stage="1",state="active"}'] == "1"
    assert "anabranch_held_out_loss_nats" not in samples  # it was not finite
    for name, (kind, _) in METRICS.items():
        assert f"# TYPE {name} {kind}\n" in text or name.endswith(("_nats", "_part_seconds"))


def test_without_a_secret_only_names_of_this_machine_are_answered(events: Path) -> None:
    with page_of(events) as (host, port, _):
        for name in (f"localhost:{port}", "localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert get(host, port, "/", headers={"Host": name}).status == 200
        for name in (
            "evil.example",
            f"evil.example:{port}",
            f"localhost.evil.example:{port}",
            "",
            "127.0.0.1.evil",
        ):
            assert get(host, port, "/stream", headers={"Host": name}).status == 403


def test_what_is_no_request_is_refused(events: Path) -> None:
    with page_of(events) as (host, port, _):
        for words in (
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET http://x/ HTTP/1.1\r\n\r\n",
            b"\xff" * 40_000,
            b"GET / HTTP/1.1\r\nx\r\n\r\n",
        ):
            with socket.create_connection((host, port), timeout=20) as raw:
                raw.sendall(words)
                assert raw.recv(4096).startswith(b"HTTP/1.1 400")
        assert get(host, port, "/").status == 200


def test_a_port_that_is_taken_is_one_line(events: Path) -> None:
    with page_of(events) as (_, port, _), pytest.raises(UserError, match=f"port {port}"):
        PageThread(events, port=port).start()


def test_a_server_ends_with_its_readers(events: Path) -> None:
    page = PageThread(events)
    parts = urlsplit(page.start())
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20) as raw:
        raw.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with raw.makefile("rb") as stream:
            while stream.readline() != b"event: all\n":
                pass
            page.close()
            assert b"data:" in stream.read()


def test_the_report_holds_everything_and_strangers_words_are_inert() -> None:
    recording = Recording()
    for event in [*begin(), step(1), log.Note(peer="a", text=HOSTILE)]:
        recording.take(event)
    recording.take(
        log.PeerJoined(subject="e", name=HOSTILE, region=HOSTILE, role="relay", stage=1, numerics_class="")
    )
    page = report_html(recording)
    assert HOSTILE not in page and "onerror" not in page
    assert not re.search(r"""(src|href)="(?!data:|#)""", page) and "http:" not in page.replace(
        "http://www.w3.org", ""
    )
    script = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (*script, *style):
        assert "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page
    kept = re.search(r'id="recording">([^<]*)<', page)
    assert kept is not None
    assert json.loads(gzip.decompress(base64.b64decode(kept[1])))["version"] == 1


def test_modules_can_be_joined_and_never_make_markup_of_words() -> None:
    names: Counter[str] = Counter()
    for module in MODULES:
        text = text_of(module)
        names.update(
            re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE)
        )
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://", text), (
            module
        )
        for used in re.findall(r'from "\./([^"]*)"', text):
            assert MODULES.index(used) < MODULES.index(module), f"{module} comes before {used}"
    assert [name for name, count in names.items() if count > 1] == []
    assert not re.search(r"^(import|export) ", joined_script(), re.MULTILINE)


def test_a_long_log_is_shown_at_once_by_its_end_and_then_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all is read the true present is there: step, loss, peers, flow; never somebody who is gone."""
    from anabranch.observe.view import log_preview as module

    monkeypatch.setattr(module, "LONG_BYTES", 1000)
    monkeypatch.setattr(module, "HEAD_BYTES", 4000)
    monkeypatch.setattr(module, "TAIL_BYTES", 6000)
    path = tmp_path / "events.jsonl"
    count = 200
    with EventLog(path) as file:
        for event in begin():
            file.write(event)
        for t in range(1, count + 1):
            file.write(step(t, "aabb" if t <= 50 else "aaaa"))
            if t == 50:
                file.write(log.PeerRemoved(peer="d0", subject="b", stage=1, reason="Connection refused"))
    partial = module.preview(path)
    assert partial is not None
    whole = Recording()
    for event in read_events(path):
        whole.take(event)
    run, nodes = partial.view.state.get("run", ""), partial.view.state.sections["nodes"].values()
    assert run["t"] == count and run["name"] == whole.view.state.get("run", "")["name"]
    assert partial.view.steps.items[-1] == whole.view.steps.items[-1]
    shown = {node["name"]: (node["stage"], node["state"]) for node in nodes}
    true = {n["name"]: (n["stage"], n["state"]) for n in whole.view.state.sections["nodes"].values()}
    owners = {peer for units in step(count, "aaaa").owners.values() for peer in units.values()}
    assert shown and len(shown) == len(owners) and shown.items() <= true.items()
    assert partial.view.state.get("flow", "")["hops"]
    times = [line[0] for line in partial.view.story.items]
    assert times == sorted(times)
    with page_of(path) as (host, port, _), closing(get(host, port, "/stream")) as answer:
        for kind, message in messages(answer):
            if kind == "all" and message["reading"] is None and len(message["steps"][1]) == count:
                break  # the whole, whatever came before it


def test_a_preview_of_a_short_or_strange_log_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.observe.view import log_preview as module

    path = tmp_path / "events.jsonl"
    assert module.preview(path) is None
    path.write_bytes(b"{}\n")
    assert module.preview(path) is None
    monkeypatch.setattr(module, "LONG_BYTES", 0)
    monkeypatch.setattr(module, "TAIL_BYTES", 2)
    for strange in (b"{}\n" * 9, b"\xff" * 99, encoded(begin()[0])):
        path.write_bytes(strange)
        assert module.preview(path) is None


def encoded(event: log.Event) -> bytes:
    return log.encode_event(event) + b"\n"


def test_the_dashboard_for_grafana_asks_for_what_is_served_and_for_all_of_it() -> None:
    board = json.loads((Path(__file__).parents[3] / "docs" / "examples" / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"anabranch_\w+", expression)}
    assert asked == METRICS.keys()
    for name in asked:  # a counter is looked at by how it grows, a gauge as it is
        users = [expression for expression in expressions if name in expression]
        grows = ["rate(" + name in use or "increase(" + name in use for use in users]
        assert all(grows) if METRICS[name][0] == "counter" else not any(grows)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    inputs = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) == inputs


def test_a_head_is_bounded_as_a_whole(events: Path) -> None:
    """A hundred fields of 64 kB each once were six megabytes of each of 64 connections."""
    with page_of(events) as (host, port, _), socket.create_connection((host, port), 30.0) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x: " + b"y" * (HEAD_MAX - 100) + b"\r\n")
        caller.settimeout(0.2)
        with pytest.raises(TimeoutError):
            caller.recv(100)  # it may go on
        caller.settimeout(30.0)
        caller.sendall(b"z: " + b"y" * 100 + b"\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 400")


def test_slow_requests_keep_nobody_out(events: Path) -> None:
    """Once as many as the server has places were enough, for anybody who could connect, without a secret."""
    with page_of(events, secret="abc") as (host, port, _), ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            caller = stack.enter_context(socket.create_connection((host, port), 30.0))
            caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        for _ in range(3):
            assert get(host, port, "/").status == 200
        stream = get(host, port, "/stream", headers={"Authorization": "Bearer abc"})
        assert stream.status == 200 and next(messages(stream))[0] == "all"
        for _ in range(CONNECTIONS_MAX):  # the stream is no slow request, and stays
            more = stack.enter_context(socket.create_connection((host, port), 30.0))
            more.sendall(b"GET / HTTP/1.1\r\n")
        with EventLog(events) as file:
            file.write(step(2))
        assert next(message for kind, message in messages(stream) if "steps" in message)
        stream.close()


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Upgrade": "WebSocket"}]
)
def test_requests_of_other_sites_cost_no_recording(events: Path, headers: dict[str, str]) -> None:
    with page_of(events) as (host, port, _):
        for path in ("/stream", "/metrics"):
            assert get(host, port, path, headers=headers).status == 403
        assert get(host, port, "/act", "POST", headers=headers).status == 403
        assert get(host, port, "/", headers=headers).status == 200  # a link leads here
        assert get(host, port, "/metrics", headers={"Sec-Fetch-Site": "same-origin"}).status == 200


@pytest.mark.parametrize("length", ["000000000940000000", "0000000005", "4097", "-1", "+1", "1e3", "٣"])
def test_the_length_of_a_body_is_bounded_however_it_is_written(events: Path, length: str) -> None:
    """It is refused before the body: leading zeros once hid 940 MB from the bound."""
    with page_of(events) as (host, port, _), socket.create_connection((host, port), 30.0) as caller:
        caller.sendall(f"POST /act HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n".encode())
        assert caller.recv(100).startswith(b"HTTP/1.1 400")
