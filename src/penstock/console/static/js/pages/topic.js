// One topic: queues, groups, settings.

import { del, may, part } from "../api.js";
import { changeSettings, perBroker } from "../changes.js";
import { h, show } from "../dom.js";
import { ago, agoFigure, compact, count, counted, duration, rateFigure, timeText } from "../format.js";
import { ask, badge, body, empty, facts, failed, note, panel, stat, table, toast } from "../ui.js";
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
    const perms = perBroker(at.brokers, "perm", permText);
    show(head, [...types].map((type) => badge(type === "UNSPECIFIED" ? "type not specified" : type.toLowerCase())), perms !== permText("rw") && badge(perms, "warn"), at.kind !== "normal" && badge(at.kind, "info"));
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
      stat("Last message", agoFigure(last), { note: last && timeText(last) }),
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
    { label: "Lag", num: true, cell: (row) => count(row.lag) },
    { label: "Behind", num: true, cell: (row) => duration(row.lag_ms) },
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
  const brokers = page.topic?.brokers || {};
  if (!Object.keys(brokers).length) return;
  changeSettings({
    title: `Settings of ${name}`,
    brokers,
    path: `/topics/${part(name)}`,
    fields: [
      { name: "read_queues", label: "Read queues per broker", min: 1, max: 1024 },
      { name: "write_queues", label: "Write queues per broker", min: 1, max: 1024 },
      { name: "perm", label: "Permission", values: PERMS },
      { name: "message_type", label: "Message type", values: TYPES.map((one) => [one, one.toLowerCase()]) },
    ],
    done: () => page.go(`/topics/${part(name)}`),
  });
}

async function remove(page, name) {
  const at = await page.get(`/topics/${part(name)}`).catch(failed);
  if (!at) return;
  const rows = Object.keys(at.brokers).map((broker) => {
    const queues = at.queues.filter((one) => one.broker === broker);
    const known = !at.unreachable.includes(broker);
    return { broker, queues: known ? queues.length : null, messages: known ? queues.reduce((sum, one) => sum + one.messages, 0) : null };
  });
  const columns = [
    { label: "Broker", cell: (row) => row.broker },
    { label: "Queues", num: true, cell: (row) => count(row.queues) },
    { label: "Messages", num: true, cell: (row) => count(row.messages) },
  ];
  ask(
    `Delete ${name}?`,
    h(
      "div",
      { class: "stack", id: "affected" },
      h("p", {}, `The topic is deleted from all brokers, with ${at.messages === null ? "all of its messages" : counted(at.messages, "message")}. This can't be undone.`),
      h("div", { class: "panel" }, table(columns, rows, { cards: false, key: (row) => row.broker })),
      at.groups.length > 0 && note("warn", `${at.groups.length === 1 ? "This group consumes" : "These groups consume"} it: ${at.groups.map((one) => `${one.name}${one.lag ? ` (${counted(one.lag, "message")} not consumed yet)` : ""}`).join(", ")}.`),
      at.unreachable.length > 0 && note("warn", `${at.unreachable.join(", ")} can't be reached and keeps the topic.`),
    ),
    "Delete",
    async () => {
      await del(`/topics/${part(name)}`, { confirm: name });
      toast(`Deleted ${name}`);
      page.go("/topics");
    },
    { danger: true, confirm: name },
  );
}
