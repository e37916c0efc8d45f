// Small charts on canvas: lines and stacked areas over steps, with values under the pointer.

import { colours } from "./theme.js";

// Most ticks of an axis. Between huge values that lie close together the next tick rounds to the same one.
const TICKS_MAX = 50;

// True if any part of the element is visible.
export function onScreen(element) {
  const box = element.getBoundingClientRect();
  return box.bottom > 0 && box.top < innerHeight && box.width > 0;
}

export function fit(canvas) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// series: [{points: [[x, y]], colour, dots, raw, fill}]; y may be null. Stacked series have the same x.
export function drawChart(canvas, { series, stacked = false, zero = false, shown, marks = [], pointer = null }) {
  if (!onScreen(canvas)) return;
  const { context: c, width, height } = fit(canvas);
  const frame = { left: 46, right: width - 10, top: 10, bottom: height - 20 };
  const all = series.flatMap((one) => one.points.filter(([, y]) => y !== null));
  if (!all.length || width < 40) {
    c.fillStyle = colours.muted;
    c.font = "12px system-ui, sans-serif";
    c.textAlign = "center";
    c.fillText("no data yet", width / 2, height / 2);
    return;
  }
  const xs = all.map(([x]) => x);
  const x0 = Math.min(...sampled(xs, Math.min)), x1 = Math.max(...sampled(xs, Math.max), x0 + 1);
  const ys = stacked ? totals(series) : clipped(all.map(([, y]) => y));
  let [y0, y1] = zero || stacked ? [0, Math.max(...sampled(ys, Math.max))] :
    [Math.min(...sampled(ys, Math.min)), Math.max(...sampled(ys, Math.max))];
  const room = (y1 - y0) * 0.08 || Math.abs(y1) * 0.1 || 1;
  y1 += room;
  if (!zero && !stacked) y0 -= room;
  const X = (x) => frame.left + ((x - x0) / (x1 - x0)) * (frame.right - frame.left);
  const Y = (y) => frame.bottom - ((Math.min(y, y1) - y0) / (y1 - y0)) * (frame.bottom - frame.top);
  drawAxes(c, frame, x0, x1, y0, y1, X, Y, shown);
  for (const [x, colour] of marks) {
    if (x < x0 || x > x1) continue;
    c.fillStyle = colour;
    c.fillRect(X(x) - 0.75, frame.top, 1.5, frame.bottom - frame.top);
  }
  if (stacked) drawStack(c, series, X, Y);
  else for (const one of series) drawLine(c, one, X, Y, frame);
  if (pointer !== null) drawReading(c, frame, series, X, x0, x1, pointer, shown, width);
}

// Extremes by chunk: spreading a long list into Math.max would overflow the stack.
function sampled(values, pick) {
  const out = [];
  for (let i = 0; i < values.length; i += 1000) out.push(pick(...values.slice(i, i + 1000)));
  return out;
}

// Single peaks (the first step's seconds hold the start of the swarm) must not flatten the rest.
function clipped(values) {
  if (values.length < 20) return values;
  const sorted = [...values].sort((a, b) => a - b);
  const top = sorted[Math.floor(sorted.length * 0.985)] * 1.15;
  return values.map((value) => Math.min(value, Math.max(top, 1e-9)));
}

function totals(series) {
  return clipped(series[0].points.map((_, i) => series.reduce((sum, one) => sum + (one.points[i][1] ?? 0), 0)));
}

function drawAxes(c, frame, x0, x1, y0, y1, X, Y, shown) {
  c.font = "11px system-ui, sans-serif";
  c.fillStyle = colours.muted;
  c.strokeStyle = colours.line;
  c.lineWidth = 1;
  c.textAlign = "right";
  c.textBaseline = "middle";
  const levels = ticks(y0, y1, 4, 4);
  const step = levels.length > 1 ? levels[1] - levels[0] : 1;
  for (const tick of levels) {
    const y = Math.round(Y(tick)) + 0.5;
    c.beginPath();
    c.moveTo(frame.left, y);
    c.lineTo(frame.right, y);
    c.stroke();
    c.fillText(shown(tick, step), frame.left - 6, y);
  }
  c.textAlign = "center";
  c.textBaseline = "alphabetic";
  for (const tick of ticks(x0, x1, 5)) if (Number.isInteger(tick)) c.fillText(tick.toLocaleString("en"), X(tick), frame.bottom + 15);
}

// Round values from low to high: about `count`, with finer steps where that gives fewer than `least`.
export function ticks(low, high, count, least = 0) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = [0.5, 1, 2, 5, 10].map((factor) => factor * power);
  let at = steps.findIndex((step) => step >= raw);
  for (;; at -= 1) {
    const step = steps[at], found = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-6 && found.length < TICKS_MAX; i += 1) found.push(+(i * step).toPrecision(12));
    if (found.length >= least || at <= 0) return found;
  }
}

function drawLine(c, one, X, Y, frame) {
  c.strokeStyle = c.fillStyle = one.colour;
  const smooth = one.raw ? smoothed(one.points) : one.points;
  if (one.raw) stroke(c, one.points, X, Y, 1, 0.28);
  if (one.fill && smooth.length > 1) {
    c.globalAlpha = 0.1;
    c.beginPath();
    trace(c, smooth, X, Y);
    c.lineTo(X(smooth[smooth.length - 1][0]), frame.bottom);
    c.lineTo(X(smooth[0][0]), frame.bottom);
    c.fill();
    c.globalAlpha = 1;
  }
  stroke(c, smooth, X, Y, 2, 1);
  if (one.dots || smooth.length === 1) {
    for (const [x, y] of smooth.slice(-200)) {
      if (y === null) continue;
      c.beginPath();
      c.arc(X(x), Y(y), 3, 0, 7);
      c.fill();
    }
  }
}

function stroke(c, points, X, Y, width, alpha) {
  c.globalAlpha = alpha;
  c.lineWidth = width;
  c.lineJoin = "round";
  c.beginPath();
  trace(c, points, X, Y);
  c.stroke();
  c.globalAlpha = 1;
}

function trace(c, points, X, Y) {
  let pen = false;
  for (const [x, y] of points) {
    if (y === null) pen = false;
    else if (pen) c.lineTo(X(x), Y(y));
    else {
      c.moveTo(X(x), Y(y));
      pen = true;
    }
  }
}

export function smoothed(points) {
  const span = Math.max(1, Math.min(25, points.length / 8));
  const decay = 1 - 2 / (span + 1);
  let total = 0, weight = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, y];
    total = decay * total + y;
    weight = decay * weight + 1;
    return [x, total / weight];
  });
}

function drawStack(c, series, X, Y) {
  let below = series[0].points.map(() => 0);
  for (const one of series) {
    const above = one.points.map(([, y], i) => below[i] + (y ?? 0));
    c.fillStyle = one.colour;
    c.beginPath();
    one.points.forEach(([x], i) => (i ? c.lineTo(X(x), Y(above[i])) : c.moveTo(X(x), Y(above[i]))));
    for (let i = one.points.length - 1; i >= 0; i -= 1) c.lineTo(X(one.points[i][0]), Y(below[i]));
    c.fill();
    below = above;
  }
}

function drawReading(c, frame, series, X, x0, x1, pointer, shown, width) {
  const x = x0 + ((pointer - frame.left) / (frame.right - frame.left)) * (x1 - x0);
  const lines = [];
  let at = null;
  for (const one of series) {
    const point = nearest(one.points, x);
    if (!point || point[1] === null) continue;
    at ??= point[0];
    lines.push([one.colour, `${one.name} ${shown(point[1])}`]);
  }
  if (at === null) return;
  c.strokeStyle = colours.muted;
  c.beginPath();
  c.moveTo(X(at), frame.top);
  c.lineTo(X(at), frame.bottom);
  c.stroke();
  lines.unshift([colours.muted, `step ${at.toLocaleString("en")}`]);
  c.font = "12px system-ui, sans-serif";
  c.textAlign = "left";
  c.textBaseline = "middle";
  const box = Math.max(...lines.map(([, text]) => c.measureText(text).width)) + 26;
  const left = X(at) + box + 12 > width ? X(at) - box - 8 : X(at) + 8;
  c.fillStyle = colours.panel;
  c.strokeStyle = colours.line;
  c.beginPath();
  c.roundRect(left, frame.top + 2, box, 17 * lines.length + 8, 6);
  c.fill();
  c.stroke();
  lines.forEach(([colour, text], i) => {
    const y = frame.top + 15 + 17 * i;
    c.fillStyle = colour;
    c.fillRect(left + 8, y - 4, 8, 8);
    c.fillStyle = colours.ink;
    c.fillText(text, left + 21, y);
  });
}

function nearest(points, x) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - x) <= Math.abs(best[0] - x)) best = point;
  return best;
}

// Marks on the timeline: failures and repairs.
export function drawMarks(canvas, recording) {
  const { context: c, width, height } = fit(canvas);
  const length = Math.max(0.001, recording.time - recording.began);
  const inset = 8; // half of the scrubber's thumb
  let drawn = "";
  for (const [time, subject] of recording.lists.story) {
    if (subject !== "trouble" && subject !== "repair") continue;
    const x = Math.round(inset + ((time - recording.began) / length) * (width - 2 * inset));
    if (drawn === `${x} ${subject}`) continue;
    drawn = `${x} ${subject}`;
    c.fillStyle = subject === "trouble" ? colours.bad : colours.good;
    c.fillRect(x - 1, subject === "trouble" ? 0 : height / 2, 2, height / 2);
  }
}

export function drawSpark(canvas, points, colour) {
  const { context: c, width, height } = fit(canvas);
  const ys = clipped(points.map(([, y]) => y).filter((y) => y !== null));
  if (ys.length < 2) return;
  const low = Math.min(...sampled(ys, Math.min)), high = Math.max(...sampled(ys, Math.max));
  const x0 = points[0][0], x1 = points[points.length - 1][0];
  const X = (x) => 1 + ((x - x0) / (x1 - x0 || 1)) * (width - 2);
  const Y = (y) => height - 3 - ((Math.min(y, high) - low) / (high - low || 1)) * (height - 6);
  drawLine(c, { points: smoothed(points), colour, fill: true }, X, Y, { bottom: height });
}
