// Main script: a recording, live or from a file, its replay clock, and redrawing on changes.

import { drawMarks, onScreen } from "./chart.js";
import { Owner } from "./owner.js";
import { drawMap, byRegion } from "./map.js";
import { Numbers } from "./numbers.js";
import { showDetails, showPeers, showPeople, speak, Story } from "./panels.js";
import { Recording, unpacked } from "./record.js";
import { River } from "./river.js";
import { readStream } from "./stream.js";
import { startTheme } from "./theme.js";
import { byId, clock, lasting, put, some } from "./words.js";

const SPEEDS = [1, 2, 5, 10, 30, 60, 120, 300, 1000];
const PANELS_MS = 220;

const recording = new Recording();
const page = {
  live: false, connected: "connecting", reading: null, playing: false, following: true, speed: 1, chosen: "", columns: [],
  dirty: true, first: true, panelsAt: 0, heardAt: 0,
};
const sources = new Map();
const redraw = () => (page.dirty = true);
const river = new River(byId("river"), (key) => {
  page.chosen = key;
  page.chosenId = recording.section("nodes")[key]?.id;
  showChosen();
  if (key && document.activeElement === byId("river")) speak(`${byId("details-name").textContent}. ${byId("details-facts").innerText}`);
});
const secret = new URLSearchParams(location.hash.slice(1)).get("secret") ?? "";
const owner = new Owner(secret);
const story = new Story();
const numbers = new Numbers(redraw);

// --- the clock ---------------------------------------------------------------------------------

function goTo(time) {
  page.following = page.live && time >= recording.time - 0.3;
  recording.seek(Math.max(recording.began, Math.min(time, recording.time)));
  redraw();
}

function play(on) {
  page.playing = on;
  if (on && recording.at >= recording.time - 0.05 && !page.following) goTo(recording.began);
  byId("play").setAttribute("aria-pressed", String(on));
  byId("play").setAttribute("aria-label", on ? "Pause the replay" : "Play from here");
  put(byId("play"), on ? "❚❚" : "▶");
  redraw();
}

function setSpeed(speed) {
  page.speed = speed;
  byId("speed").value = String(speed);
  redraw();
}

function fittingSpeed() {
  const length = recording.time - recording.began;
  return SPEEDS.find((speed) => length / speed <= 75) ?? SPEEDS.at(-1);
}

function goLive() {
  page.following = true;
  play(false);
  goTo(recording.time);
}

function startControls() {
  for (const speed of SPEEDS) byId("speed").append(new Option(`${speed}×`, String(speed)));
  byId("play").addEventListener("click", () => {
    if (!page.playing && !page.chosenSpeed) setSpeed(fittingSpeed());
    if (page.following && page.live && !page.playing) {
      page.following = false;
      recording.seek(recording.began);
    }
    play(!page.playing);
  });
  byId("speed").addEventListener("change", (event) => {
    page.chosenSpeed = true;
    setSpeed(Number(event.target.value));
  });
  byId("scrubber").addEventListener("input", (event) => {
    const part = Number(event.target.value) / 1000;
    const time = recording.began + part * (recording.time - recording.began);
    goTo(part >= 0.999 ? recording.time : time);
  });
  byId("live").addEventListener("click", goLive);
  byId("details-close").addEventListener("click", () => river.choose(river.chosen));
  addEventListener("resize", redraw);
  addEventListener("scroll", redraw, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key !== " " || event.target !== document.body) return;
    event.preventDefault();
    byId("play").click();
  });
}

// --- panels ------------------------------------------------------------------------------------

function showChosen() {
  const node = recording.section("nodes")[page.chosen];
  if (node && node.id !== page.chosenId) return river.forget(); // the key is another peer's in a new recording
  showDetails(recording, page.chosen, sources);
  owner.show(node);
}

function showHead() {
  const { run } = recording;
  const title = run.name ? `${run.name}` : "waiting for the run";
  put(byId("run-name"), title);
  document.title = run.name ? `${run.name} · step ${run.t ?? 0} · anabranch` : "anabranch";
  put(byId("run-model"), run.model ? `${run.model} · ${(run.parameters ?? 0).toLocaleString("en")} parameters · ${some(run.stages, "stage")} · ${some(run.microbatches, "microbatch", "es")} a step` : "");
  const [word, kind] = phase(run);
  const pill = byId("phase");
  put(pill, word);
  pill.className = `pill ${kind}`;
  owner.now(run);
  const why = run.phase !== "training" ? run.why ?? "" : "";
  const past = page.reading === null ? "" : `The event log is still being read (${Math.floor(100 * page.reading)}\u00a0%); until then this is a preview of its end.`;
  const words = [why, past].filter(Boolean).join(" ");
  put(byId("phase-why"), words);
  byId("phase-why").hidden = !words;
}

function phase(run) {
  if (page.live && page.connected === "refused") return ["the secret is missing or wrong", "bad"];
  if (page.live && page.following && page.connected !== "live") return ["connecting…", "warn"];
  if (!run.phase) return ["no events yet", "calm"];
  const behind = !page.following;
  const suffix = behind ? " (replay)" : "";
  if (run.phase === "finished") return [`finished${suffix}`, "calm"];
  if (run.phase === "paused") return [`${run.t < run.held ? "pausing" : "paused"}${suffix}`, "accent"];
  if (run.phase === "waiting") return [`waiting${suffix}`, "warn"];
  const silent = page.live && !behind && page.heardAt ? (performance.now() - page.heardAt) / 1000 : 0;
  if (silent > 20) return [`no data for ${lasting(silent)}`, "warn"];
  const nodes = Object.values(recording.section("nodes"));
  const ill = nodes.filter((node) => node.state === "suspect" || node.state === "lost").length;
  if (ill) return [`${some(ill, "peer")} suspected${suffix}`, "warn"];
  return [behind ? "replay" : "training", behind ? "accent" : "good"];
}

function showTimeline() {
  const length = Math.max(0.001, recording.time - recording.began);
  const part = Math.round((1000 * (recording.at - recording.began)) / length);
  const scrubber = byId("scrubber");
  if (document.activeElement !== scrubber || page.playing || page.following) scrubber.value = String(part);
  drawMarks(byId("marks"), recording);
  const words = `${clock(recording.at - recording.began)} of ${clock(length)}`;
  scrubber.setAttribute("aria-valuetext", words);
  put(byId("moment"), words);
  byId("live").hidden = !page.live;
  byId("live").setAttribute("aria-pressed", String(page.following));
}

function showRiverWords() {
  const columns = river.layout?.columns ?? [];
  const counts = columns.slice(1, -1).map((column, i) => `stage ${i + 1}: ${column.map((box) => box.node.name).slice(0, 6).join(", ")}${column.length > 6 ? " …" : ""}`);
  byId("river").setAttribute("aria-label", columns.length ? `The river. Data nodes: ${columns[0].length}. ${counts.join("; ")}. The table "Peers" has the same as text; arrow keys go from peer to peer.` : "The river; no peers yet.");
}

function showMap() {
  const { regions, elsewhere } = byRegion(recording);
  byId("map-section").hidden = !regions.size;
  const away = [...elsewhere].map(([region, peers]) => `${peers.length} ${region ? `in ${region}` : "without a region"}`).slice(0, 12);
  put(byId("map-note"), away.length ? `not on the map: ${away.join(", ")}` : "");
  if (onScreen(byId("map"))) drawMap(byId("map"), recording, sources);
  byId("map").setAttribute("aria-label", `Peers by region: ${[...regions].map(([region, peers]) => `${region} ${peers.length}`).join(", ") || "none known"}`);
}

function nameSources() {
  const data = Object.entries(recording.section("nodes")).filter(([, node]) => node.stage === 0);
  data.sort((a, b) => Number(a[0]) - Number(b[0]));
  data.forEach(([key]) => {
    if (!sources.has(key)) sources.set(key, sources.size);
  });
}

function showPanels() {
  showHead();
  numbers.show(recording, page.columns);
  showPeers(recording, sources);
  if (onScreen(byId("people-rows")) || page.first) showPeople(recording);
  story.show(recording, page.live && page.following);
  showRiverWords();
  showMap();
  page.first = false;
}

let before = 0;
function frame(now) {
  requestAnimationFrame(frame);
  if (document.hidden) return;
  const passed = Math.min(0.25, (now - before) / 1000);
  before = now;
  if (page.following) {
    if (recording.at < recording.time || recording.version !== page.version) redraw();
    recording.seek(recording.time);
  } else if (page.playing) {
    goTo(recording.at + passed * page.speed);
    if (recording.at >= recording.time - 0.01) page.live ? goLive() : play(false);
  }
  if (page.dirty || recording.version !== page.version) {
    page.dirty = false;
    page.version = recording.version;
    const moment = `${recording.version} ${recording.at}`;
    if (moment !== page.moment) {
      page.moment = moment;
      nameSources();
      river.update(recording, sources, page.following ? 1 : page.speed);
    }
    showChosen();
    showTimeline();
    page.stale = true;
  }
  river.draw(now);
  if (page.stale && now - page.panelsAt > PANELS_MS) {
    page.stale = false;
    const began = performance.now();
    showPanels();
    // Panels of a large swarm cost more and are redrawn less often, so that the page stays responsive.
    page.panelsAt = now + Math.min(2000, 8 * (performance.now() - began));
  }
}

// --- data --------------------------------------------------------------------------------------

function taken(message, fresh) {
  const kept = recording.at;
  recording.take(message, fresh);
  if (message.step_columns) page.columns = message.step_columns;
  page.reading = message.reading ?? null;
  if (fresh && !page.following) recording.seek(kept);
}

async function start() {
  startTheme(byId("theme"), redraw);
  startControls();
  requestAnimationFrame(frame);
  setInterval(redraw, 1000);
  const kept = byId("recording");
  if (kept) {
    taken(await unpacked(kept.textContent), true);
    page.following = false;
    setSpeed(fittingSpeed());
    goTo(recording.time);
    return;
  }
  page.live = true;
  readStream(secret, (event, message) => {
    if (event === "beat") return;
    page.heardAt = performance.now();
    taken(message, event === "all");
    if (event === "all") owner.may(message.actions);
  }, (state) => {
    page.connected = state;
    redraw();
  });
}

start();
