// Dead letters: groups that have some; select, dry run, resend with a rate and a report.

import { del, may, part, post, query } from "../api.js";
import { h, show } from "../dom.js";
import { ago, bytes, count, counted, countText, rate, time } from "../format.js";
import { ask, badge, body, dialog, empty, errorNote, failed, field, note, options, panel, save, table } from "../ui.js";
import { messagePath } from "./messages.js";

export default async function deadLetters(page) {
  page.title("Dead letters");
  if (page.params.length) await ofGroup(page, page.params[0]);
  else await groups(page);
}

async function groups(page) {
  const list = h("div", {});
  page.root.append(h("div", { class: "page-head" }, h("h1", {}, "Dead letters")), list);
  await page.every(5000, async () => {
    const found = await page.get("/dead-letters");
    if (!found.rows.length) {
      show(list, panel(null, found.ready ? empty("There are no dead letters", "A message becomes a dead letter when its last attempt has failed. Nothing has to be done.") : empty("The topics are being read", "")));
      return;
    }
    const columns = [
      { label: "Group", cell: (row) => h("a", { class: "name", href: `/dead-letters/${part(row.group)}` }, row.group) },
      { label: "Dead letters", num: true, cell: (row) => count(row.messages) },
      { label: "Rate", num: true, cell: (row) => rate(row.rate_in) },
      { label: "Last", num: true, cell: (row) => ago(row.last_ms) },
    ];
    show(list, panel(null, table(columns, found.rows, { link: (row) => `/dead-letters/${part(row.group)}`, key: (row) => row.group })));
  });
}

async function ofGroup(page, group) {
  const path = `/dead-letters/${part(group)}`;
  const state = { rows: [], resume: null, chosen: new Set() };
  const list = h("div", {});
  const report = h("div", {});
  const id = (row) => `${row.broker}/${row.queue}@${row.offset}`;
  const resendButton = h("button", { class: "primary", type: "button", disabled: true, onclick: () => resend(page, path, group, selection(), report) });
  const selection = () => state.rows.filter((row) => state.chosen.has(id(row))).map((row) => ({ broker: row.broker, queue: row.queue, offset: row.offset }));
  const exportButton = h("button", { type: "button", onclick: () => save(`/api${path}/export`) }, "Export all");
  page.root.append(
    h(
      "div",
      { class: "page-head" },
      h("div", { class: "crumb" }, h("a", { href: "/dead-letters" }, "Dead letters")),
      h("h1", {}, group),
      h("a", { href: `/groups/${part(group)}` }, "Open the group"),
      h("div", { class: "actions" }, may("operate") && resendButton, may("operate") && h("button", { type: "button", onclick: () => resend(page, path, group, "all", report) }, "Resend all"), exportButton),
    ),
    report,
    list,
  );
  const draw = () => {
    resendButton.disabled = !state.chosen.size;
    show(resendButton, state.chosen.size ? `Resend ${countText(state.chosen.size)}` : "Resend selected");
    if (!state.rows.length) {
      show(list, panel(null, empty("There are no dead letters of this group", "A message becomes a dead letter when its last attempt has failed.")));
      return;
    }
    const all = state.rows.every((row) => state.chosen.has(id(row)));
    const columns = [
      may("operate") && {
        class: "pick",
        label: h("input", { type: "checkbox", "aria-label": "Select all shown", checked: all, onchange: () => { state.rows.forEach((row) => (all ? state.chosen.delete(id(row)) : state.chosen.add(id(row)))); draw(); } }),
        cell: (row) => h("input", { type: "checkbox", "aria-label": `Select ${row.id}`, checked: state.chosen.has(id(row)), onchange: () => { if (!state.chosen.delete(id(row))) state.chosen.add(id(row)); draw(); } }),
      },
      { label: "Died", class: "head", cell: (row) => h("a", { class: "name", href: messagePath(row) }, time(row.store_ms)) },
      { label: "Topic", cell: (row) => row.origin_topic || badge("unknown") },
      { label: "Keys", cell: (row) => h("span", { class: "break" }, row.keys.join(", ")) },
      { label: "Attempts", num: true, cell: (row) => count(row.reconsume_times) },
      { label: "Body", class: "clip mono", cell: (row) => row.summary },
      { label: "Size", num: true, cell: (row) => bytes(row.bytes) },
    ].filter(Boolean);
    show(
      list,
      panel(null, table(columns, state.rows, { key: id, link: messagePath, selected: (row) => state.chosen.has(id(row)) }), {
        foot: [h("span", {}, `${countText(state.rows.length)} shown`), state.resume && h("button", { class: "small", type: "button", onclick: () => load(true).catch(failed) }, "More")],
      }),
    );
  };
  const load = async (more) => {
    const found = await page.get(`${path}${query({ resume: more ? state.resume : "" })}`);
    state.rows = more ? [...state.rows, ...found.rows] : found.rows;
    state.resume = found.resume;
    draw();
  };
  await load(false);
}

function resend(page, path, group, messages, report) {
  const to = h("select", {}, options([["group", `the group ${group} only`], ["topic", "the topic: all of its groups"]], "group"));
  const perSecond = h("input", { type: "number", min: 1, max: 1000, value: 50 });
  const check = h("div", {});
  const wanted = () => ({ messages, to: to.value, rate: Number(perSecond.value) });
  const dry = h("button", {
    type: "button", "data-dry-run": true,
    onclick: async () => {
      try {
        const found = await post(`${path}/resend`, { ...wanted(), dry_run: true });
        const columns = [
          { label: "Message", cell: (row) => row.keys.join(", ") || row.id },
          { label: "From", cell: (row) => h("span", { class: "break" }, row.from) },
          { label: "To", cell: (row) => h("span", { class: "break" }, row.target) },
        ];
        show(check, h("p", {}, `${counted(found.count, "message")} would be sent in about ${Math.ceil(found.seconds)} s. Nothing was sent.`), found.warnings.map((text) => note("warn", text)), found.skipped.map((one) => note("warn", `${one.id} is left out: ${one.reason}`)), h("div", { class: "panel", id: "dry-run" }, table(columns, found.rows, { cards: false, key: (row) => row.from })));
      } catch (error) {
        show(check, errorNote(error));
      }
    },
  }, "Dry run");
  ask(
    messages === "all" ? `Resend all dead letters of ${group}` : `Resend ${counted(messages.length, "dead letter")} of ${group}`,
    h("div", { class: "stack" },
      h("p", { class: "muted" }, "They are sent again with the same body, id, keys and properties. The dead letters stay where they are."),
      h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Send to", to), field("Messages per second", perSecond)),
      h("div", {}, dry),
      check,
    ),
    "Resend",
    async () => {
      const job = await post(`${path}/resend`, wanted());
      follow(page, job, report);
    },
    { large: true },
  );
}

export async function follow(page, started, box) {
  let job = started;
  for (;;) {
    show(box, jobPanel(job));
    if (job.state !== "running" || page.signal.aborted) return;
    await new Promise((wake) => setTimeout(wake, 400));
    try {
      job = await page.get(`/jobs/${job.id}`);
    } catch (error) {
      failed(error);
      return;
    }
  }
}

export function jobPanel(job) {
  const fill = h("i", {});
  fill.style.width = `${(job.done / Math.max(job.total, 1)) * 100}%`;
  const bar = h("span", { class: "bar" }, fill);
  return panel(
    `Resend: ${job.title}`,
    body(
      h("div", { class: "row" }, bar, h("span", {}, `${countText(job.done - job.failed)} of ${countText(job.total)} sent`), job.failed > 0 && badge(`${countText(job.failed)} failed`, "bad"), badge(job.state, job.state === "finished" ? (job.failed ? "warn" : "good") : "info")),
      job.rows.filter((row) => !row.ok).slice(0, 20).map((row) => h("p", { class: "small break" }, row.problem)),
    ),
    {
      id: "report",
      actions: [
        job.state === "running" && h("button", { class: "small", type: "button", onclick: () => del(`/jobs/${job.id}`).catch(failed) }, "Stop"),
        job.state !== "running" && h("button", { class: "small", type: "button", onclick: () => dialog("Report", h("pre", { class: "code" }, JSON.stringify(job.rows, null, 2)), (close) => h("button", { type: "button", onclick: close }, "Close"), { large: true }) }, "Report"),
      ],
    },
  );
}
