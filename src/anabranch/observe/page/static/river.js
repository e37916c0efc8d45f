// The river: stages as columns (rows on a narrow screen), nodes sized by capacity and coloured by state, the last
// step's microbatches as ribbons in the colour of their data node.

import { fit, onScreen } from "./chart.js";
import { layOut } from "./layout.js";
import { colours, lookOf, SOURCES } from "./theme.js";

const THICK = 12;
const EASE_PER_S = 7;
const NARROW = 560;
// Most ribbons that are animated between steps; more would cost frames.
const THREADS_MAX = 260;
// Pixels below which a ribbon is drawn as a line.
const THIN = 1.6;

export class River {
  constructor(canvas, onChoose) {
    this.canvas = canvas;
    this.seen = new Map();
    this.ribbons = new Map();
    this.chosen = "";
    this.hovered = "";
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.onChoose = onChoose;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.point("", null));
    canvas.addEventListener("click", (event) => {
      this.hover(event);
      this.choose(this.hovered);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // Update after a change of the state or of the canvas size.
  update(recording, sources, speed) {
    this.recording = recording;
    this.sources = sources;
    this.linger = 8 * Math.max(1, speed);
    this.stale = true;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = "", distance = 18;
    for (const [id, shape] of this.seen) {
      const dx = Math.max(shape.x - x, 0, x - shape.x - shape.w), dy = Math.max(shape.y - y, 0, y - shape.y - shape.h);
      if (Math.hypot(dx, dy) < distance) [best, distance] = [id, Math.hypot(dx, dy)];
    }
    this.point(best, event);
  }

  point(id) {
    if (id === this.hovered) return;
    this.hovered = id;
    this.canvas.style.cursor = id ? "pointer" : "default";
    this.tell();
  }

  choose(id) {
    this.chosen = id === this.chosen ? "" : id;
    this.tell();
  }

  forget() {
    this.chosen = this.hovered = "";
    this.tell();
  }

  tell() {
    this.onChoose(this.focus() ?? "");
  }

  // Arrow keys move between nodes, along the stages and within one.
  key(event) {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Escape") this.choose("");
    if (!step || !this.layout?.columns.length) return;
    event.preventDefault();
    const columns = this.layout.columns;
    const [at, key] = this.chosen.split(":");
    const [column, row] = this.vertical ? [step[1], step[0]] : step;
    let c = this.chosen ? Number(at) : 0;
    let r = this.chosen ? columns[c].findIndex((box) => box.key === key) : 0;
    if (this.chosen) {
      c = Math.max(0, Math.min(columns.length - 1, c + column));
      r = Math.max(0, Math.min(columns[c].length - 1, r + row));
    }
    if (columns[c][r]) {
      this.chosen = columns[c][r].id;
      this.tell();
    }
  }

  focus() {
    return (this.hovered || this.chosen).split(":")[1];
  }

  draw(now) {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!this.recording || width < 20 || !onScreen(this.canvas)) return;
    const looks = `${width} ${height} ${this.focus()} ${colours.dark}`;
    if (this.heavy && !this.stale && this.looks === looks) return;
    this.looks = looks;
    const { context: c } = fit(this.canvas);
    const passed = Math.min(0.1, (now - (this.drawn ?? now)) / 1000);
    this.drawn = now;
    this.vertical = width < NARROW;
    const [along, across] = this.vertical ? [height - 92, width - 16] : [width - 150, height - 44];
    if (this.stale || this.size !== `${width} ${height}`) {
      this.layout = layOut(this.recording, along, across, this.linger);
      this.stale = false;
      this.size = `${width} ${height}`;
      this.heavy = this.layout.ribbons.length > THREADS_MAX;
    }
    const ease = this.still.matches || this.heavy ? 1 : 1 - Math.exp(-passed * EASE_PER_S);
    this.moveBoxes(ease, width, height);
    this.moveRibbons(ease);
    this.drawRibbons(c, now);
    this.drawHeads(c, width, height);
    this.drawBoxes(c, now);
  }

  // Move shapes towards their layout; new ones grow, removed ones fade.
  moveBoxes(ease, width, height) {
    for (const [id, box] of this.layout.boxes) {
      const target = this.vertical
        ? { x: 8 + box.start, y: 36 + box.along, w: box.size, h: THICK }
        : { x: 75 + box.along - THICK / 2, y: 40 + box.start, w: THICK, h: box.size };
      let shape = this.seen.get(id);
      if (!shape) this.seen.set(id, (shape = { ...target, alpha: 0 }));
      shape.box = box;
      shape.gone = false;
      for (const side of ["x", "y", "w", "h"]) shape[side] += (target[side] - shape[side]) * ease;
      shape.alpha += (1 - shape.alpha) * ease;
    }
    for (const [id, shape] of this.seen) {
      if (this.layout.boxes.has(id)) continue;
      shape.gone = true;
      shape.alpha -= shape.alpha * ease;
      if (shape.alpha < 0.03) this.seen.delete(id);
    }
  }

  moveRibbons(ease) {
    const wanted = new Map(this.layout.ribbons.map((ribbon) => [ribbon.id, ribbon]));
    for (const [id, target] of wanted) {
      let ribbon = this.ribbons.get(id);
      if (!ribbon) this.ribbons.set(id, (ribbon = { width: 0, out: target.out, into: target.into, seed: this.ribbons.size }));
      ribbon.target = target;
      for (const name of ["width", "out", "into"]) ribbon[name] += (target[name] - ribbon[name]) * ease;
    }
    for (const [id, ribbon] of this.ribbons) {
      if (wanted.has(id)) continue;
      ribbon.width -= ribbon.width * ease;
      if (ribbon.width < 0.3) this.ribbons.delete(id);
    }
  }

  drawRibbons(c, now) {
    const threads = this.recording.run.phase === "training" && !this.still.matches && !this.heavy;
    const broken = (box) => box.node.state === "crashed" || box.node.state === "lost";
    const focus = this.focus();
    const thin = new Map();
    for (const ribbon of this.ribbons.values()) {
      const { start, end, source } = ribbon.target;
      const a = this.seen.get(start.id), b = this.seen.get(end.id);
      if (!a || !b) continue;
      const [p, q] = this.vertical
        ? [[a.x + ribbon.out, a.y + THICK], [b.x + ribbon.into, b.y]]
        : [[a.x + THICK, a.y + ribbon.out], [b.x, b.y + ribbon.into]];
      const torn = broken(start) || broken(end);
      const colour = torn ? colours.bad : SOURCES[(this.sources.get(source) ?? 0) % SOURCES.length];
      const dim = focus && ![start.key, end.key, source].includes(focus);
      const alpha = (dim ? 0.12 : torn ? 0.25 : colours.dark ? 0.5 : 0.42) * Math.min(a.alpha, b.alpha);
      if (ribbon.width < THIN) this.gather(thin, `${colour} ${alpha.toFixed(2)} ${ribbon.width.toFixed(1)}`, p, q);
      else {
        c.globalAlpha = alpha;
        c.fillStyle = colour;
        this.band(c, p, q, ribbon.width);
        if (threads && !dim && !torn) this.water(c, p, q, ribbon, now, colour);
      }
    }
    for (const [look, path] of thin) {
      const [colour, alpha, width] = look.split(" ");
      c.strokeStyle = colour;
      c.globalAlpha = Number(alpha);
      c.lineWidth = Math.max(0.6, Number(width));
      c.stroke(path);
    }
    c.globalAlpha = 1;
  }

  // Draw thin ribbons as lines, batched by appearance.
  gather(thin, look, [x0, y0], [x1, y1]) {
    let path = thin.get(look);
    if (!path) thin.set(look, (path = new Path2D()));
    path.moveTo(x0, y0);
    if (this.vertical) path.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
    else path.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1, y1);
  }

  band(c, [x0, y0], [x1, y1], width) {
    c.beginPath();
    if (this.vertical) {
      const m = (y0 + y1) / 2;
      c.moveTo(x0, y0);
      c.bezierCurveTo(x0, m, x1, m, x1, y1);
      c.lineTo(x1 + width, y1);
      c.bezierCurveTo(x1 + width, m, x0 + width, m, x0 + width, y0);
    } else {
      const m = (x0 + x1) / 2;
      c.moveTo(x0, y0);
      c.bezierCurveTo(m, y0, m, y1, x1, y1);
      c.lineTo(x1, y1 + width);
      c.bezierCurveTo(m, y1 + width, m, y0 + width, x0, y0 + width);
    }
    c.fill();
  }

  // Moving highlights downstream.
  water(c, [x0, y0], [x1, y1], ribbon, now, colour) {
    const count = Math.max(1, Math.min(7, Math.round(ribbon.width / 5)));
    c.strokeStyle = colours.dark ? "#ffffff" : colour;
    c.lineWidth = Math.max(0.8, Math.min(1.5, ribbon.width / 8));
    c.lineCap = "round";
    for (let i = 0; i < count; i += 1) {
      const at = ((i + 0.5) / count) * ribbon.width;
      const seed = (ribbon.seed * 37 + i * 61) % 97;
      c.setLineDash([18 + (seed % 29), 58 + (seed % 43)]);
      c.lineDashOffset = -(now * (0.04 + (seed % 13) / 900) + seed * 7);
      c.globalAlpha = (colours.dark ? 0.2 : 0.55) + (seed % 5) / 40;
      c.beginPath();
      if (this.vertical) {
        const m = (y0 + y1) / 2;
        c.moveTo(x0 + at, y0);
        c.bezierCurveTo(x0 + at, m, x1 + at, m, x1 + at, y1);
      } else {
        const m = (x0 + x1) / 2;
        c.moveTo(x0, y0 + at);
        c.bezierCurveTo(m, y0 + at, m, y1 + at, x1, y1 + at);
      }
      c.stroke();
    }
    c.setLineDash([]);
  }

  drawHeads(c, width, height) {
    const columns = this.layout.columns;
    c.textAlign = "center";
    c.textBaseline = "middle";
    const step = columns.length > 1 ? (this.vertical ? height - 92 : width - 150) / (columns.length - 1) : 1;
    const every = this.vertical ? 1 : Math.ceil(64 / step);
    columns.forEach((column, at) => {
      const present = column.filter((box) => box.node.state !== "crashed").length;
      const last = at === columns.length - 1;
      if (at % every && !last) return;
      const name = at === 0 ? "data" : last ? "loss" : step < 90 && !this.vertical ? `${at}` : `stage ${at}`;
      const thin = present < 2 && at > 0 && !last;
      c.fillStyle = thin ? colours.warn : colours.muted;
      c.font = "600 12px system-ui, sans-serif";
      if (this.vertical) {
        c.textAlign = "left";
        halo(c, name, 8, 10 + (at * (height - 92)) / Math.max(1, columns.length - 1) + (at ? 10 : 6));
      } else {
        c.fillText(thin && step > 120 ? `${name} · one replica` : name, 75 + (at * (width - 150)) / Math.max(1, columns.length - 1), 12);
      }
    });
  }

  drawBoxes(c, now) {
    const flowing = this.recording.hops.length > 0;
    const focus = this.focus();
    for (const shape of this.seen.values()) {
      const { node, key } = shape.box;
      const look = lookOf(node, flowing);
      const data = node.stage === 0 && look.word === "well";
      const colour = data ? SOURCES[(this.sources.get(key) ?? 0) % SOURCES.length] : colours[look.colour];
      const { x, y, w, h } = shape;
      c.globalAlpha = shape.alpha;
      if (focus === key) {
        c.strokeStyle = colours.ink;
        c.lineWidth = 2;
        c.beginPath();
        c.roundRect(x - 3.5, y - 3.5, w + 7, h + 7, 8);
        c.stroke();
      }
      c.fillStyle = colour;
      c.beginPath();
      if (Math.min(w, h) < 5) c.rect(x, y, w, h);
      else c.roundRect(x, y, w, h, Math.min(5, w / 2, h / 2));
      if (node.state === "joining") {
        c.globalAlpha = shape.alpha * 0.35;
        c.fill();
        c.globalAlpha = shape.alpha;
        c.setLineDash([4, 3]);
        c.strokeStyle = colour;
        c.lineWidth = 1.5;
        c.stroke();
        c.setLineDash([]);
      } else c.fill();
      if (look.colour === "bad" || look.colour === "warn") this.alarm(c, shape, colour, now, look.mark);
      this.label(c, shape, node, look);
    }
    c.globalAlpha = 1;
  }

  // Rings that spread from a failed node.
  alarm(c, { x, y, w, h, alpha }, colour, now, mark) {
    const [cx, cy] = [x + w / 2, y + h / 2];
    c.strokeStyle = colour;
    c.lineWidth = 2;
    for (const shift of this.still.matches || this.heavy ? [0.4] : [0, 0.5]) {
      const part = this.still.matches || this.heavy ? shift : (now / 1600 + shift) % 1;
      c.globalAlpha = alpha * (1 - part) * 0.8;
      c.beginPath();
      c.arc(cx, cy, 8 + part * 26, 0, 7);
      c.stroke();
    }
    c.globalAlpha = alpha;
    c.fillStyle = colour;
    c.beginPath();
    c.arc(cx, cy, 9, 0, 7);
    c.fill();
    c.fillStyle = "#ffffff";
    c.font = "700 14px system-ui, sans-serif";
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillText(mark, cx, cy + 0.5);
  }

  label(c, { x, y, w, h, box, alpha }, node, look) {
    const first = box.column === 0, last = box.column === this.layout.columns.length - 1;
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.globalAlpha = alpha;
    if (this.vertical) {
      if (w < 46) return;
      c.textAlign = "center";
      c.fillStyle = colours.ink;
      halo(c, clip(c, node.name, w + this.layout.gap - 6), x + w / 2, y + THICK + 9);
      return;
    }
    if (this.layout.gap + h < 15) return;
    const share = node.stage === 0 || node.state !== "active" ? "" : ` · ${Math.round(node.share)}`;
    c.fillStyle = look.colour === "good" || node.stage === 0 ? colours.ink : colours[look.colour];
    if (first || last) {
      c.textAlign = first ? "right" : "left";
      c.fillText(clip(c, node.name, 60), first ? x - 6 : x + w + 6, y + h / 2);
    } else if (this.layout.gap >= 15) {
      c.textAlign = "center";
      halo(c, clip(c, node.name, 110) + share, x + w / 2, y - 8);
    }
  }
}

function halo(c, text, x, y) {
  c.strokeStyle = colours.panel;
  c.lineWidth = 3.5;
  c.lineJoin = "round";
  c.strokeText(text, x, y);
  c.fillText(text, x, y);
}

function clip(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && c.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
