// Transactions: open half messages and their checks.

import { part } from "../api.js";
import { h, show } from "../dom.js";
import { ago, agoFigure, count, countText, timeText } from "../format.js";
import { badge, empty, note, panel, stat, table } from "../ui.js";

export default async function transactions(page) {
  page.title("Transactions");
  const stats = h("div", { class: "stats" });
  const list = h("div", { class: "stack" });
  page.root.append(h("div", { class: "page-head" }, h("h1", {}, "Transactions")), stats, list);
  await page.every(15000, async () => {
    const at = await page.get("/transactions");
    const silent = Object.entries(at.producers).filter(([, n]) => !n).map(([name]) => name);
    show(
      stats,
      stat("Open half messages", countText(at.rows.length), { note: "without an outcome", id: "open" }),
      stat("Oldest", at.rows.length ? agoFigure(at.rows[0].born_ms) : "none", { note: at.rows.length > 0 && timeText(at.rows[0].born_ms) }),
      stat("Producer groups", String(Object.keys(at.producers).length), { note: "are asked for the outcome" }),
    );
    show(
      list,
      at.partial.map((text) => note("warn", `Partial: ${text}.`)),
      at.unreachable.length > 0 && note("warn", `Without ${at.unreachable.join(", ")}, which can't be reached.`),
      silent.map((name) => note("warn", `No producer of ${name} is connected, so nobody can say whether its half messages are to be committed. Start one.`)),
      view(at),
    );
  });
}

function view(at) {
  if (!at.rows.length) {
    return panel(null, empty("No transaction is open", "A half message appears here until its producer commits it or rolls it back."));
  }
  const columns = [
    { label: "Sent", cell: (row) => h("span", { class: "name" }, ago(row.born_ms)) },
    { label: "Topic", cell: (row) => h("a", { href: `/topics/${part(row.topic)}` }, row.topic) },
    { label: "Keys", cell: (row) => h("span", { class: "break" }, row.keys.join(", ")) },
    { label: "Id", class: "mono", cell: (row) => h("span", { class: "break small" }, row.id) },
    { label: "Producer group", cell: (row) => [row.group, " ", at.producers[row.group] ? badge(`${at.producers[row.group]} connected`, "good") : badge("none connected", "bad")] },
    { label: "Checks", num: true, cell: (row) => count(row.checks) },
    { label: "Broker", cell: (row) => row.broker },
  ];
  return panel(null, table(columns, at.rows, { key: (row) => row.id }), { foot: "A half message without an outcome is never delivered after the number of checks that its broker sets (transactionCheckMax): Penstock rolls it back after 5 checks, Apache's brokers give it up after 15, unless they are configured differently." });
}
