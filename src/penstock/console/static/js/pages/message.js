// One message: body in several decoders, properties, trace, verdict of each group, resend.

import { may, part, post } from "../api.js";
import { h, show } from "../dom.js";
import { bytes, durationText, time, timeText } from "../format.js";
import { ask, badge, body, command, copy, empty, errorNote, facts, field, note, options, panel, save, segments, toast } from "../ui.js";
import { follow } from "./dead_letters.js";

const GOOD = ["consumed"];
const NEUTRAL = ["filtered", "waiting", "in_work", "delayed", "half", "popped", "unknown", "not_subscribed"];
const EVENTS = { Pub: "Sent", SubBefore: "Delivered", SubAfter: "Handled", EndTransaction: "Transaction ended", Recall: "Recalled" };

export default async function message(page) {
  const [topic, broker, queue, offset] = page.params;
  const path = `/message/${part(topic)}/${part(broker)}/${queue}/${offset}`;
  page.title(`Message ${offset}`);
  const at = await page.get(path);
  page.title(at.keys[0] || at.id);
  const verdicts = h("div", {});
  const trace = h("div", {});
  const report = h("div", {});
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("div", { class: "crumb" }, h("a", { href: `/messages?topic=${part(topic)}` }, `Messages of ${topic}`)),
      h("h1", {}, at.keys.length ? at.keys.join(", ") : "Message"),
      at.tags && badge(at.tags, "accent"),
      h("span", { class: "sub" }, time(at.store_ms, true)),
      h(
        "div",
        { class: "actions" },
        may("operate") && h("button", { class: "primary", type: "button", onclick: () => resend(page, path, report) }, "Send again"),
        h("button", { type: "button", onclick: () => copy(at.id) }, "Copy the id"),
        h("button", { type: "button", onclick: () => save(`/api${path}/export`) }, "Export"),
      ),
    ),
    report,
    h(
      "div",
      { class: "columns wide-left" },
      h("div", { class: "stack" }, bodyPanel(at), verdicts, trace),
      h("div", { class: "stack" }, placePanel(at), propertiesPanel(at)),
    ),
  );
  show(verdicts, panel("Groups", body(h("p", { class: "muted" }, "Asking the groups …"))));
  show(trace, panel("Trace", body(h("p", { class: "muted" }, "Reading the trace …"))));
  page.groups = [];
  await Promise.all([
    page.get(`${path}/groups`).then((found) => {
      page.groups = found.rows.map((one) => one.group);
      show(verdicts, verdictPanel(page, path, found));
    }, (error) => error.name !== "AbortError" && show(verdicts, panel("Groups", body(errorNote(error))))),
    page.get(`${path}/trace`).then((found) => show(trace, tracePanel(found)), (error) => error.name !== "AbortError" && show(trace, panel("Trace", body(errorNote(error))))),
  ]);
}

function bodyPanel(at) {
  const content = h("div", {});
  const draw = (name) => show(content, h("pre", { class: `code${name === "hex" ? " hex" : ""}`, "data-body": name }, at.body.formats[name]));
  const names = Object.keys(at.body.formats);
  draw(at.body.format);
  return panel(
    "Body",
    body(
      at.body.problem && note("bad", at.body.problem),
      at.body.bytes ? content : h("p", { class: "muted" }, "The body is empty."),
      at.body.shown_bytes < at.body.bytes && note("warn", `Only the first ${at.body.shown_bytes} of ${at.body.bytes} bytes are shown.`),
    ),
    { actions: [h("span", { class: "faint" }, bytes(at.body.bytes)), segments(names.map((name) => [name, name === "json" ? "JSON" : name === "msgpack" ? "MessagePack" : name === "hex" ? "Hex" : "Text"]), at.body.format, draw)] },
  );
}

function placePanel(at) {
  return panel(
    "Place",
    body(
      facts([
        ["Topic", h("a", { href: `/topics/${part(at.topic)}` }, at.topic)],
        at.sent_to !== at.topic && ["Sent to", at.sent_to],
        ["Queue", `${at.broker} / ${at.queue}`],
        ["Offset", String(at.offset)],
        ["Id", h("code", {}, at.id)],
        at.unique_id !== null && at.offset_id !== at.id && ["Offset id", h("code", {}, at.offset_id)],
        ["Sent", [time(at.born_ms, true), ` by ${at.born_host}`]],
        ["Stored", [time(at.store_ms, true), ` at ${at.store_host}`]],
        at.reconsume_times > 0 && ["Attempts before", String(at.reconsume_times)],
        at.transaction_id && ["Transaction", h("code", {}, at.transaction_id)],
      ]),
    ),
  );
}

function propertiesPanel(at) {
  const own = Object.entries(at.properties);
  const system = Object.entries(at.system_properties);
  const rows = (pairs) => facts(pairs.map(([name, value]) => [name, h("code", {}, value)]));
  return panel(
    "Properties",
    body(
      own.length ? rows(own) : h("p", { class: "muted" }, "The application has set none."),
      system.length > 0 && h("details", {}, h("summary", { class: "muted" }, `${system.length} of RocketMQ's own`), rows(system)),
    ),
  );
}

function verdictPanel(page, path, found) {
  if (!found.rows.length) {
    return panel("Groups", empty("No group consumes this topic", "So nobody has received this message. Start a consumer that subscribes to the topic."), { id: "verdicts" });
  }
  return panel(
    "Groups",
    h("div", { class: "alarms" }, found.rows.map((one) => {
      const kind = GOOD.includes(one.verdict) ? "good" : NEUTRAL.includes(one.verdict) ? "info" : "bad";
      const more = h("div", { class: "stack" });
      const explain = h("button", { class: "small", type: "button", onclick: () => facts_(page, path, one, more, explain) }, "Why?");
      return h(
        "div",
        { class: "alarm", "data-group": one.group },
        h(
          "div",
          { class: "grow stack" },
          h("div", { class: "verdict" }, h("a", { class: "name", href: `/groups/${part(one.group)}` }, one.group), badge(one.verdict.replaceAll("_", " "), kind), h("span", { class: "grow muted" }, one.text)),
          one.partial.map((text) => note("warn", `Partial: ${text}`)),
          more,
        ),
        h("span", { class: "row nowrap" }, explain, may("operate") && h("button", { class: "small", type: "button", onclick: () => again(path, one.group) }, "Consume again")),
      );
    })),
    { id: "verdicts", foot: found.left_out > 0 && `${found.left_out} more groups are left out.` },
  );
}

async function facts_(page, path, one, more, button) {
  button.disabled = true;
  try {
    const found = await page.get(`${path}/groups/${part(one.group)}`);
    show(
      more,
      h("ul", { class: "timeline", "data-facts": true }, found.facts.map((fact) =>
        h("li", { class: fact.status === "problem" ? "bad" : fact.status === "unknown" ? "unknown" : "" }, h("div", {}, h("span", { class: "faint small" }, fact.kind.replaceAll("_", " ")), h("div", {}, fact.text))),
      )),
      found.command && command(found.command),
    );
  } catch (error) {
    show(more, errorNote(error));
    button.disabled = false;
  }
}

function again(path, group) {
  ask(
    "Consume again?",
    h("p", {}, `A connected consumer of ${group} handles the message now. No message is stored, and no offset changes.`),
    "Consume",
    async () => {
      const result = await post(`${path}/consume`, { group });
      toast(`${result.client_id}: ${result.success ? "success" : result.result} in ${durationText(result.spent_ms)}${result.remark ? ` (${result.remark})` : ""}`, { bad: !result.success });
    },
  );
}

function resend(page, path, report) {
  const to = h("select", {}, options([["", "its topic: all groups receive it"], ...page.groups.map((name) => [name, `only the group ${name}`])], ""));
  ask(
    "Send this message again",
    h("div", { class: "stack" }, h("p", { class: "muted" }, "A copy is stored with the same body, id, keys and properties. The message itself stays where it is."), field("Send to", to)),
    "Send again",
    async () => follow(page, await post(`${path}/resend`, { group: to.value || undefined }), report),
  );
}

function tracePanel(found) {
  if (found.problem) return panel("Trace", body(note("warn", found.problem)), { id: "trace" });
  if (!found.available) {
    return panel("Trace", empty("There is no trace topic", "Turn on broker.trace_topic at the brokers, and trace=True at the clients."), { id: "trace" });
  }
  if (!found.events.length) {
    return panel("Trace", empty("Nothing was recorded", "The clients of this message do not write traces, or have not written them yet. Python's clients write them with trace=True."), { id: "trace" });
  }
  return panel(
    "Trace",
    body(
      h("ul", { class: "timeline" }, found.events.map((event) =>
        h(
          "li",
          { class: event.success === false ? "bad" : "" },
          h(
            "div",
            {},
            h("div", { class: "row" }, h("strong", {}, EVENTS[event.type] || event.type), event.group && badge(event.group), event.success === false && badge("failed", "bad"), event.result && event.result !== "success" && badge(event.result, "warn")),
            h("div", { class: "muted small" }, event.time_ms ? timeText(event.time_ms, true) : "time unknown", event.cost_ms !== null && ` · ${durationText(event.cost_ms)}`, event.client && ` · ${event.client}`),
          ),
        ),
      )),
    ),
    { id: "trace" },
  );
}
