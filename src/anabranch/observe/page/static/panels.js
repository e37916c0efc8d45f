// Panels of text: the story, contributions, the table of peers, details of a peer.

import { PRESENT } from "./record.js";
import { lookOf, SOURCES } from "./theme.js";
import { byId, byName, clock, lasting, make, put, short, some, whole } from "./words.js";

const ROWS_MAX = 200, LINES_MAX = 250, SPOKEN_MAX = 5;
const SUBJECTS = { crew: "peers", trouble: "trouble", repair: "repairs", progress: "progress", note: "notes" };

// Replace the rows that changed.
function fill(body, rows) {
  const heads = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  rows.forEach((row, i) => {
    const text = JSON.stringify(row);
    let line = body.rows[i];
    if (line?.made === text) return;
    const fresh = make("tr", {}, ...row.map((cell, at) =>
      make(at ? "td" : "th", { ...(at ? {} : { scope: "row" }), class: cell.class ?? "", "data-head": heads[at] },
        ...(cell.colour ? [swatch(cell)] : []), cell.text ?? cell)));
    fresh.made = text;
    if (line) line.replaceWith(fresh);
    else body.append(fresh);
  });
  while (body.rows.length > rows.length) body.rows[body.rows.length - 1].remove();
}

function swatch({ colour, mark }) {
  const dot = make("span", { class: `dot ${colour.startsWith("#") ? "" : colour}`, "aria-hidden": "true" }, mark ?? "");
  if (colour.startsWith("#")) dot.style.background = colour;
  return dot;
}

export function showPeers(recording, sources) {
  const flowing = recording.hops.length > 0;
  const present = Object.entries(recording.section("nodes")).filter(([, node]) => PRESENT.has(node.state) ||
    (node.state === "crashed" && recording.at - node.since < 60));
  present.sort(([, a], [, b]) => a.stage - b.stage || byName(a, b));
  const rows = present.slice(0, ROWS_MAX).map(([key, node]) => {
    const look = lookOf(node, flowing);
    return [
      { text: node.name, colour: node.stage ? look.colour : SOURCES[(sources.get(key) ?? 0) % SOURCES.length] },
      node.region || "–", node.stage ? `stage ${node.stage}` : "data",
      { text: look.word, class: `state ${look.colour}` },
      { text: node.share ? String(node.share) : "0", class: "n" },
      { text: `${passed(node.forward_s)} / ${passed(node.backward_s)}`, class: "n" },
      { text: `${Math.round(100 * node.busy)} %`, class: "n" },
      { text: tripRange(node), class: "n" },
    ];
  });
  fill(byId("peer-rows"), rows);
  const more = present.length - rows.length;
  put(byId("peer-more"), more > 0 ? `and ${whole(more)} more` : "");
  put(byId("peer-count"), whole(present.filter(([, node]) => node.state !== "crashed").length));
}

// Duration of a pass; a data node has no backward of its own.
function passed(seconds) {
  return seconds ? lasting(seconds) : "–";
}

function tripRange(node) {
  const trips = Object.values(node.trips ?? {});
  if (!trips.length) return "–";
  const sorted = trips.sort((a, b) => a - b);
  return `${lasting(sorted[0] / 1000)} … ${lasting(sorted[sorted.length - 1] / 1000)}`;
}

export function showPeople(recording) {
  const nodes = Object.values(recording.section("nodes")).filter((node) => node.total || node.wrong || PRESENT.has(node.state));
  const relays = nodes.filter((node) => node.stage !== 0).reduce((sum, node) => sum + node.total, 0);
  const data = nodes.filter((node) => node.stage === 0).reduce((sum, node) => sum + node.total, 0);
  nodes.sort((a, b) => b.total - a.total || byName(a, b));
  const rows = nodes.slice(0, ROWS_MAX).map((node) => {
    const served = node.served + (node.joined ? Math.max(0, recording.at - node.joined) : 0);
    const all = node.stage === 0 ? data : relays;
    return [
      node.name, node.region || "–", node.stage ? "relay" : "data node",
      { text: whole(node.total), class: "n" }, { text: lasting(served), class: "n" },
      { text: all ? `${((100 * node.total) / all).toFixed(1)} %` : "–", class: "n" },
      { text: audits(node), class: "n" },
    ];
  });
  fill(byId("people-rows"), rows);
}

// Findings of auditors about a peer's work.
function audits({ right, wrong }) {
  if (wrong) return `${whole(wrong)} of ${whole(wrong + (right ?? 0))} wrong`;
  return right ? `${whole(right)} right` : "–";
}

export class Story {
  constructor() {
    this.off = new Set();
    this.read = Infinity; // lines of the story that were read aloud; those before the page was opened are not
    this.list = byId("story-lines");
    const chips = byId("story-subjects");
    for (const [subject, word] of Object.entries(SUBJECTS)) {
      const chip = make("button", { type: "button", class: `chip ${subject}`, "aria-pressed": "true" }, word);
      chip.addEventListener("click", () => {
        if (!this.off.delete(subject)) this.off.add(subject);
        chip.setAttribute("aria-pressed", String(!this.off.has(subject)));
        this.show(this.recording);
      });
      chips.append(chip);
    }
    byId("story-search").addEventListener("input", () => this.show(this.recording));
  }

  show(recording, following = false) {
    this.recording = recording;
    const words = byId("story-search").value.toLowerCase();
    const lines = [];
    for (let i = recording.count("story") - 1; i >= 0 && lines.length < LINES_MAX; i -= 1) {
      const line = recording.lists.story[i];
      if (!this.off.has(line[1]) && (!words || line[3].toLowerCase().includes(words))) lines.push(line);
    }
    this.readAloud(recording, following);
    const first = lines.length ? `${lines[0][0]} ${lines[0][3]} ${lines.length}` : "none";
    if (first === this.first) return;
    this.first = first;
    this.list.replaceChildren(...(lines.length ? lines.map((line) => this.line(line, recording)) :
      [make("li", { class: "empty" }, "no such events so far")]));
  }

  // Screen readers get every failure and repair since the last look, not only the newest: of two lines that
  // arrive together both are read.
  readAloud(recording, following) {
    const count = recording.count("story");
    const fresh = following ? recording.lists.story.slice(Math.min(this.read, count), count) : [];
    const serious = fresh.filter(([, subject]) => ["trouble", "repair"].includes(subject));
    if (serious.length) speak(serious.slice(-SPOKEN_MAX).map((line) => line[3]).join(". "));
    this.read = this.read === Infinity ? count : Math.max(this.read, count);
  }

  line([time, subject, , text], recording) {
    const when = make("time", { title: new Date(time * 1000).toLocaleString() }, clock(time - recording.began));
    return make("li", { class: subject }, when, make("span", {}, text));
  }
}

export function showDetails(recording, key, sources) {
  const panel = byId("details");
  const node = recording.section("nodes")[key];
  panel.hidden = !node;
  if (!node) return;
  const look = lookOf(node, recording.hops.length > 0);
  const why = node.why || (look.word === "idle" ? whyIdle(recording, key, node) : "");
  const name = byId("details-name");
  const title = node.region ? `${node.name} in ${node.region}` : node.name;
  put(name, title);
  const facts = [
    ["role", node.stage ? `${node.role === "auditor" ? "auditor" : "relay"} of stage ${node.stage}` : "data node"],
    ["state", why ? `${look.word}: ${why}` : look.word],
    ["this step", some(node.share, "microbatch", "es")],
    ["total", `${whole(node.total)} in committed steps`],
    ["capacity", node.capacity ? some(node.capacity, "microbatch", "es") : "–"],
    ["per microbatch", `forward ${passed(node.forward_s)}, backward ${passed(node.backward_s)}`],
    ["computing", `${Math.round(100 * node.busy)} % of the time`],
    ["sent", `${short(node.sent)}B`],
    ["round trips", trips(recording, node)],
    ["links", ways(recording, node)],
    ["version", node.program ? `anabranch ${node.program}` : "–"],
    ["id", node.id.slice(0, 16)],
  ];
  const list = byId("details-facts");
  const text = JSON.stringify(facts);
  if (list.made === text) return;
  list.made = text;
  list.replaceChildren(...facts.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

// Likely reason why an active peer had no work in the last step.
function whyIdle(recording, key, node) {
  const count = recording.count("steps");
  const stepped = count ? recording.lists.steps[count - 1][0] : 0;
  if (node.since >= stepped - 1e-3) return "it joined after the last step had begun";
  const others = Object.entries(recording.section("nodes")).filter(([other, { stage, state }]) =>
    other !== key && stage === node.stage && state === "active").map(([, other]) => other);
  if (others.length >= (recording.run.microbatches ?? Infinity)) return `its stage has ${others.length + 1} replicas for ${some(recording.run.microbatches, "microbatch", "es")}`;
  const pass = ({ forward_s, backward_s }) => forward_s + backward_s;
  const quicker = others.filter((other) => pass(other) && pass(other) < pass(node));
  if (quicker.length) return `${some(quicker.length, "faster replica")} of its stage had capacity`;
  return "no microbatch was routed to it in the last step";
}

// Text for screen readers: the chosen peer, and failures and repairs while the page is live.
export function speak(text) {
  put(byId("spoken"), text);
}

function trips(recording, node) {
  const nodes = recording.section("nodes");
  const known = Object.entries(node.trips ?? {}).filter(([key]) => nodes[key]).sort((a, b) => a[1] - b[1]);
  return known.slice(0, 6).map(([key, ms]) => `${nodes[key].name} ${lasting(ms / 1000)}`).join(", ") || "–";
}

// How the links of a peer are made: those that are not direct, by way.
function ways(recording, node) {
  const nodes = recording.section("nodes");
  const groups = new Map();
  for (const [key, way] of Object.entries(node.ways ?? {})) {
    if (!nodes[key]) continue;
    const how = way === "punched" ? "through its router (iroh)" : way === "relayed" ? "by iroh's relay"
      : `carried by ${nodes[way]?.name ?? "another machine"}`;
    groups.set(how, [...(groups.get(how) ?? []), nodes[key].name]);
  }
  const told = [...groups].map(([how, names]) => `${how}: ${names.slice(0, 6).join(", ")}${names.length > 6 ? " …" : ""}`);
  return told.length ? `direct but ${told.join("; ")}` : "direct";
}
