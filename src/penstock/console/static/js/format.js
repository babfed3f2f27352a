// Values as text. An unknown value is shown as a dash with a title, never as 0.

import { h } from "./dom.js";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export function unknown(why = "unknown") {
  return h("span", { class: "unknown", title: why }, "–");
}

const known = (value, text) => (value === null || value === undefined ? unknown() : text(value));

export const count = (value) => known(value, (v) => whole.format(v));

export function countText(value) {
  return value === null || value === undefined ? "unknown" : whole.format(value);
}

export const counted = (value, noun) => `${countText(value)} ${noun}${value === 1 ? "" : "s"}`;

export function compactText(value) {
  if (value < 10_000) return short.format(value);
  for (const [limit, unit] of [[1e6, "k"], [1e9, "M"], [1e12, "G"]]) {
    if (value < limit) return short.format((value / limit) * 1000) + unit;
  }
  return short.format(value / 1e12) + "T";
}

export const compact = (value) => known(value, compactText);

export function rateText(value) {
  return value < 10 ? short.format(value) : compactText(Math.round(value));
}

// As the value of a figure, whose unit stands beside it.
export const rateFigure = (value) => known(value, rateText);

export const rate = (value) => known(value, (v) => `${rateText(v)}/s`);

export function durationText(ms) {
  if (ms < 1000) return `${Math.max(Math.round(ms), 0)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${short.format(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  const two = (large, unit, small, smaller) => (small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`);
  if (minutes < 60) return two(minutes, "min", Math.floor(seconds % 60), "s");
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return two(hours, "h", minutes % 60, "min");
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

export const duration = (ms) => known(ms, durationText);

export function bytesText(value) {
  if (value < 1024) return `${value} B`;
  let at = value;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    at /= 1024;
    if (at < 1024 || unit === "TiB") return `${short.format(at)} ${unit}`;
  }
  return "";
}

export const bytes = (value) => known(value, bytesText);
export const percent = (value) => known(value, (v) => `${short.format(v * 100)}%`);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "2-digit", month: "short", year: "numeric" });

export function timeText(ms, withMs = false) {
  const at = new Date(ms);
  const text = clock.format(at) + (withMs ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : "");
  return at.toDateString() === new Date().toDateString() ? text : `${day.format(at)}, ${text}`;
}

export const time = (ms, withMs) =>
  known(ms, (v) => h("time", { datetime: new Date(v).toISOString(), title: new Date(v).toISOString(), class: "nowrap" }, timeText(v, withMs)));

function agoElement(ms, textOf) {
  return known(ms, (v) => {
    const age = Date.now() - v;
    const text = age < 0 ? `in ${textOf(-age)}` : age < 2000 ? "now" : `${textOf(Math.floor(age / 1000) * 1000)} ago`;
    return h("span", { title: new Date(v).toISOString(), class: "nowrap" }, text);
  });
}

export const ago = (ms) => agoElement(ms, durationText);

// With the largest unit only, for a figure with little room.
export const agoFigure = (ms) => agoElement(ms, (age) => durationText(age).split(" ").slice(0, 2).join(" "));

export const clockText = (ms) => clock.format(new Date(ms)).slice(0, 5);
