// Pipelines: recorded Spark runs and their last progress.

import { h, show } from "../dom.js";
import { bars } from "../chart.js";
import { ago, count, countText, duration, rateText, time } from "../format.js";
import { badge, body, empty, facts, panel } from "../ui.js";

const KINDS = { running: "good", finished: "", stopped: "", failed: "bad" };

export default async function pipelines(page) {
  page.title("Pipelines");
  const content = h("div", { class: "stack" });
  page.root.append(h("div", { class: "page-head" }, h("h1", {}, "Pipelines")), content);
  await page.every(5000, async () => {
    const at = await page.get("/pipelines");
    if (!at.rows.length) {
      show(content, panel(null, empty("No run was recorded", `Runs that are started on this machine appear here${at.directory ? ` (from ${at.directory})` : ""}. Runs on other machines are not known.`, "penstock pipeline run lake --topics orders --lake /data/lake")));
      return;
    }
    show(content, at.rows.map(view));
  });
}

function view(run) {
  const last = run.batches[run.batches.length - 1];
  const rows = run.batches.map((one) => one.rows);
  return panel(
    run.pipeline,
    body(
      run.problem && h("p", { class: "note bad" }, run.problem),
      h(
        "div",
        { class: "columns" },
        facts([
          ["Started", [time(run.started_ms), ` on ${run.host}`]],
          ["Last update", ago(run.updated_ms)],
          ["Rows", count(run.rows)],
          ["NameServer", run.nameserver || "unknown"],
          ...Object.entries(run.options).map(([name, value]) => [name, h("code", { class: "break" }, value)]),
        ]),
        last
          ? h("div", { class: "stack" }, facts([
              ["Last batch", `${last.number}${last.query ? ` of ${last.query}` : ""}`],
              ["Rows", count(last.rows)],
              ["Rows per second", rateText(last.seconds ? last.rows / last.seconds : 0)],
              ["Lag", [count(last.lag), " messages"]],
              ["Took", duration(last.seconds * 1000)],
            ]), h("div", {}, bars(rows), h("div", { class: "muted small" }, rows.length === 1 ? "Rows of the last batch" : `Rows of the last ${rows.length} batches: ${countText(Math.min(...rows))} to ${countText(Math.max(...rows))}`)))
          : h("p", { class: "muted" }, "No batch has been completed yet."),
      ),
    ),
    { actions: badge(run.state, KINDS[run.state] ?? "") },
  );
}
