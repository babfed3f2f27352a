// Messages: one search box, pages, live tail, saved searches, export.

import { del, get, part, post, query } from "../api.js";
import { h, icon, show } from "../dom.js";
import { bytes, counted, countText, time } from "../format.js";
import { badge, body, dialog, download, empty, errorNote, failed, field, note, panel, save, searchBox, segments, table, toast } from "../ui.js";

const TAIL_ROWS = 500;

export default async function messages(page) {
  const at = {
    topic: page.query.get("topic") || "",
    q: page.query.get("q") || "",
    order: page.query.get("order") || "newest",
    tail: page.query.get("tail") || "",
  };
  const state = { rows: [], resume: null, source: null, found: null };
  const list = h("div", { class: "stack" });
  const topics = h("datalist", { id: "topic-names" });
  const topic = h("input", { list: "topic-names", value: at.topic, placeholder: "Topic", "aria-label": "Topic", autocomplete: "off", spellcheck: "false" });
  const tailButton = h("button", { type: "button", onclick: () => change({ tail: at.tail ? "" : "1" }) });
  const box = searchBox("Search: an id, a key, or tag:paid since:-1h body:text queue:broker-a/0 offset:120", at.q, () => {}, { id: "message-search" });
  const input = box.querySelector("input");
  const run = () => change({ topic: topic.value.trim(), q: input.value.trim() });
  topic.addEventListener("change", run);
  topic.addEventListener("focus", async () => {
    const found = await get(`/names${query({ query: topic.value })}`).catch(() => ({ topics: [] }));
    show(topics, found.topics.map((name) => h("option", { value: name })));
  });

  function change(values) {
    Object.assign(at, values);
    page.remember({ topic: at.topic, q: at.q, order: at.order === "newest" ? "" : at.order, tail: at.tail });
    begin();
  }

  function begin() {
    state.source?.close();
    state.source = null;
    show(tailButton, at.tail ? [icon("stop"), "Stop the tail"] : [icon("play"), "Live tail"]);
    tailButton.classList.toggle("primary", Boolean(at.tail));
    if (at.tail) tail(at, state, list, page);
    else search(at, state, list, page, false);
  }

  page.signal.addEventListener("abort", () => state.source?.close());
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("h1", {}, "Messages"),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: () => saved(page, at) }, "Saved searches"),
        h("button", { type: "button", onclick: () => exportAll(at, state) }, "Export"),
        tailButton,
      ),
    ),
    h(
      "form",
      { class: "row", role: "search", onsubmit: (event) => { event.preventDefault(); run(); } },
      topic,
      topics,
      box,
      h("button", { type: "submit", class: "primary" }, "Search"),
      segments([["newest", "Newest first"], ["oldest", "Oldest first"]], at.order, (order) => change({ order })),
    ),
    list,
  );
  begin();
}

async function search(at, state, list, page, more) {
  if (!at.topic && !at.q) {
    show(list, panel(null, [empty("Which message?", "Choose a topic to browse it, or search for a message id or a key in all topics."), hints()]));
    return;
  }
  try {
    const found = await page.get(`/messages${query({ topic: at.topic, q: at.q, order: at.order, resume: more ? state.resume : "" })}`);
    if (page.signal.aborted || at.tail) return;
    state.rows = more ? [...state.rows, ...found.rows] : found.rows;
    state.scanned = (more ? state.scanned : 0) + (found.scanned || 0);
    state.resume = found.resume;
    state.found = found;
    show(list, results(at, state, found, () => search(at, state, list, page, true)));
  } catch (error) {
    if (error.name !== "AbortError") show(list, errorNote(error));
  }
}

function results(at, state, found, more) {
  const notes = found.notes.map((text) => note("warn", `Partial: ${text}.`));
  const searchesBodies = /\bbody:/.test(at.q);
  if (!state.rows.length) {
    const text = found.resume ? `Nothing in the ${countText(state.scanned)} messages that were read so far.` : found.how ? `${found.how[0].toUpperCase()}${found.how.slice(1)}.` : "There is no such message here.";
    return [notes, panel(null, [empty("No message found", text), found.resume && h("div", { class: "empty" }, h("button", { type: "button", onclick: more }, "Read on"))])];
  }
  const foot = [
    h("span", {}, counted(state.rows.length, "message")),
    searchesBodies && h("span", {}, `${countText(state.scanned)} read`),
    found.how && h("span", { class: "faint" }, found.how),
    found.resume && h("button", { class: "small", type: "button", onclick: more, "data-more": true }, searchesBodies ? "Read on" : "More"),
    found.resume && searchesBodies && badge("partial: not all messages were read", "warn"),
    !found.resume && found.complete && h("span", { class: "faint" }, "complete"),
  ];
  return [notes, panel(null, messageTable(state.rows, !at.topic), { foot })];
}

export function messagePath(row) {
  return `/message/${part(row.topic)}/${part(row.broker)}/${row.queue}/${row.offset}`;
}

export function messageTable(rows, withTopic) {
  const columns = [
    { label: "Stored", cell: (row) => h("a", { href: messagePath(row), class: "name" }, time(row.store_ms, true)) },
    withTopic && { label: "Topic", cell: (row) => row.topic },
    { label: "Queue", cell: (row) => h("span", { class: "nowrap" }, `${row.broker} / ${row.queue} @ ${row.offset}`) },
    { label: "Tag", cell: (row) => (row.tags ? badge(row.tags) : "") },
    { label: "Keys", cell: (row) => h("span", { class: "break" }, row.keys.join(", ")) },
    { label: "Body", class: "clip mono", cell: (row) => row.summary },
    { label: "Size", num: true, cell: (row) => bytes(row.bytes) },
  ].filter(Boolean);
  return table(columns, rows, { link: messagePath, key: (row) => `${row.broker}/${row.queue}@${row.offset}` });
}

function tail(at, state, list, page) {
  if (!at.topic) {
    show(list, panel(null, empty("Choose a topic", "A live tail shows the new messages of one topic.")));
    return;
  }
  state.rows = [];
  state.found = null;
  let leftOut = 0;
  const waiting = () => panel(null, empty(`Waiting for messages of ${at.topic}`, "New messages appear here as they arrive. No offset of a group changes."));
  show(list, waiting());
  const source = new EventSource(`/api/tail${query({ topic: at.topic, q: at.q })}`);
  state.source = source;
  source.addEventListener("messages", (event) => {
    const found = JSON.parse(event.data);
    leftOut += found.left_out;
    state.rows = [...found.rows.reverse(), ...state.rows].slice(0, TAIL_ROWS);
    show(
      list,
      panel(null, messageTable(state.rows, false), {
        foot: [badge("live", "good"), h("span", {}, `the last ${counted(state.rows.length, "message")}`), leftOut > 0 && badge(`${countText(leftOut)} were too many to show`, "warn")],
      }),
    );
  });
  source.addEventListener("problem", (event) => {
    source.close();
    const problem = JSON.parse(event.data);
    show(list, errorNote({ message: problem.message, hint: problem.hint }));
  });
  source.addEventListener("error", () => {
    if (source.readyState !== EventSource.CLOSED) return;
    page.get(`/messages${query({ topic: at.topic, q: at.q, size: 1 })}`).catch((error) => show(list, errorNote(error)));
  });
}

// The server writes the file: all messages of the search, with their bodies and properties. A search
// for an id or a key is short, and says what is missing; others are streamed to the disk.
async function exportAll(at, state) {
  if (!at.topic && !at.q) {
    toast("Search first.");
    return;
  }
  const url = `/api/messages/export${query({ topic: at.topic, q: at.q, order: at.order })}`;
  try {
    if (!state.found?.how) {
      await get(`/messages${query({ topic: at.topic, q: at.q, order: at.order, size: 1 })}`);  // or its error
      save(url);
      toast("The export contains all messages of this search. The browser shows its progress.");
      return;
    }
    const answer = await fetch(url);
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    download(`${at.topic || "messages"}.jsonl`, await answer.blob(), "application/x-ndjson");
    const missing = answer.headers.get("x-penstock-partial");
    if (missing) toast(`The export is not complete: ${missing}.`, { bad: true });
  } catch (error) {
    failed(error);
  }
}

async function saved(page, at) {
  const list = h("div", {});
  const name = h("input", { placeholder: "Name", "aria-label": "Name of the search" });
  const draw = (found) =>
    show(
      list,
      found.rows.length
        ? h("ul", { class: "stack" }, found.rows.map((one) =>
            h("li", { class: "row" },
              h("a", { href: `/messages${one.query}`, class: "grow break" }, one.name),
              h("button", { class: "plain small", type: "button", onclick: () => del(`/saved-searches/${one.id}`).then(draw, failed) }, "Delete"),
            ),
          ))
        : h("p", { class: "muted" }, "There are none yet. Search for something, then save it here."),
    );
  const box = dialog(
    "Saved searches",
    [list, (at.topic || at.q) && h("div", { class: "row" }, h("div", { class: "grow" }, field("Save the present search", name)))],
    (close) => [
      h("button", { type: "button", onclick: close }, "Close"),
      (at.topic || at.q) && h("button", {
        class: "primary", type: "button",
        onclick: () => post("/saved-searches", { name: name.value, query: query({ topic: at.topic, q: at.q, order: at.order }) }).then(draw, failed),
      }, "Save"),
    ],
  );
  box.addEventListener("click", (event) => event.target.closest("a") && box.close());
  draw(await page.get("/saved-searches"));
}

function hints() {
  const rows = [
    ["7F00000100002A9F…", "a message id, in all topics"],
    ["ORD-10042", "a key, in all topics"],
    ["tag:paid since:-1h", "messages of a topic by tag and time"],
    ["queue:broker-a/3 offset:120", "a place in a queue"],
    ["body:refused", "a text in the body"],
    ['sql:"total > 100"', "an SQL92 filter over properties"],
  ];
  return body(h("div", { class: "help" }, rows.map(([text, means]) => [h("code", {}, text), h("span", { class: "muted" }, means)])));
}
