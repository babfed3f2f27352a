// Home: rates, lag, disk, alarms as sentences, the last hour.

import { part } from "../api.js";
import { legend, lineChart, timeSteps } from "../chart.js";
import { h, show } from "../dom.js";
import { ago, compact, compactText, count, counted, countText, duration, durationText, percent, rateFigure, rateText, unknown } from "../format.js";
import { body, empty, panel, stat, table } from "../ui.js";

export default async function home(page) {
  page.title("Home");
  const stats = h("div", { class: "stats" });
  const alarms = h("div", {});
  const rates = h("div", {});
  const lags = h("div", {});
  const behind = h("div", {});
  const head = h("span", { class: "sub" });
  page.root.append(
    h("div", { class: "page-head" }, h("h1", {}, "Home"), head),
    stats,
    alarms,
    h("div", { class: "columns" }, rates, lags),
    behind,
  );
  let samples = [];
  await page.every(5000, async () => {
    const last = samples.length ? samples[samples.length - 1].at_ms : 0;
    const at = await page.get(`/overview?since_ms=${last}`);
    samples = [...samples, ...at.history].slice(-720);
    show(head, at.clusters.join(", ") || "no cluster", " · ", at.at_ms ? ["updated ", ago(at.at_ms)] : "being read");
    show(stats, figures(at));
    show(alarms, alarmPanel(at));
    const times = samples.map((one) => one.at_ms);
    const width = Math.max(rates.clientWidth - 34, 240);  // without the panel's border and space
    show(
      rates,
      panel(
        "Messages per second",
        body(
          lineChart({
            width,
            times,
            series: [
              { name: "stored", values: samples.map((one) => one.rate_in) },
              { name: "read", values: samples.map((one) => one.rate_out) },
            ],
            text: rateText,
          }),
        ),
        { actions: legend(["stored", "read"]) },
      ),
    );
    show(
      lags,
      panel(
        "Furthest behind",
        body(
          lineChart({
            width,
            times,
            series: [{ name: "behind", values: samples.map((one) => one.lag_ms) }],
            text: (ms) => (ms ? durationText(ms) : "0"),
            least: 1000,
            marksOf: timeSteps,
            empty: "No group was measured yet.",
          }),
        ),
        { actions: resolution(at), id: "behind-chart" },
      ),
    );
    show(behind, at.behind.length ? behindPanel(at) : null);
  });
}

// How old a value of the chart may be.
function resolution(at) {
  if (!at.groups) return null;
  const [used, unused] = [at.lag_round_s, at.lag_round_idle_s].map((seconds) => durationText(seconds * 1000));
  const title = `Each group is measured every ${used}. While nobody uses the console, it is measured every ${unused}, and every minute if it is among those that are furthest behind.`;
  return h("span", { class: "faint small", title }, `measured every ${used}, unwatched every ${unused}`);
}

function figures(at) {
  const known = at.groups_measured < at.groups ? `${at.groups_measured} of ${at.groups} groups known` : "";
  return [
    stat("Stored", rateFigure(at.rate_in), { unit: "msg/s", note: at.stored_today === null ? "" : `${countText(at.stored_today)} today`, id: "rate_in" }),
    stat("Read", rateFigure(at.rate_out), { unit: "msg/s", id: "rate_out" }),
    stat("Furthest behind", duration(at.lag_ms), { note: [at.lag !== null && `lag ${compactText(at.lag)} messages`, known].filter(Boolean).join(", "), id: "behind" }),
    stat("Fullest disk", percent(at.disk_used), { note: "of the brokers", id: "disk" }),
    stat("Brokers", at.ready ? `${at.brokers_answering} / ${at.brokers}` : unknown(), { note: "answer", id: "brokers" }),
    stat("Topics", at.ready ? compact(at.topics) : unknown(), { note: at.ready ? counted(at.groups, "group") : "", id: "topics" }),
  ];
}

function alarmPanel(at) {
  if (!at.ready) return panel("Alarms", empty("The cluster is being read", "The first figures appear in a moment."));
  if (!at.alarms.length) {
    if (!at.topics) {
      return panel("First steps", empty("There are no topics yet", "Send a first message, then look at it on the page Messages.", `penstock send -n ${at.nameservers[0]} Greetings "Hello, Penstock"`));
    }
    const missing = at.groups - at.groups_measured;
    const text = missing ? `All brokers answer. The lag of ${countText(missing)} of ${countText(at.groups)} groups is not known yet.` : "All brokers answer, and no group is more than a minute behind.";
    return panel("Alarms", h("div", { class: "alarms" }, h("div", { class: "alarm" }, missing ? h("span", { class: "badge" }, "no alarms so far") : h("span", { class: "badge good" }, "all well"), h("span", {}, text))));
  }
  return panel(
    "Alarms",
    h("div", { class: "alarms" }, at.alarms.map((one) => {
      const content = [h("span", { class: "dot", title: one.severity }), h("span", {}, one.sentence)];
      return one.link ? h("a", { class: `alarm ${one.severity}`, href: one.link }, content) : h("div", { class: `alarm ${one.severity}` }, content);
    })),
  );
}

function behindPanel(at) {
  const columns = [
    { label: "Group", cell: (row) => h("a", { class: "name", href: `/groups/${part(row.group)}` }, row.group) },
    { label: "Lag", num: true, cell: (row) => count(row.lag) },
    { label: "Behind", num: true, cell: (row) => duration(row.lag_ms) },
    { label: "Members", num: true, cell: (row) => count(row.members) },
  ];
  return panel("Groups that are furthest behind", table(columns, at.behind, { link: (row) => `/groups/${part(row.group)}`, key: (row) => row.group }));
}
