// Line charts as SVG: axes with round values and times, a value under the pointer.

import { h, s, show } from "./dom.js";
import { clockText, timeText } from "./format.js";

const H = 190;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 26;
const LETTER = 7;
const TICK = 84;  // the least distance of two times

function steps(highest) {
  const rough = Math.max(highest, 1e-9) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let value = 0; value <= highest + step * 0.999; value += step) found.push(value);
  return found;
}

// A round duration, in ms, that is not shorter.
function roundTime(ms) {
  const units = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
  return (units.find((unit) => unit * 1000 >= ms) || Math.ceil(ms / 86400000) * 86400) * 1000;
}

export function timeSteps(highest) {
  const step = roundTime(highest / 4);
  const found = [];
  for (let value = 0; value < highest + step; value += step) found.push(value);
  return found;
}

// series: [{ name, values: [number|null] }]; times: [ms]; text: value → text; width: in pixels.
export function lineChart({ width: W, times, series, text, least = 1, marksOf = steps, empty }) {
  const values = series.flatMap((one) => one.values).filter((v) => v !== null && v !== undefined);
  if (times.length < 2 || !values.length) {
    return h("div", { class: "empty" }, h("p", {}, empty || "There are no samples yet. The chart fills while the console runs."));
  }
  const marks = marksOf(Math.max(least, ...values));
  const top = marks[marks.length - 1];
  const [first, last] = [times[0], times[times.length - 1]];
  const left = 12 + LETTER * Math.max(...marks.map((mark) => text(mark).length));
  const x = (ms) => left + ((ms - first) / Math.max(last - first, 1)) * (W - left - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (H - TOP - BOTTOM);
  const root = s("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": series.map((one) => one.name).join(", ") });
  for (const mark of marks) {
    root.append(
      s("line", { class: mark ? "grid" : "axis", x1: left, x2: W - RIGHT, y1: y(mark), y2: y(mark) }),
      s("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, text(mark)),
    );
  }
  const step = roundTime(((last - first) * TICK) / (W - left - RIGHT));
  for (let ms = Math.ceil(first / step) * step; ms <= last; ms += step) {
    root.append(
      s("line", { class: "axis", x1: x(ms), x2: x(ms), y1: y(0), y2: y(0) + 4 }),
      s("text", { x: x(ms), y: H - 7, "text-anchor": "middle" }, step < 60_000 ? timeText(ms).split(", ").pop() : clockText(ms)),
    );
  }
  series.forEach((one, number) => {
    for (const run of runs(times, one.values)) {
      const points = run.map(([ms, v]) => `${x(ms).toFixed(1)},${y(v).toFixed(1)}`);
      if (number === 0 && run.length > 1) {
        const ends = [x(run[run.length - 1][0]), x(run[0][0])].map((at) => `${at.toFixed(1)},${y(0)}`);
        root.append(s("polygon", { class: `area s${number}`, points: [...points, ...ends].join(" ") }));
      }
      root.append(s("polyline", { class: `line s${number}`, points: points.join(" ") }));
    }
  });
  return withCursor(root, W, { times, series, text, x, y });
}

// The unbroken runs of known values: an unknown value is a gap.
function runs(times, values) {
  const found = [];
  let run = [];
  values.forEach((value, at) => {
    if (value === null || value === undefined) {
      if (run.length) found.push(run);
      run = [];
    } else run.push([times[at], value]);
  });
  if (run.length) found.push(run);
  return found;
}

function withCursor(root, W, { times, series, text, x, y }) {
  const tip = h("div", { class: "chart-tip", hidden: true });
  const layer = s("g", {});
  root.append(layer);
  const wrap = h("div", { class: "chart-wrap" }, root, tip);
  const leave = () => {
    tip.hidden = true;
    layer.replaceChildren();
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * W;
    let best = 0;
    times.forEach((ms, i) => {
      if (Math.abs(x(ms) - at) < Math.abs(x(times[best]) - at)) best = i;
    });
    const px = x(times[best]);
    show(layer, s("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: H - BOTTOM }));
    series.forEach((one, number) => {
      const value = one.values[best];
      if (value !== null && value !== undefined) layer.append(s("circle", { class: `dot s${number}`, cx: px, cy: y(value), r: 3.5 }));
    });
    const lines = series.map((one) => {
      const value = one.values[best];
      return h("div", {}, `${one.name}: ${value === null || value === undefined ? "unknown" : text(value)}`);
    });
    show(tip, h("div", { class: "faint" }, timeText(times[best])), lines);
    tip.hidden = false;
    const left = (px / W) * box.width;
    tip.style.left = left > box.width / 2 ? "auto" : `${left + 12}px`;
    tip.style.right = left > box.width / 2 ? `${box.width - left + 12}px` : "auto";
  });
  root.addEventListener("pointerleave", leave);
  return wrap;
}

export function legend(names) {
  return h("div", { class: "legend" }, names.map((name, i) => h("span", {}, h("i", { class: `s${i}` }), name)));
}

// A small bar chart of whole numbers, such as rows per batch.
export function bars(values) {
  const highest = Math.max(1, ...values);
  const width = 4;
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${Math.max(values.length, 12) * (width + 1) - 1} 26`, preserveAspectRatio: "none", "aria-hidden": "true" },
    values.map((value, i) => {
      const height = Math.max((value / highest) * 24, value ? 1.5 : 0.5);
      return s("rect", { x: i * (width + 1), y: 26 - height, width, height, fill: "var(--accent-2)" });
    }),
  );
}
