// Groups: a list with lag (messages) and the time that they are behind.

import { may, part, post, query } from "../api.js";
import { h, show } from "../dom.js";
import { count, countText, duration, rate, unknown } from "../format.js";
import { ask, badge, empty, field, pager, panel, searchBox, segments, table, toast } from "../ui.js";

const STATES = [["all", "All"], ["behind", "Behind"], ["offline", "Without members"], ["current", "Up to date"]];
export const STATE_BADGES = { behind: ["behind", "warn"], offline: ["no members", "bad"], current: ["up to date", "good"], unknown: ["unknown", ""] };

export default async function groups(page) {
  const at = {
    query: page.query.get("query") || "",
    state: page.query.get("state") || "all",
    sort: page.query.get("sort") || "name",
    descending: page.query.get("descending") || "",
    page: Number(page.query.get("page") || 0),
  };
  const list = h("div", {});
  const update = async () => {
    const found = await page.get(`/groups${query({ ...at, page: at.page || "" })}`);
    if (!page.signal.aborted) show(list, listPanel(found, at, change));
  };
  const change = (values) => {
    Object.assign(at, values);
    page.remember({ ...at, state: at.state === "all" ? "" : at.state, sort: at.sort === "name" ? "" : at.sort, page: at.page || "" });
    update().catch((error) => page.problem(error));
  };
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, "Groups"),
      h("div", { class: "actions" }, may("operate") && h("button", { class: "primary", type: "button", onclick: () => create(page) }, "Create a group")),
    ),
    h("div", { class: "row" }, searchBox("Filter by name", at.query, (text) => change({ query: text, page: 0 })), segments(STATES, at.state, (state) => change({ state, page: 0 }))),
    list,
  );
  await page.every(5000, update);
}

function listPanel(found, at, change) {
  if (!found.matched) {
    if (at.query || at.state !== "all") return panel(null, empty("No group matches", "Change the filter."));
    if (!found.ready) return panel(null, empty("The groups are being read", "They appear in a moment."));
    return panel(null, empty("There are no consumer groups yet", "A group appears when its first consumer connects."));
  }
  const columns = [
    { label: "Group", sort: "name", cell: (row) => h("a", { class: "name", href: `/groups/${part(row.name)}` }, row.name) },
    { label: "State", cell: (row) => [badge(...STATE_BADGES[row.state]), row.partial && badge("partial", "warn")] },
    { label: "Lag", sort: "lag", num: true, cell: (row) => count(row.lag) },
    { label: "Behind", sort: "lag_ms", num: true, cell: (row) => duration(row.lag_ms) },
    { label: "Consumed", sort: "rate_out", num: true, cell: (row) => rate(row.rate_out) },
    { label: "Members", sort: "members", num: true, cell: (row) => count(row.members) },
    { label: "Dead letters", sort: "dead_letters", num: true, cell: (row) => (row.dead_letters ? h("a", { href: `/dead-letters/${part(row.name)}` }, count(row.dead_letters)) : count(row.dead_letters)) },
    { label: "Topics", cell: (row) => (row.measured_ms === null ? unknown() : topicsOf(row.topics)) },
  ];
  const unmeasured = found.matched - found.measured;
  return panel(
    null,
    table(columns, found.rows, {
      sort: at.sort,
      descending: Boolean(at.descending),
      onsort: (sort, descending) => change({ sort, descending: descending ? "1" : "", page: 0 }),
      link: (row) => `/groups/${part(row.name)}`,
      key: (row) => row.name,
    }),
    {
      foot: [
        pager(found.page, found.size, found.matched, (number) => change({ page: number })),
        unmeasured > 0 && h("span", { class: "faint" }, `The figures of ${countText(unmeasured)} groups are not known yet; they are measured in turn.`),
      ],
    },
  );
}

function topicsOf(names) {
  if (!names.length) return h("span", { class: "faint" }, "none");
  const more = names.length - 2;
  return h("span", { class: "muted break" }, names.slice(0, 2).join(", "), more > 0 && ` and ${more} more`);
}

function create(page) {
  const name = h("input", { required: true, autocomplete: "off" });
  const retries = h("input", { type: "number", min: -1, max: 1000, value: 16 });
  ask(
    "Create a group",
    h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Name", name), field("Attempts before a message becomes a dead letter", retries)),
    "Create",
    async () => {
      await post("/groups", { name: name.value.trim(), retries_max: Number(retries.value) });
      toast(`Created ${name.value.trim()}`);
      page.go(`/groups/${part(name.value.trim())}`);
    },
  );
  name.focus();
}
