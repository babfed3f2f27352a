// Components: panels, tables, dialogs, messages to the user.

import { h, icon, show } from "./dom.js";

let toasts = null;

export function toast(text, { bad = false, hint = "" } = {}) {
  if (!toasts) document.body.append((toasts = h("div", { class: "toasts", role: "status", "aria-live": "polite" })));
  const box = h("div", { class: `toast${bad ? " bad" : ""}` }, h("p", {}, text), hint && h("p", {}, hint));
  toasts.append(box);
  setTimeout(() => box.remove(), bad ? 9000 : 4500);
}

export function failed(error) {
  if (error.name === "AbortError") return;
  toast(error.message, { bad: true, hint: error.hint });
}

export function errorNote(error) {
  return h("div", { class: "note bad", role: "alert" }, h("div", {}, h("p", {}, error.message), error.hint && h("p", { class: "small" }, error.hint)));
}

export function note(kind, ...children) {
  return h("div", { class: `note ${kind}` }, h("div", {}, children));
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

export function panel(title, content, { actions = [], foot, id } = {}) {
  return h(
    "section",
    { class: "panel", id },
    title && h("header", {}, h("h2", {}, title), h("div", { class: "actions" }, actions)),
    content,
    foot && h("footer", {}, foot),
  );
}

export const body = (...children) => h("div", { class: "body" }, children);

export function stat(label, value, { unit, note: text, id } = {}) {
  return h(
    "div",
    { class: "stat", "data-stat": id || label },
    h("div", { class: "label" }, label),
    h("div", { class: "value" }, value, unit && h("span", { class: "unit" }, unit)),
    h("div", { class: "hint" }, text || "\u00a0"),
  );
}

export function empty(title, text, command) {
  return h("div", { class: "empty" }, h("strong", {}, title), text && h("p", {}, text), command && h("pre", {}, command));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function command(text) {
  const button = h("button", { class: "plain small", type: "button", onclick: () => copy(text) }, "Copy");
  return h("div", { class: "command" }, h("code", {}, text), button);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser does not allow copying here.", { bad: true });
  }
}

export function segments(options, chosen, choose) {
  const box = h("div", { class: "segments", role: "group" });
  const draw = (now) =>
    show(
      box,
      options.map(([value, label, n]) =>
        h(
          "button",
          { type: "button", "aria-pressed": value === now ? "true" : "false", onclick: () => { draw(value); choose(value); } },
          label,
          n !== undefined && n !== null && h("span", { class: "n" }, ` ${n}`),
        ),
      ),
    );
  draw(chosen);
  return box;
}

export function searchBox(placeholder, value, change, attributes = {}) {
  let timer = 0;
  const input = h("input", {
    type: "search", placeholder, value: value || "", "aria-label": placeholder, autocomplete: "off", spellcheck: "false", "data-search": true, ...attributes,
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => change(input.value), 150);
    },
  });
  return h("div", { class: "search grow" }, icon("search"), input);
}

// columns: [{ key, label, cell(row), num, sort, head }]
export function table(columns, rows, { sort, descending, onsort, link, key, cards = true, selected } = {}) {
  const heads = columns.map((column) => {
    const on = sort && sort === column.sort;
    const label = column.sort && onsort
      ? h("button", { type: "button", onclick: () => onsort(column.sort, on ? !descending : Boolean(column.num)) }, column.label, on ? (descending ? " ↓" : " ↑") : "")
      : column.label;
    return h("th", { scope: "col", class: column.num ? "num" : null, "aria-sort": on ? (descending ? "descending" : "ascending") : null }, label);
  });
  const lines = rows.map((row) => {
    const target = link && link(row);
    const line = h(
      "tr",
      {
        class: [target && "link", selected && selected(row) && "selected"].filter(Boolean).join(" ") || null,
        "data-key": key ? key(row) : null,
        onclick: target && ((event) => {
          if (event.target.closest("a, button, input, label") || getSelection().toString()) return;
          dispatchEvent(new CustomEvent("penstock-go", { detail: target }));
        }),
      },
      columns.map((column) =>
        h("td", { class: [column.num && "num", column.class].filter(Boolean).join(" ") || null, "data-label": column.label || "" }, column.cell(row)),
      ),
    );
    return line;
  });
  return h("div", { class: "scroll" }, h("table", { class: cards ? "cards" : null }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, lines)));
}

export function pager(page, size, total, go) {
  const last = Math.max(Math.ceil(total / size) - 1, 0);
  if (!total) return null;
  const from = page * size + 1;
  const to = Math.min((page + 1) * size, total);
  return h(
    "div",
    { class: "row" },
    h("span", {}, `${from.toLocaleString("en")}–${to.toLocaleString("en")} of ${total.toLocaleString("en")}`),
    last > 0 && h("button", { class: "small", type: "button", disabled: page === 0, onclick: () => go(page - 1), "data-previous": true }, "Previous"),
    last > 0 && h("button", { class: "small", type: "button", disabled: page >= last, onclick: () => go(page + 1), "data-next": true }, "Next"),
  );
}

export function dialog(title, content, buttons, { large = false } = {}) {
  const foot = h("footer", {});
  const box = h("dialog", { class: large ? "large" : null, "aria-label": title }, h("header", {}, title), h("div", { class: "body" }, content), foot);
  const close = () => box.close();
  show(foot, buttons(close));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

// Asks before a change; `act` is called once and may throw.
export function ask(title, content, label, act, { danger = false, large = false, confirm } = {}) {
  const problem = h("div", {});
  const typed = confirm && h("input", { placeholder: confirm, "aria-label": `Type ${confirm}`, autocomplete: "off", oninput: () => { button.disabled = typed.value !== confirm; } });
  let button;
  return dialog(
    title,
    [content, confirm && h("label", { class: "field" }, `Type ${confirm} to confirm`, typed), problem],
    (close) => {
      button = h("button", {
        type: "button", class: danger ? "danger solid" : "primary", disabled: Boolean(confirm), "data-confirm": true,
        onclick: async () => {
          button.disabled = true;
          try {
            await act();
            close();
          } catch (error) {
            show(problem, errorNote(error));
            button.disabled = false;
          }
        },
      }, label);
      return [h("button", { type: "button", onclick: close }, "Cancel"), button];
    },
    { large },
  );
}

export function field(label, input) {
  return h("label", { class: "field" }, label, input);
}

export function options(values, chosen) {
  return values.map((value) => {
    const [id, label] = Array.isArray(value) ? value : [value, value];
    return h("option", { value: id, selected: id === chosen }, label);
  });
}

export function usage(share) {
  if (share === null || share === undefined) return null;
  const kind = share >= 0.85 ? " bad" : share >= 0.75 ? " warn" : "";
  const fillBar = h("i", {});
  fillBar.style.width = `${Math.min(share, 1) * 100}%`;
  return h("span", { class: `bar${kind}` }, fillBar);
}

// Let the browser save what the server sends.
export function save(url) {
  h("a", { href: url, download: "" }).click();
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}
