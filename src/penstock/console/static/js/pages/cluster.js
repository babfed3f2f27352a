// Cluster: brokers, replication, roles, elections, settings.

import { may, part, post, put } from "../api.js";
import { h, show } from "../dom.js";
import { ago, bytes, count, percent, rate, time, unknown } from "../format.js";
import { ask, badge, body, dialog, empty, errorNote, facts, field, note, panel, searchBox, table, toast, usage } from "../ui.js";

export default async function cluster(page) {
  page.title("Cluster");
  const content = h("div", { class: "stack" });
  const elections = h("div", {});
  page.root.append(h("div", { class: "page-head" }, h("h1", {}, "Cluster")), content, elections);
  const first = page.every(5000, async () => {
    const [at, found] = await Promise.all([page.get("/cluster"), page.get("/cluster/elections")]);
    show(content, view(page, at));
    if (at.ready) show(elections, electionPanel(found));
  });
  await first;
}

function view(page, at) {
  if (!at.ready) return panel(null, empty("The cluster is being read", ""));
  if (!at.brokers.length) {
    return panel(null, empty("No broker is registered", "Start one that knows these NameServers.", `penstock broker --nameservers ${at.nameservers.join(";")}`));
  }
  const columns = [
    { label: "Broker", cell: (row) => [h("span", { class: "name" }, row.name), " ", row.is_master ? badge("master", "accent") : badge(row.id ? `replica ${row.id}` : "replica"), " ", row.state === "down" ? badge("down", "bad") : row.state === "silent" && badge("does not answer", "bad")] },
    { label: "Address", cell: (row) => h("span", { class: "nowrap" }, row.address) },
    { label: "Role", cell: (row) => (row.role ? h("span", { class: "nowrap" }, row.role === "slave" ? "replica" : row.role.replaceAll("_", " ")) : unknown()) },
    { label: "In sync", cell: (row) => (row.is_master ? "" : row.in_sync === null ? unknown() : row.in_sync ? badge("in sync", "good") : badge("behind", "warn")) },
    { label: "Behind", num: true, cell: (row) => (row.is_master ? "" : bytes(row.behind)) },
    { label: "Stored", num: true, cell: (row) => rate(row.rate_in) },
    { label: "Read", num: true, cell: (row) => rate(row.rate_out) },
    { label: "Disk", num: true, cell: (row) => h("span", { class: "nowrap" }, usage(row.disk_used), percent(row.disk_used)) },
    { label: "Started", num: true, cell: (row) => ago(row.state === "up" ? row.started_ms : null) },
    { label: "", num: true, cell: (row) => h("button", { class: "small", type: "button", onclick: () => broker(page, row) }, "Details") },
  ];
  return [
    at.problem && note("bad", at.problem),
    ...at.brokers.filter((row) => row.problem || row.replication_error).map((row) => note("bad", `${row.name} (${row.address}): ${row.problem || row.replication_error}`, row.state !== "up" && row.seen_ms && ["; its last answer was ", ago(row.seen_ms)], ".")),
    ...at.clusters.map((name) => {
      const rows = at.brokers.filter((row) => row.cluster === name);
      rows.sort((one, other) => one.name.localeCompare(other.name) || other.is_master - one.is_master || one.id - other.id);
      return panel(name, table(columns, rows, { key: (row) => row.address }), { foot: `NameServers: ${at.nameservers.join(", ")}` });
    }),
  ];
}

async function broker(page, row) {
  const settings = h("div", {}, h("p", { class: "muted" }, "Reading the settings …"));
  dialog(
    `${row.name} (${row.is_master ? "master" : row.id ? `replica ${row.id}` : row.address})`,
    [
      facts([
        ["Version", row.penstock_version ? `Penstock ${row.penstock_version}, as RocketMQ ${row.version || "unknown"}` : row.version || unknown()],
        ["Log", [bytes(row.log_bytes), row.earliest_ms ? [", since ", time(row.earliest_ms)] : ""]],
        ["Stored today", count(row.stored_today)],
        ["Log end", row.log_end === null ? unknown() : [count(row.log_end), row.state !== "up" && " when it answered last"]],
        ["Epoch", row.epoch === null ? "none" : String(row.epoch)],
        row.controllers.length > 0 && ["Controllers", row.controllers.join(", ")],
      ]),
      row.state === "up" ? settings : note("bad", row.problem),
    ],
    (close) => [
      row.is_master && may("admin") && h("button", { type: "button", onclick: () => writes(row, false) }, "Stop writes"),
      row.is_master && may("admin") && h("button", { type: "button", onclick: () => writes(row, true) }, "Allow writes"),
      h("button", { type: "button", onclick: close }, "Close"),
    ],
    { large: true },
  );
  if (row.state !== "up") return;
  const path = `/cluster/brokers/${part(row.name)}/${row.id}/settings`;
  try {
    const found = await page.get(path);
    const list = h("div", {});
    const draw = (text) => {
      const rows = found.rows.filter((one) => one.name.toLowerCase().includes(text.toLowerCase()));
      const columns = [
        { label: "Setting", class: "wide", cell: (one) => h("code", { class: "break" }, one.name) },
        { label: "Value", cell: (one) => h("span", { class: "break" }, one.value) },
        { label: "Change", cell: (one) => (one.live === null ? unknown("this broker does not say") : one.live ? badge("live", "good") : badge("fixed")) },
        may("admin") && { label: "", num: true, cell: (one) => one.live !== false && h("button", { class: "small", type: "button", onclick: () => change(path, row, one) }, "Change") },
      ].filter(Boolean);
      show(list, rows.length ? table(columns, rows, { cards: false, key: (one) => one.name }) : h("p", { class: "muted" }, "No setting matches."));
    };
    draw("");
    show(settings, h("div", { class: "stack" }, searchBox("Filter the settings", "", draw), list));
  } catch (error) {
    show(settings, errorNote(error));
  }
}

function change(path, row, one) {
  const value = h("input", { value: one.value });
  ask(`Change ${one.name} of ${row.name}`, h("div", { class: "stack" }, field("Value", value), one.live === null && note("warn", "This broker does not say whether the change takes effect at once.")), "Change", async () => {
    const after = await put(path, { name: one.name, value: value.value });
    toast(`${one.name} is ${after.value}`);
  });
}

function writes(row, allowed) {
  ask(
    allowed ? `Allow writes to ${row.name}?` : `Stop writes to ${row.name}?`,
    h("p", {}, allowed ? "Producers use the broker again." : "The write permission is removed from the routes, so producers avoid the broker. Consumers go on."),
    allowed ? "Allow" : "Stop writes",
    async () => {
      await post(`/cluster/brokers/${part(row.name)}/writes`, { allowed });
      toast(allowed ? "Writes are allowed" : "Writes are stopped");
    },
    { danger: !allowed },
  );
}

function electionPanel(found) {
  const problems = found.problems.map((one) => note("warn", `The elections of ${one.broker} are not current: ${one.problem}`));
  if (!found.rows.length) {
    if (problems.length) return problems;
    return panel("Elections", body(h("p", { class: "muted" }, "No controller tells of elections. Masters are fixed, or the controllers are Apache's, which keep none.")));
  }
  const columns = [
    { label: "Time", cell: (row) => h("span", { class: "name" }, time(row.time_ms)) },
    { label: "Broker", cell: (row) => row.broker },
    { label: "Epoch", num: true, cell: (row) => count(row.epoch) },
    { label: "New master", cell: (row) => (row.master_id < 0 ? "none" : [row.master_address && h("span", { class: "nowrap" }, row.master_address), ` (id ${row.master_id})`]) },
    { label: "Reason", cell: (row) => row.reason },
  ];
  return [...problems, panel("Elections", table(columns, found.rows, { key: (row) => `${row.broker}/${row.epoch}` }), { id: "elections" })];
}
