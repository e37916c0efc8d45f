"""The page in a real browser, over a real local swarm: what happens there is seen, live and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.net.ticket import parse_ticket
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.node.operator.owner_actions import SwarmOwner
from anabranch.node.operator.remote_watch import RemoteWatch
from anabranch.observe import events as log
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import PeerRemoved, RunFinished, Step
from anabranch.observe.page.page_thread import PageThread
from support.browsers import chromium
from support.local_swarms import PATIENCE_S, created, small_run, swarm_of
from support.unhurried_peer import run_unhurried_peer

#: Seconds after which the page must show what happened. It takes half a second; where the machine was busy
#: with something else just then, a second kill has to be seen in time.
SEEN_S = 3.0
#: Asks for a kill, with these words of authority; gives the status.
ACT = """async (authority) => (await fetch('act', {
    method: 'POST', headers: authority ? { Authorization: authority } : {},
    body: JSON.stringify({ action: 'kill', peer: 'b' }),
})).status"""
#: Moves the scrubber.
MOVE = """(value) => {
    const scrubber = document.querySelector('#scrubber');
    scrubber.value = value;
    scrubber.dispatchEvent(new Event('input'));
}"""
#: Keeps all that a screen reader is told, in ``heard``: the region itself holds the newest words alone.
LISTEN = """document.addEventListener('DOMContentLoaded', () => {
    window.heard = [];
    const region = document.querySelector('#spoken');
    new MutationObserver(() => window.heard.push(region.textContent)).observe(
        region, { childList: true, characterData: true, subtree: true });
})"""
#: More than are taken until the swarm is stopped, however slow the browser is.
STEPS = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Page:
    """Page of the browser that records errors and requests to other hosts."""

    def __init__(self, browser: Any, address: str, offline: bool = False) -> None:
        self.context = browser.new_context(offline=offline)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.add_init_script(LISTEN)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type != "log" else None)
        self.page.on("request", lambda request: self.requested(request.url, address))
        self.page.goto(address)

    def requested(self, url: str, address: str) -> None:
        if not url.startswith((address.partition("#")[0], "data:", "blob:")):
            self.wrong.append(f"a request to {url}")

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def until(self, script: str, within_s: float = PATIENCE_S) -> None:
        """Until a script's value is true."""
        self.page.wait_for_function(script, timeout=1000 * within_s)

    def peers(self) -> dict[str, str]:
        """Name -> state, of the table."""
        rows = self.page.eval_on_selector_all(
            "#peer-rows tr", "rows => rows.map((r) => [r.cells[0].textContent, r.cells[3].textContent])"
        )
        return dict(rows)

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []


def story_says(words: str) -> str:
    return f"() => document.querySelector('#story-lines').textContent.includes('{words}')"


def row_says(name: str, state: str) -> str:
    return (
        "() => [...document.querySelectorAll('#peer-rows tr')].some((r) => "
        f"r.cells[0].textContent === '{name}' && r.cells[3].textContent === '{state}')"
    )


@pytest.mark.costly
def test_a_killed_relay_is_seen_live_in_the_replay_and_in_the_report(
    tmp_path: Path, texts: Path, supervisor: Supervisor, browser: Any
) -> None:
    run = small_run(texts, run__steps=STEPS, checkpoint__every=1000, evaluation__every=0, fleet__minimum=2)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        owner = SwarmOwner(swarm, swarm.stop)
        page = PageThread(directory.events, owner=owner)
        address = page.start()
        try:
            swarm.until(lambda events: any(isinstance(event, Step) and event.t >= 3 for event in events))
            assert "leads the run" in owner.ask("kill", "data-0") and "not a process" in owner.ask(
                "kill", "ada"
            )
            left = check_live(Page(browser, address), Page(browser, page.owner_address), owner)
            swarm.until(lambda events: any(isinstance(event, PeerRemoved) for event in events))
            check_onlooker(swarm.ticket("watch"), tmp_path / "elsewhere", directory.events)
            swarm.stop()
            assert isinstance(swarm.to_the_end()[-1], RunFinished)
            check_replay(Page(browser, address), left)
        finally:
            page.close()
    assert main(["report", str(directory.path), "--html", str(tmp_path / "report.html")]) == 0
    check_replay(Page(browser, (tmp_path / "report.html").as_uri(), offline=True), left)


def killed_by_button(mine: Page, seen: Page, owner: SwarmOwner, name: str) -> float:
    """Kill the relay that is chosen; seconds until another page marks it and the story tells of it."""
    mine.page.click("#details-acts button:text-is('kill')")
    mine.until("() => document.querySelector('#act-said').textContent === 'kill: done'")
    owner.poll()
    killed = time.monotonic()
    seen.until(row_says(name, "gone"))
    seen.until(story_says(f"{name} is gone from stage {name[6]}"))
    seen.until(f"() => window.heard.some((words) => words.includes('{name}'))")
    return time.monotonic() - killed


def check_live(seen: Page, mine: Page, owner: SwarmOwner) -> int:
    """A relay is killed with the owner's button; another page shows what comes of it. Returns who is left."""
    names = {"data-0", "relay-1.0", "relay-1.1", "relay-2.0", "relay-2.1"}
    seen.until("() => document.querySelectorAll('#peer-rows tr').length === 5")
    assert set(seen.peers()) == names and seen.text("#tile-peers") == "5"
    seen.until("() => document.querySelector('#phase').textContent === 'training'")
    assert seen.page.locator("#stop, #details-acts button").locator("visible=true").count() == 0
    assert seen.page.evaluate(ACT, "") == 403 and seen.page.evaluate(ACT, "Bearer 0") == 403
    seen.wrong = [said for said in seen.wrong if "403" not in said]
    mine.until("() => document.querySelectorAll('#peer-rows tr').length === 5")
    mine.page.focus("#river")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        mine.page.keyboard.press(key)
    assert mine.text("#details-name") == "relay-1.1"
    assert mine.text("#spoken").startswith("relay-1.1. role")  # for screen readers
    seen_s = killed_by_button(mine, seen, owner, "relay-1.1")
    step = int(seen.text("#tile-step").replace(",", ""))
    shown = "document.querySelector('#tile-step').textContent.replaceAll(',', '')"
    seen.until(f"() => Number({shown}) > {step + 1}")
    # All of the stage's work is its last replica's.
    assert seen.text("#tile-peers") == "4"
    seen.until(
        "() => [...document.querySelectorAll('#peer-rows tr')].some((r) => "
        "r.cells[0].textContent === 'relay-1.0' && r.cells[4].textContent === '6')"
    )
    left = 4
    if seen_s > SEEN_S:
        mine.page.focus("#river")
        for key in ("ArrowRight", "ArrowDown"):
            mine.page.keyboard.press(key)
        seen_s, left = killed_by_button(mine, seen, owner, mine.text("#details-name")), 3
    assert seen_s <= SEEN_S
    check_pause(mine, seen)
    mine.page.click("#stop")
    assert mine.text("#stop") == "really stop?"
    mine.close()
    seen.close()
    return left


def check_onlooker(ticket: str, home: Path, events: Path) -> None:
    """An onlooker with nothing but a ticket gets the same event log, byte for byte."""
    looking = RemoteWatch(parse_ticket(ticket, now_s=time.time()), home, print)
    with pytest.raises(UserError, match="another process watches this run already"):
        RemoteWatch(parse_ticket(ticket, now_s=time.time()), home, print)

    async def look() -> None:
        task = asyncio.create_task(looking.run())
        until = time.monotonic() + PATIENCE_S
        while b"peer_removed" not in looking.events.read_bytes():
            assert not task.done() and time.monotonic() < until
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with ThreadPoolExecutor() as threads:  # the browser's driver has this thread's event loop
        threads.submit(asyncio.run, look()).result()
    shown = looking.events.read_bytes()
    assert shown == events.read_bytes()[: len(shown)]


def check_pause(mine: Page, seen: Page) -> None:
    """The owner pauses the run, gives it other steps and lets it go on; all see it."""
    assert seen.page.locator("#pause, #more-steps").locator("visible=true").count() == 0
    mine.page.click("#pause")
    seen.until("() => document.querySelector('#phase').textContent === 'paused'")
    step = seen.text("#tile-step")
    seen.until(f"() => document.querySelector('#tile-eta').textContent === 'paused after step {step}'")
    seen.until(story_says("owner pauses the run after step"))
    mine.page.fill("#steps-wanted", str(STEPS // 2))
    mine.page.keyboard.press("Enter")
    seen.until(f"() => document.querySelector('#tile-steps').textContent === 'of {STEPS // 2:,}'")
    assert seen.text("#tile-step") == step
    assert mine.text("#pause") == "continue"
    mine.page.click("#pause")
    seen.until("() => document.querySelector('#phase').textContent === 'training'")
    seen.until(f"() => document.querySelector('#tile-step').textContent !== '{step}'")


def check_replay(seen: Page, left: int) -> None:
    seen.until("() => /finished/.test(document.querySelector('#phase').textContent)")
    assert "relay-1.1 is gone from stage 1" in seen.text("#story-lines")
    assert seen.text("#tile-peers") == str(left)
    # Back to where all were there, before anything was told of a loss.
    seen.page.evaluate(MOVE, "0")
    seen.until("() => document.querySelector('#tile-step').textContent === '0'")
    assert "is gone" not in seen.text("#story-lines")
    seen.page.select_option("#speed", "1000")
    seen.page.click("#play")
    seen.until(story_says("relay-1.1 is gone"))
    seen.until(f"() => document.querySelector('#tile-peers').textContent === '{left}'")
    seen.close()


def test_a_page_of_hostile_words_is_accessible_and_inert(tmp_path: Path, browser: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    markup = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    path = tmp_path / "events.jsonl"
    with EventLog(path) as file:
        file.write(log.RunStarted(
            peer="d", run=markup, run_id="r", model=markup, parameters=1, microbatches=1, steps=3,
            tokens_per_iteration=8, numerics="", initial_weights_hash="",
            corpus_fingerprint="", tokenizer_hash="", stages=1,
        ))  # fmt: skip
        for peer, stage in (("d", 0), ("a", 1), ("__proto__", 1), ("constructor", 1)):
            file.write(log.PeerJoined(
                subject=peer, name=markup * 99, region=markup, role=markup, stage=stage, numerics_class=""
            ))  # fmt: skip
            file.write(log.PeerActive(subject=peer, stage=stage, from_iteration=1))
        file.write(log.Note(peer="a", text=markup))
        file.write(log.Suspected(peer="d", subject="a", reason=markup))
    page = PageThread(path)
    try:
        for colours in ("dark", "light"):
            seen = Page(browser, page.start() if not page.address else page.address)
            seen.page.emulate_media(color_scheme=colours)
            seen.until("() => document.querySelectorAll('#peer-rows tr').length === 4")
            assert seen.page.title().startswith("<img src=x")
            assert seen.page.locator("main img, header img").count() == 0
            found = Axe().run(seen.page)
            assert found.violations_count == 0, found.generate_report()
            seen.close()
    finally:
        page.close()


#: True if no curve of a tile lies on the tile's title.
CURVES_BESIDE_WORDS = """() => [...document.querySelectorAll(".tile canvas")].every((curve) => {
  const words = document.createRange();
  words.selectNodeContents(curve.parentElement.querySelector("h2"));
  const title = words.getBoundingClientRect(), box = curve.getBoundingClientRect();
  return title.right <= box.left || title.bottom <= box.top;
})"""


def test_a_paused_run_on_a_phone(tmp_path: Path, browser: Any) -> None:
    """Nothing is wider than the screen, and the tiles and charts say what is so."""
    from support.run_events import begin, step

    path = tmp_path / "events.jsonl"
    repair = log.Repair(
        peer="d0", time=105.5, t=4, index=1, stage=1, dead="a", replacement="b", reason="forward: x"
    )
    with EventLog(path) as file:
        for event in [*begin(), *(step(t) for t in range(1, 4)), repair, step(4)]:
            file.write(event)
        file.write(log.Timing(
            peer="b", time=106.1, t=4, stage=1, forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0,
            reduce_s=0.1, apply_s=0.1, idle_s=0.0, bytes_activations=1, bytes_reduce=1,
        ))  # fmt: skip
        file.write(step(5))
        file.write(log.Controlled(peer="d0", time=108.0, action="pause", t=5))
    page = PageThread(path)
    try:
        seen = Page(browser, page.start())
        seen.page.set_viewport_size({"width": 390, "height": 844})
        seen.until("() => document.querySelector('#phase').textContent === 'paused'")
        seen.until("() => document.querySelectorAll('#peer-rows tr').length === 6")
        assert seen.text("#tile-eta") == "paused after step 5"
        assert seen.text("#tile-lost") == "0 crashes · waste not measured"
        assert seen.text("#totals").startswith("320 tokens seen")
        wide = "() => [document.documentElement, ...document.querySelectorAll('.scroll')]"
        wide += ".every((e) => e.scrollWidth <= e.clientWidth)"
        assert seen.page.evaluate(wide)
        assert seen.page.evaluate(CURVES_BESIDE_WORDS)
        cell = "document.querySelector('#peer-rows td:nth-child(2)')"
        assert seen.page.evaluate(f"() => getComputedStyle({cell}, '::before').content") == '"region"'
        module = "async () => (await import('./chart.js')).ticks"
        for low, high in ((2.31, 2.79), (0.9, 6.1), (5.0, 5.0004), (0.0, 11.2)):
            count = seen.page.evaluate(f"async () => (await ({module})())({low}, {high}, 4, 4).length")
            assert 4 <= count <= 10, (low, high, count)
        seen.close()
    finally:
        page.close()
