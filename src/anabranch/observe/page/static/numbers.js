// Tiles and charts of the numbers.

import { drawChart, drawSpark } from "./chart.js";
import { PRESENT } from "./record.js";
import { colours } from "./theme.js";
import { byId, known, lasting, make, put, short, some, whole } from "./words.js";

const PARTS = ["compute", "transfer", "reduce", "waiting"];
const MARKS_MAX = 60;
const PART_NAMES = { compute: "compute", transfer: "transfer", reduce: "all-reduce", waiting: "waiting" };

// Points without those of steps that were taken again later.
export function standing(recording, name, at = 1) {
  const kept = [];
  const list = recording.lists[name];
  for (let i = 0, end = recording.count(name); i < end; i += 1) {
    while (kept.length && kept[kept.length - 1][at] >= list[i][at]) kept.pop();
    kept.push(list[i]);
  }
  return kept;
}

export class Numbers {
  constructor(redraw) {
    this.pointers = new Map();
    for (const canvas of document.querySelectorAll(".chart canvas")) {
      canvas.addEventListener("pointermove", (event) => {
        this.pointers.set(canvas.id, event.offsetX);
        redraw();
      });
      canvas.addEventListener("pointerleave", () => {
        this.pointers.delete(canvas.id);
        redraw();
      });
    }
  }

  show(recording, columns) {
    const column = (name) => columns.indexOf(name);
    const steps = standing(recording, "steps");
    const held = standing(recording, "held_out");
    const of = (name) => steps.map((point) => [point[1], point[column(name)]]);
    this.tiles(recording, steps, held, of, column);
    this.charts(recording, steps, held, of);
  }

  tiles(recording, steps, held, of, column) {
    const { run, totals } = recording;
    const last = steps[steps.length - 1] ?? [];
    put(byId("tile-step"), `${whole(run.t ?? 0)}`);
    put(byId("tile-steps"), `of ${whole(run.steps ?? 0)}`);
    byId("progress").value = run.steps ? (run.t ?? 0) / run.steps : 0;
    put(byId("tile-eta"), remaining(run, steps.length));
    put(byId("tile-loss"), known(last[column("loss")]));
    put(byId("tile-held"), held.length ? `held out ${known(held[held.length - 1][2])}` : "no evaluation yet");
    const rates = steps.slice(-8).map((point) => point[column("tps")]).filter((rate) => rate !== null);
    put(byId("tile-rate"), rates.length ? short(rates.reduce((a, b) => a + b) / rates.length) : "–");
    put(byId("tile-batch"), run.tokens ? `tokens/s · ${whole(run.tokens)} a step` : "tokens/s");
    this.split(steps, column);
    const present = Object.values(recording.section("nodes")).filter((node) => PRESENT.has(node.state));
    const counts = Array.from({ length: (run.stages ?? 0) + 1 }, () => 0);
    for (const node of present) if (node.stage in counts) counts[node.stage] += 1;
    put(byId("tile-peers"), whole(present.length));
    const few = counts.length > 9 ? `stages ${Math.min(...counts.slice(1))}–${Math.max(...counts.slice(1))}` : counts.slice(1).join(" · ");
    put(byId("tile-stages"), counts.length > 1 ? `data ${counts[0]} | ${few}` : "");
    put(byId("tile-mended"), whole(totals.repairs ?? 0));
    const crashed = totals.removals ?? 0;
    put(byId("tile-lost"), `${some(crashed, "crash", "es")} · ${wasted(totals)}`);
    drawSpark(byId("spark-loss"), of("loss"), colours.accent);
    drawSpark(byId("spark-rate"), of("tps"), colours.good);
  }

  split(steps, column) {
    const recent = steps.slice(-8).filter((point) => point[column("compute")] !== null);
    const means = PARTS.map((part) => recent.reduce((sum, point) => sum + point[column(part)], 0) / (recent.length || 1));
    const all = means.reduce((a, b) => a + b, 0);
    const seconds = steps.slice(-8).map((point) => point[column("seconds")]);
    put(byId("tile-seconds"), seconds.length ? lasting(seconds.reduce((a, b) => a + b) / seconds.length) : "–");
    const bar = byId("split");
    if (!bar.children.length) bar.append(...PARTS.map((part) => make("span", { class: part })));
    PARTS.forEach((part, i) => (bar.children[i].style.flexGrow = String(all ? means[i] / all : 0)));
    const words = PARTS.map((part, i) => `${PART_NAMES[part]} ${all ? Math.round((100 * means[i]) / all) : 0}\u00a0%`);
    bar.setAttribute("aria-label", all ? words.join(", ") : "not measured yet");
    put(byId("tile-split"), all ? `${words[0]}, ${words[3].replace("waiting", "wait")}` : "a step");
  }

  charts(recording, steps, held, of) {
    const pointer = (id) => this.pointers.get(id) ?? null;
    const troubles = troubleMarks(recording, steps);
    drawChart(byId("chart-loss"), {
      series: [
        { name: "training", points: of("loss"), colour: colours.accent, raw: true },
        { name: "held out", points: held.map((point) => [point[1], point[2]]), colour: colours.held, dots: true },
      ],
      shown: (value, step = 1) => value.toFixed(step < 0.0099 ? 3 : 2), pointer: pointer("chart-loss"), marks: troubles,
    });
    drawChart(byId("chart-rate"), {
      series: [{ name: "tokens/s", points: of("tps"), colour: colours.good, raw: true, fill: true }],
      zero: true, shown: short, pointer: pointer("chart-rate"), marks: troubles,
    });
    drawChart(byId("chart-split"), {
      series: PARTS.map((part) => ({ name: PART_NAMES[part], points: of(part).filter(([, y]) => y !== null), colour: colours[part] })),
      stacked: true, shown: lasting, pointer: pointer("chart-split"),
    });
    drawChart(byId("chart-peers"), {
      series: [{ name: "peers", points: of("alive"), colour: colours.calm, fill: true }],
      zero: true, shown: (value) => whole(value), pointer: pointer("chart-peers"), marks: troubles,
    });
    drawChart(byId("chart-norm"), {
      series: [{ name: "gradient norm", points: of("norm"), colour: colours.reduce, raw: true }],
      zero: true, shown: short, pointer: pointer("chart-norm"), marks: troubles,
    });
    drawChart(byId("chart-learning"), {
      series: [{ name: "learning rate", points: of("learning"), colour: colours.held }],
      zero: true, shown: (value) => (value ? value.toExponential(1) : "0"), pointer: pointer("chart-learning"),
    });
    const { run, totals } = recording;
    put(byId("totals"), [
      `${short((run.t ?? 0) * (run.tokens ?? 0))} tokens seen`,
      `${short(totals.sent ?? 0)}B sent` + aToken(totals), `${lasting(totals.computed_s ?? 0)} computed`,
      some(totals.doubles ?? 0, "microbatch", "es") + " computed twice", some(totals.skips ?? 0, "step") + " skipped",
      some(totals.rollbacks ?? 0, "rollback"), some(totals.joins ?? 0, "join"), some(totals.refused ?? 0, "refusal"),
    ].join(" · "));
  }
}

// Bytes that all peers sent for a token of the committed steps, in brackets.
function aToken(totals) {
  return totals.sent && totals.tokens ? ` (${short(totals.sent / totals.tokens)}B a token)` : "";
}

// Time to the last step, as far as it is known.
function remaining(run, steps) {
  if (run.phase === "finished") return "finished";
  if (run.phase === "paused") return run.t < run.held ? `pauses after step ${whole(run.held)}` : `paused after step ${whole(run.t ?? 0)}`;
  if (run.eta_s !== null && run.eta_s !== undefined && run.phase !== "waiting") return `${lasting(run.eta_s)} to go`;
  return steps ? "time to go not known now" : "not started";
}

// Computation that entered no step, in words.
function wasted({ computed_s, wasted_s, repairs, doubles }) {
  if (!(repairs || doubles)) return "nothing wasted";
  const part = computed_s ? (100 * (wasted_s ?? 0)) / computed_s : 0;
  if (!part) return "waste not measured";
  return part < 0.05 ? "less than 0.1 % wasted" : `${part.toFixed(1)} % wasted`;
}

// Steps at which peers crashed, with a colour.
function troubleMarks(recording, steps) {
  const crashed = Object.values(recording.section("nodes")).filter((node) => node.state === "crashed");
  const latest = crashed.map((node) => node.since).sort((a, b) => b - a).slice(0, MARKS_MAX);
  const marks = [];
  for (const since of latest) {
    const after = steps.find((point) => point[0] >= since);
    if (after) marks.push([after[1], colours.bad]);
  }
  return marks;
}
