// Settings that each broker has: how they differ, and a dialog that changes them. It sends only what
// was edited, and only after a preview of what changes on each broker.

import { post, put } from "./api.js";
import { h } from "./dom.js";
import { counted } from "./format.js";
import { ask, field, note, options, table, toast } from "./ui.js";

const YES_NO = [["yes", "yes"], ["no", "no"]];

// The value of a setting as text, or the value of each broker if they differ.
export function perBroker(brokers, name, text = String) {
  const pairs = Object.entries(brokers).map(([broker, one]) => [broker, text(one[name])]);
  const values = new Set(pairs.map(([, value]) => value));
  return values.size === 1 ? pairs[0][1] : pairs.map(([broker, value]) => `${value} on ${broker}`).join(", ");
}

function shared(brokers, name) {
  const values = new Set(Object.values(brokers).map((one) => one[name]));
  return values.size === 1 ? [...values][0] : null;
}

const textOf = (one) => (value) => (one.values ? one.values.find(([id]) => id === value)?.[1] ?? value : typeof value === "boolean" ? (value ? "yes" : "no") : String(value));

// An input of one setting; `edited` returns the new value, or undefined if it was not touched.
function setting(brokers, one) {
  const now = shared(brokers, one.name);
  const differs = now === null && `The brokers differ: ${perBroker(brokers, one.name, textOf(one))}.`;
  let input;
  let before;
  if (one.values || one.flag) {
    const known = one.flag ? YES_NO : one.values;
    before = now === null ? "" : one.flag ? (now ? "yes" : "no") : now;
    const kept = known.some(([id]) => id === before) ? [] : [[before, before ? before.toLowerCase() : "leave it as it is"]];
    input = h("select", { "data-setting": one.name }, options([...kept, ...known], before));
  } else {
    before = now === null ? "" : String(now);
    input = h("input", { type: "number", min: one.min, max: one.max, value: before, placeholder: "leave it as it is", "data-setting": one.name });
  }
  const edited = () => (input.value === before || input.value === "" ? undefined : one.flag ? input.value === "yes" : one.values ? input.value : Number(input.value));
  return { name: one.name, edited, row: h("div", {}, field(one.label, input), differs && h("div", { class: "faint small" }, differs)) };
}

// fields: [{ name, label, min, max }] for numbers, { values: [[id, text]] } or { flag: true }.
export function changeSettings({ title, brokers, fields, path, done }) {
  const inputs = fields.map((one) => setting(brokers, one));
  ask(
    title,
    h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, inputs.map((one) => one.row)),
    "Preview",
    async () => {
      const wanted = Object.fromEntries(inputs.map((one) => [one.name, one.edited()]).filter(([, value]) => value !== undefined));
      if (!Object.keys(wanted).length) throw new Error("You have changed nothing yet.");
      preview({ title, fields, path, done }, wanted, await post(`${path}/preview`, wanted));
    },
  );
}

function preview({ title, fields, path, done }, wanted, plan) {
  const rows = plan.brokers.flatMap((one) => one.changes.map((change) => ({ broker: one.broker, ...change })));
  const known = (row) => fields.find((one) => one.name === row.setting) || { label: row.setting };
  const columns = [
    { label: "Broker", cell: (row) => row.broker },
    { label: "Setting", cell: (row) => known(row).label },
    { label: "Now", cell: (row) => textOf(known(row))(row.before) },
    { label: "After", cell: (row) => textOf(known(row))(row.after) },
  ];
  const lost = plan.brokers.flatMap((one) => one.unreadable.map((queue) => `${one.broker} / ${queue.queue}: ${counted(queue.messages, "message")}`));
  ask(
    `${title}: preview`,
    h(
      "div",
      { class: "stack" },
      rows.length ? h("div", { class: "panel", id: "preview" }, table(columns, rows, { cards: false, key: (row) => `${row.broker}/${row.setting}` })) : h("p", {}, "All brokers have these values already."),
      plan.removes && note("bad", plan.brokers.flatMap((one) => one.losses).map((text) => h("p", {}, `${text[0].toUpperCase()}${text.slice(1)}.`))),
      lost.length > 0 && h("p", { class: "small", id: "unreadable" }, `Messages that can't be read afterwards: ${lost.join(", ")}.`),
      plan.unreachable.length > 0 && note("warn", `Without ${plan.unreachable.join(", ")}, which can't be reached.`),
    ),
    "Apply",
    async () => {
      await put(path, { ...wanted, confirm: plan.removes });
      toast("The settings are changed");
      await done();
    },
    { large: true, danger: plan.removes },
  );
}
