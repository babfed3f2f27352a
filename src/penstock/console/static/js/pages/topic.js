// One topic: queues, groups, settings.

import { del, may, part, put } from "../api.js";
import { h, show } from "../dom.js";
import { ago, compact, count, duration, rateFigure, timeText } from "../format.js";
import { ask, badge, body, empty, facts, field, note, options, panel, stat, table, toast } from "../ui.js";
import { PERMS, permText, TYPES } from "./topics.js";

export default async function topic(page) {
  const [name] = page.params;
  page.title(name);
  const content = h("div", { class: "stack" });
  const head = h("span", { class: "row" });
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("div", { class: "crumb" }, h("a", { href: "/topics" }, "Topics")),
      h("h1", {}, name),
      head,
      h(
        "div",
        { class: "actions" },
        h("a", { class: "button primary", href: `/messages?topic=${part(name)}` }, "Messages"),
        h("a", { class: "button", href: `/messages?topic=${part(name)}&tail=1` }, "Live tail"),
        may("operate") && h("button", { type: "button", onclick: () => settings(page, name) }, "Settings"),
        may("operate") && h("button", { class: "danger", type: "button", onclick: () => remove(page, name) }, "Delete"),
      ),
    ),
    content,
  );
  await page.every(5000, async () => {
    const at = await page.get(`/topics/${part(name)}`);
    if (page.signal.aborted) return;
    page.topic = at;
    const types = new Set(Object.values(at.brokers).map((one) => one.message_type));
    const perms = new Set(Object.values(at.brokers).map((one) => one.perm));
    show(head, [...types].map((type) => badge(type === "UNSPECIFIED" ? "type not specified" : type.toLowerCase())), [...perms].filter((perm) => perm !== "rw").map((perm) => badge(permText(perm), "warn")), at.kind !== "normal" && badge(at.kind, "info"));
    show(content, view(at));
  });
}

function view(at) {
  const last = Math.max(0, ...at.queues.map((queue) => queue.updated_ms || 0)) || null;
  return [
    at.unreachable.length > 0 && note("warn", `Without the queues of ${at.unreachable.join(", ")}, which can't be reached.`),
    h(
      "div",
      { class: "stats" },
      stat("Messages", compact(at.messages), { note: "stored now", id: "messages" }),
      stat("Stored", rateFigure(at.rate_in), { unit: "msg/s", id: "rate" }),
      stat("Last message", ago(last), { note: last && timeText(last) }),
      stat("Queues", String(at.queues.length), { note: `on ${Object.keys(at.brokers).join(", ")}`, id: "queues" }),
      stat("Groups", String(at.groups.length), { note: "consume it" }),
    ),
    h("div", { class: "columns wide-left" }, queues(at), h("div", { class: "stack" }, groups(at), brokers(at))),
  ];
}

function queues(at) {
  if (!at.queues.length) return panel("Queues", empty("No queue is known", "The brokers of this topic do not answer."));
  const columns = [
    { label: "Queue", cell: (row) => h("a", { class: "name", href: `/messages?topic=${part(at.name)}&q=${part(`queue:${row.broker}/${row.queue}`)}` }, `${row.broker} / ${row.queue}`) },
    { label: "First offset", num: true, cell: (row) => count(row.min_offset) },
    { label: "Next offset", num: true, cell: (row) => count(row.max_offset) },
    { label: "Messages", num: true, cell: (row) => count(row.messages) },
    { label: "Last message", num: true, cell: (row) => ago(row.updated_ms) },
  ];
  return panel("Queues", table(columns, at.queues, { key: (row) => `${row.broker}/${row.queue}` }), { id: "queues" });
}

function groups(at) {
  if (!at.groups.length) {
    return panel("Groups", empty("No group consumes this topic", "A group appears when a consumer subscribes, or when it has offsets here."));
  }
  const columns = [
    { label: "Group", cell: (row) => h("a", { class: "name", href: `/groups/${part(row.name)}` }, row.name) },
    { label: "Lag", num: true, cell: (row) => duration(row.lag_ms) },
    { label: "Behind", num: true, cell: (row) => count(row.lag) },
    { label: "Members", num: true, cell: (row) => count(row.members) },
  ];
  return panel("Groups", table(columns, at.groups, { link: (row) => `/groups/${part(row.name)}`, key: (row) => row.name }), { id: "groups" });
}

function brokers(at) {
  return panel(
    "Settings",
    body(
      Object.entries(at.brokers).map(([broker, one]) =>
        facts([
          [broker, `${one.read_queues} read and ${one.write_queues} write queues${one.perm === "rw" ? "" : `, ${permText(one.perm)}`}${one.order ? ", ordered" : ""}`],
          ...Object.entries(one.attributes).map(([name, value]) => [name, h("code", {}, value)]),
        ]),
      ),
    ),
  );
}

function settings(page, name) {
  const first = Object.values(page.topic?.brokers || {})[0];
  if (!first) return;
  const queues = h("input", { type: "number", min: 1, max: 1024, value: first.write_queues });
  const perm = h("select", {}, options(PERMS, first.perm));
  const type = h("select", {}, options([["", "unchanged"], ...TYPES.map((one) => [one, one.toLowerCase()])], ""));
  ask(
    `Settings of ${name}`,
    h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Queues per broker", queues), field("Permission", perm), field("Message type", type)),
    "Change",
    async () => {
      await put(`/topics/${part(name)}`, { queues: Number(queues.value), perm: perm.value, message_type: type.value || undefined });
      toast(`Changed ${name}`);
      page.go(`/topics/${part(name)}`);
    },
  );
}

function remove(page, name) {
  ask(
    `Delete ${name}?`,
    h("p", {}, "The topic is deleted from all brokers with all of its messages. This can't be undone."),
    "Delete",
    async () => {
      await del(`/topics/${part(name)}`, { confirm: name });
      toast(`Deleted ${name}`);
      page.go("/topics");
    },
    { danger: true, confirm: name },
  );
}
