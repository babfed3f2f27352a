// One group: members, queues, subscriptions; reset of offsets with preview and undo.

import { del, may, part, post } from "../api.js";
import { changeSettings, perBroker } from "../changes.js";
import { h, show } from "../dom.js";
import { ago, compact, count, counted, countText, duration, durationText, rateFigure, unknown } from "../format.js";
import { ask, badge, body, command, dialog, empty, errorNote, facts, failed, field, note, options, panel, stat, table, toast } from "../ui.js";

export default async function group(page) {
  const [name] = page.params;
  const path = `/groups/${part(name)}`;
  page.title(name);
  const head = h("span", { class: "row" });
  const health = h("div", {});
  const content = h("div", { class: "stack" });
  const resets = h("div", {});
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("div", { class: "crumb" }, h("a", { href: "/groups" }, "Groups")),
      h("h1", {}, name),
      head,
      h(
        "div",
        { class: "actions" },
        may("operate") && h("button", { class: "primary", type: "button", onclick: () => reset(page, path, name, () => recent(page, path, resets)) }, "Reset offsets"),
        h("button", { type: "button", onclick: () => explain(page, path, health) }, "Explain"),
        may("operate") && h("button", { type: "button", onclick: () => settings(page, path, name) }, "Settings"),
        may("operate") && h("button", { class: "danger", type: "button", onclick: () => remove(page, path, name) }, "Delete"),
      ),
    ),
    health,
    content,
    resets,
  );
  recent(page, path, resets).catch(() => {});
  await page.every(5000, async () => {
    const at = await page.get(path);
    if (page.signal.aborted) return;
    page.group = at;
    show(head, at.model && badge(at.model.toLowerCase()), at.consume_type && badge(at.consume_type.toLowerCase().replaceAll("_", " ")), !at.members.length && badge("no members", "bad"));
    show(content, view(at));
  });
}

function view(at) {
  return [
    at.unreachable.length > 0 && note("warn", `Without the queues of ${at.unreachable.join(", ")}, which can't be reached.`),
    at.silent_members.length > 0 && note("warn", `These members do not tell what they do: ${at.silent_members.join(", ")}.`),
    h(
      "div",
      { class: "stats" },
      stat("Lag", compact(at.lag), { note: "messages", id: "lag" }),
      stat("Behind", duration(at.lag_ms), { note: "age of the oldest one", id: "behind" }),
      stat("Consumed", rateFigure(at.rate_out), { unit: "msg/s" }),
      stat("Members", String(at.members.length), { note: "connected", id: "members" }),
      oldestInWork(at),
      stat("Dead letters", at.has_dead_letters ? h("a", { href: `/dead-letters/${part(at.name)}` }, count(at.dead_letters)) : "0", {}),
    ),
    h("div", { class: "columns three" }, members(at), subscriptions(at), settingsPanel(at)),
    queues(at),
  ];
}

// The oldest message that a member has received and not acknowledged.
function oldestInWork(at) {
  const name = "Oldest in work";
  const id = "oldest-in-work";
  if (at.oldest_in_work_problem) return stat(name, unknown(at.oldest_in_work_problem), { note: at.oldest_in_work_problem, id });
  if (!at.oldest_in_work) return stat(name, "none", { note: "no message is unacknowledged", id });
  const { topic, broker: server, queue, offset, store_ms, since_ms } = at.oldest_in_work;
  const link = h("a", { href: `/message/${part(topic)}/${part(server)}/${queue}/${offset}` }, `${topic} ${server}/${queue} @ ${offset}`);
  const worked = since_ms === null ? "" : `handled for ${durationText(Math.max(Date.now() - since_ms, 0))}`;
  return stat(name, duration(Math.max(Date.now() - store_ms, 0)), { note: [h("div", {}, link), worked], id });
}

function queues(at) {
  if (!at.queues.length) return panel("Queues", empty("The group has no offsets yet", "They appear when a member has consumed its first messages."), { id: "queues" });
  const columns = [
    { label: "Queue", cell: (row) => h("span", { class: "name break" }, `${row.topic} ${row.broker}/${row.queue}`) },
    { label: "Lag", num: true, cell: (row) => count(row.lag) },
    { label: "Behind", num: true, cell: (row) => duration(row.lag_ms) },
    { label: "Committed", num: true, cell: (row) => count(row.committed) },
    { label: "Next offset", num: true, cell: (row) => count(row.max_offset) },
    { label: "In work", num: true, cell: (row) => count(row.in_work) },
    { label: "Member", cell: (row) => (row.client_id ? h("span", { class: "break small" }, row.client_id) : unknown("no member says that it has this queue")) },
  ];
  return panel("Queues", table(columns, at.queues, { key: (row) => `${row.topic}/${row.broker}/${row.queue}` }), { id: "queues" });
}

function members(at) {
  if (!at.members.length) return panel("Members", empty("No consumer is connected", "Start one with this group; messages wait meanwhile."), { id: "members" });
  return panel(
    "Members",
    h("div", { class: "alarms" }, at.members.map((one) =>
      h("div", { class: "alarm" }, h("div", { class: "grow" }, h("div", { class: "name break" }, one.client_id), h("div", { class: "muted small" }, `${one.address} · ${one.language.toLowerCase()} ${one.version} · ${counted(one.queues, "queue")}`))),
    )),
    { id: "members" },
  );
}

function subscriptions(at) {
  if (!at.subscriptions.length) return null;
  return panel("Subscriptions", body(facts(at.subscriptions.map((one) => [one.topic, h("code", {}, one.expression || "*")]))));
}

function settingsPanel(at) {
  if (!Object.keys(at.settings).length) return null;
  const yesNo = (name, yes, no) => perBroker(at.settings, name, (value) => (value ? yes : no));
  const consumption = yesNo("consume_enabled", "enabled", "disabled");
  return panel(
    "Settings",
    body(
      facts([
        ["Consumption", consumption === "enabled" ? consumption : consumption === "disabled" ? badge(consumption, "bad") : consumption],
        ["Attempts before a dead letter", perBroker(at.settings, "retries_max")],
        ["Broadcasting", yesNo("broadcast_enabled", "allowed", "not allowed")],
        ["Orderly", yesNo("orderly", "yes", "no")],
      ]),
    ),
    { id: "settings" },
  );
}

async function explain(page, path, box) {
  show(box, panel("Explanation", body(h("p", { class: "muted" }, "Asking brokers and members …"))));
  try {
    const found = await page.get(`${path}/explain`);
    show(
      box,
      panel(
        "Explanation",
        h("div", { class: "body stack" },
          h("div", { class: "verdict" }, badge(found.verdict.replaceAll("_", " "), found.healthy ? "good" : "warn"), h("strong", { class: "grow" }, found.text)),
          found.partial.map((text) => note("warn", `Partial: ${text}`)),
          h("ul", { class: "timeline" }, found.facts.map((fact) => h("li", { class: fact.status === "problem" ? "bad" : fact.status === "unknown" ? "unknown" : "" }, h("div", {}, h("span", { class: "faint small" }, fact.kind.replaceAll("_", " ")), h("div", {}, fact.text))))),
          found.command && command(found.command),
        ),
        { id: "explanation" },
      ),
    );
  } catch (error) {
    show(box, errorNote(error));
  }
}

const TARGETS = [["first", "the first message"], ["last", "the end: skip everything"], ["time", "a time"], ["shift", "a number of messages"], ["group", "the offsets of another group"]];

function reset(page, path, name, done) {
  const topics = (page.group?.topics || []).filter((one) => !one.startsWith("%RETRY%"));
  const topic = h("input", { list: "reset-topics", value: topics[0] || "", autocomplete: "off" });
  const to = h("select", {}, options(TARGETS, "time"));
  const value = h("input", { value: "-1h", autocomplete: "off" });
  const label = h("span", {}, "Time, as 2026-08-01T12:00 or -1h");
  const valueField = h("label", { class: "field" }, label, value);
  to.addEventListener("change", () => {
    valueField.hidden = ["first", "last"].includes(to.value);
    const kinds = { time: ["Time, as 2026-08-01T12:00 or -1h", "-1h"], shift: ["Messages forward; negative: back", "-100"], group: ["Group", ""] };
    if (kinds[to.value]) {
      label.textContent = kinds[to.value][0];
      value.value = kinds[to.value][1];
    }
  });
  ask(
    `Reset the offsets of ${name}`,
    h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Topic", topic), h("datalist", { id: "reset-topics" }, topics.map((one) => h("option", { value: one }))), field("Go to", to), valueField),
    "Preview",
    async () => {
      const wanted = { topic: topic.value.trim(), to: to.value };
      if (to.value === "time") wanted.time = value.value.trim();
      if (to.value === "shift") wanted.shift = Number(value.value);
      if (to.value === "group") wanted.group = value.value.trim();
      preview(path, name, await post(`${path}/reset/preview`, wanted), done);
    },
  );
}

function preview(path, name, plan, done) {
  const columns = [
    { label: "Queue", cell: (row) => `${row.broker} / ${row.queue}` },
    { label: "Now", num: true, cell: (row) => count(row.old) },
    { label: "After", num: true, cell: (row) => count(row.new) },
    { label: "Effect", num: true, cell: (row) => (row.skipped === null ? unknown() : row.skipped > 0 ? `${countText(row.skipped)} skipped` : row.skipped < 0 ? `${countText(-row.skipped)} again` : "none") },
  ];
  ask(
    `Preview: ${plan.topic} for ${name}`,
    h(
      "div",
      { class: "stack" },
      h("p", {}, `${countText(plan.skipped)} messages will be skipped, ${countText(plan.repeated)} will be consumed again. Nothing has changed yet.`),
      h("div", { class: "panel", id: "preview" }, table(columns, plan.moves, { cards: false, key: (row) => `${row.broker}/${row.queue}` })),
    ),
    "Apply",
    async () => {
      const result = await post(`${path}/reset/apply`, { token: plan.token });
      result.failed.forEach((one) => toast(`${one.broker}/${one.queue}: ${one.problem}`, { bad: true }));
      toast(`Reset ${result.moves.length} queues of ${plan.topic}`);
      await done();
    },
    { large: true },
  );
}

async function recent(page, path, box) {
  const found = await page.get(`${path}/resets`);
  if (!found.rows.length) return;
  const columns = [
    { label: "Reset", cell: (row) => ago(row.at_ms) },
    { label: "Topic", cell: (row) => row.topic },
    { label: "Queues", num: true, cell: (row) => count(row.queues) },
    { label: "By", cell: (row) => row.user },
    {
      label: "",
      num: true,
      cell: (row) => (row.undone ? badge("undone") : may("operate") && h("button", { class: "small", type: "button", "data-undo": true, onclick: () => undo(page, path, row, box) }, "Undo")),
    },
  ];
  show(box, panel("Resets", table(columns, found.rows, { key: (row) => row.token }), { id: "resets" }));
}

function undo(page, path, row, box) {
  ask("Undo this reset?", h("p", {}, `The offsets of ${row.queues} queues of ${row.topic} get the values that they had before.`), "Undo", async () => {
    const result = await post(`${path}/reset/undo`, { token: row.token });
    toast(`Restored ${result.moves.length} queues`);
    await recent(page, path, box);
  });
}

function settings(page, path, name) {
  if (!Object.keys(page.group?.settings || {}).length) {
    dialog(`Settings of ${name}`, h("p", {}, "No broker has settings of this group."), (close) => h("button", { type: "button", onclick: close }, "Close"));
    return;
  }
  changeSettings({
    title: `Settings of ${name}`,
    brokers: page.group.settings,
    path,
    fields: [
      { name: "consume_enabled", label: "Members may consume", flag: true },
      { name: "broadcast_enabled", label: "Members may broadcast", flag: true },
      { name: "retries_max", label: "Attempts before a message becomes a dead letter", min: -1, max: 1000 },
    ],
    done: () => page.go(path),
  });
}

// The messages of a topic; 0 if there is no such topic.
const messagesOf = (page, topic) =>
  page.get(`/topics/${part(topic)}`).then((found) => found.messages, (error) => {
    if (error.status === 404) return 0;
    throw error;
  });

async function remove(page, path, name) {
  const found = await Promise.all([page.get(path), messagesOf(page, `%RETRY%${name}`), messagesOf(page, `%DLQ%${name}`)]).catch(failed);
  if (!found) return;
  const [at, retries, dead] = found;
  const queues = at.queues.filter((one) => one.committed !== null);
  const topics = new Set(queues.map((one) => one.topic));
  ask(
    `Delete ${name}?`,
    h(
      "div",
      { class: "stack", id: "affected" },
      h("p", {}, "The group is deleted from all brokers. This can't be undone. With it go:"),
      facts([
        ["Offsets", queues.length ? `of ${counted(queues.length, "queue")} of ${[...topics].join(", ")}` : "none"],
        ["Messages in the retry topic", count(retries)],
        ["Dead letters", count(dead)],
      ]),
      at.members.length > 0 && note("warn", `${counted(at.members.length, "consumer")} ${at.members.length === 1 ? "is" : "are"} connected: ${at.members.map((one) => one.client_id).join(", ")}.`),
      at.unreachable.length > 0 && note("warn", `${at.unreachable.join(", ")} can't be reached and keeps the group.`),
    ),
    "Delete",
    async () => {
      await del(path, { confirm: name });
      toast(`Deleted ${name}`);
      page.go("/groups");
    },
    { danger: true, confirm: name },
  );
}

