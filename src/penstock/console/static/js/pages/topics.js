// Topics: a list that is sorted, filtered and paged by the server.

import { may, part, post, query } from "../api.js";
import { h, show } from "../dom.js";
import { ago, count, countText, rate, unknown } from "../format.js";
import { ask, badge, empty, field, options, pager, panel, searchBox, segments, table, toast } from "../ui.js";

const KINDS = [["normal", "Applications"], ["retry", "Retry"], ["dlq", "Dead letters"], ["system", "System"]];
export const PERMS = [["rw", "read and write"], ["r", "read only"], ["w", "write only"], ["-", "no access"]];
export const permText = (perm) => PERMS.find(([one]) => one === perm)?.[1] ?? perm;
export const TYPES = ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"];

export default async function topics(page) {
  const at = {
    query: page.query.get("query") || "",
    kind: page.query.get("kind") || "normal",
    sort: page.query.get("sort") || "name",
    descending: page.query.get("descending") || "",
    page: Number(page.query.get("page") || 0),
  };
  const list = h("div", {});
  const kinds = h("div", {});
  const update = async () => {
    const found = await page.get(`/topics${query({ ...at, page: at.page || "" })}`);
    if (page.signal.aborted) return;
    show(kinds, segments(KINDS.map(([kind, name]) => [kind, name, countText(found.kinds[kind] || 0)]), at.kind, (kind) => change({ kind, page: 0 })));
    show(list, listPanel(found, at, change));
  };
  const change = (values) => {
    Object.assign(at, values);
    page.remember({ ...at, kind: at.kind === "normal" ? "" : at.kind, sort: at.sort === "name" ? "" : at.sort, page: at.page || "" });
    update().catch((error) => page.problem(error));
  };
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, "Topics"),
      h("div", { class: "actions" }, may("operate") && h("button", { class: "primary", type: "button", onclick: () => create(page) }, "Create a topic")),
    ),
    h("div", { class: "row" }, searchBox("Filter by name", at.query, (text) => change({ query: text, page: 0 })), kinds),
    list,
  );
  await page.every(5000, update);
}

function listPanel(found, at, change) {
  if (!found.matched) {
    if (at.query) return panel(null, empty("No topic matches", `There is no topic with “${at.query}” in its name here.`));
    if (!found.ready) return panel(null, empty("The topics are being read", "They appear in a moment."));
    return panel(null, empty("There are no topics here", "A producer creates its topic with the first message, or create one now."));
  }
  const columns = [
    { label: "Topic", sort: "name", cell: (row) => [h("a", { class: "name", href: `/topics/${part(row.name)}` }, row.name), row.differs.length > 0 ? [" ", badge("brokers differ", "warn")] : row.perm !== "rw" && [" ", badge(permText(row.perm), "warn")]] },
    { label: "Type", sort: "type", cell: (row) => (row.type === "UNSPECIFIED" ? unknown("not specified") : badge(row.type.toLowerCase())) },
    { label: "Queues", sort: "queues", num: true, cell: (row) => count(row.queues) },
    { label: "Messages", sort: "messages", num: true, cell: (row) => [count(row.messages), row.partial && badge("partial", "warn")] },
    { label: "Stored", sort: "rate_in", num: true, cell: (row) => rate(row.rate_in) },
    { label: "Last message", sort: "last_ms", num: true, cell: (row) => ago(row.last_ms) },
  ];
  const unmeasured = found.matched - found.measured;
  return panel(
    null,
    table(columns, found.rows, {
      sort: at.sort,
      descending: Boolean(at.descending),
      onsort: (sort, descending) => change({ sort, descending: descending ? "1" : "", page: 0 }),
      link: (row) => `/topics/${part(row.name)}`,
      key: (row) => row.name,
    }),
    {
      foot: [
        pager(found.page, found.size, found.matched, (number) => change({ page: number })),
        unmeasured > 0 && h("span", { class: "faint" }, `The figures of ${countText(unmeasured)} topics are not known yet; they are measured in turn.`),
      ],
    },
  );
}

function create(page) {
  const name = h("input", { required: true, autocomplete: "off" });
  const queues = h("input", { type: "number", min: 1, max: 1024, value: 8 });
  const type = h("select", {}, options([["", "not specified"], ...TYPES.map((one) => [one, one.toLowerCase()])], ""));
  ask(
    "Create a topic",
    h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Name", name), field("Queues per broker", queues), field("Message type", type)),
    "Create",
    async () => {
      await post("/topics", { name: name.value.trim(), queues: Number(queues.value), message_type: type.value || undefined });
      toast(`Created ${name.value.trim()}`);
      page.go(`/topics/${part(name.value.trim())}`);
    },
  );
  name.focus();
}
