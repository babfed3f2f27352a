// Scheduled: messages that wait for their delivery time; recall.

import { may, part, post } from "../api.js";
import { h, show } from "../dom.js";
import { ago, agoFigure, counted, countText, time, timeText } from "../format.js";
import { ask, badge, empty, note, panel, searchBox, stat, table, toast } from "../ui.js";

export default async function scheduled(page) {
  page.title("Scheduled");
  const stats = h("div", { class: "stats" });
  const list = h("div", { class: "stack" });
  let at = null;
  let filter = page.query.get("query") || "";
  const update = async () => {
    at = await page.get("/scheduled");
    draw();
  };
  const draw = () => {
    const level = Object.values(at.by_level).reduce((sum, n) => sum + n, 0);
    const timers = Object.values(at.by_topic).reduce((sum, n) => sum + n, 0);
    const next = at.rows.length ? at.rows[0].deliver_ms : null;
    show(
      stats,
      stat("Timer messages", countText(timers), { note: "waiting", id: "timers" }),
      stat("By delay level", countText(level), { note: "waiting, with retries", id: "levels" }),
      stat("Next delivery", next ? agoFigure(next) : "none", { note: next && timeText(next) }),
    );
    show(list, at.partial.map((text) => note("warn", `Partial: ${text}.`)), at.unreachable.length > 0 && note("warn", `Without ${at.unreachable.join(", ")}, which can't be reached.`), view(page, at, filter, update));
  };
  page.root.append(
    h("div", { class: "page-head" }, h("h1", {}, "Scheduled")),
    stats,
    h("div", { class: "row" }, searchBox("Filter by topic, key or id", filter, (text) => { filter = text; page.remember({ query: text }); if (at) draw(); })),
    list,
  );
  await page.every(15000, update);
}

function view(page, at, filter, update) {
  const text = filter.toLowerCase();
  const rows = at.rows.filter((row) => [row.topic, row.id, ...row.keys].some((value) => value.toLowerCase().includes(text)));
  if (!rows.length) {
    return panel(null, at.rows.length ? empty("No message matches", "Change the filter.") : empty("No message waits for its time", "Send one with a delay, as from Python:", 'Message("reminders", "…", delay=timedelta(hours=2))'));
  }
  const columns = [
    { label: "Delivery", cell: (row) => [h("span", { class: "name" }, time(row.deliver_ms)), " ", h("span", { class: "faint" }, ago(row.deliver_ms))] },
    { label: "Topic", cell: (row) => h("a", { href: `/topics/${part(row.topic)}` }, row.topic) },
    { label: "Keys", cell: (row) => h("span", { class: "break" }, row.keys.join(", ")) },
    { label: "Id", class: "mono", cell: (row) => h("span", { class: "break small" }, row.id) },
    { label: "Kind", cell: (row) => (row.level === null ? badge("timer", "info") : badge(`level ${row.level}`)) },
    { label: "Broker", cell: (row) => row.broker },
    may("operate") && { label: "", num: true, cell: (row) => row.recall_handle && h("button", { class: "small", type: "button", "data-recall": row.id, onclick: () => recall(row, update) }, "Recall") },
  ].filter(Boolean);
  return panel(null, table(columns, rows, { key: (row) => row.id }), { foot: counted(rows.length, "message") });
}

function recall(row, update) {
  ask(
    "Recall this message?",
    h("p", {}, `The message ${row.keys.join(", ") || row.id} to ${row.topic} is cancelled and never delivered.`),
    "Recall",
    async () => {
      await post("/scheduled/recall", { handle: row.recall_handle });
      toast("Recalled");
      await update();
    },
    { danger: true },
  );
}
