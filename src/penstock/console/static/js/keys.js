// Keyboard: shortcuts, their help, and the palette that finds pages, topics and groups.

import { get, query } from "./api.js";
import { h, show } from "./dom.js";
import { dialog } from "./ui.js";

export const SHORTCUTS = [
  ["g h", "Home", "/"],
  ["g t", "Topics", "/topics"],
  ["g m", "Messages", "/messages"],
  ["g g", "Groups", "/groups"],
  ["g d", "Dead letters", "/dead-letters"],
  ["g s", "Scheduled", "/scheduled"],
  ["g x", "Transactions", "/transactions"],
  ["g c", "Cluster", "/cluster"],
  ["g u", "Users and access", "/access"],
  ["g p", "Pipelines", "/pipelines"],
];
const OTHERS = [
  ["/", "Go to the search box of the page"],
  ["k", "Find a page, a topic or a group"],
  ["j ↓ ↑", "Move between the rows of a table"],
  ["Enter", "Open the row"],
  ["n p", "Next and previous page of a table"],
  ["t", "Switch between light and dark"],
  ["?", "This help"],
  ["Esc", "Close"],
];

export function help() {
  const rows = [...SHORTCUTS.map(([keys, name]) => [keys, name]), ...OTHERS];
  dialog(
    "Keyboard shortcuts",
    h("div", { class: "help" }, rows.map(([keys, text]) => [h("span", { class: "nowrap" }, keys.split(" ").map((one) => [h("kbd", {}, one), " "])), h("span", {}, text)])),
    (close) => h("button", { type: "button", onclick: close }, "Close"),
  );
}

export function palette(go) {
  const list = h("ul", { role: "listbox" });
  const input = h("input", { placeholder: "Find a page, a topic or a group, or paste a message id", "aria-label": "Find", autocomplete: "off", spellcheck: "false" });
  const box = h("dialog", { class: "palette-box", "aria-label": "Find" }, h("div", { class: "palette" }, input, list));
  let found = [];
  let at = 0;
  let asked = 0;
  const draw = () =>
    show(list, found.map(([name, kind, path], i) =>
      h("li", { role: "option", "aria-selected": i === at ? "true" : "false", onclick: () => choose(path) }, name, h("span", { class: "kind" }, kind)),
    ));
  const choose = (path) => {
    box.close();
    go(path);
  };
  const look = async () => {
    const text = input.value.trim();
    const number = (asked += 1);
    const pages = SHORTCUTS.filter(([, name]) => name.toLowerCase().includes(text.toLowerCase())).map(([, name, path]) => [name, "page", path]);
    let names = { topics: [], groups: [] };
    try {
      names = await get(`/names${query({ query: text })}`);
    } catch {
      // The pages can be found without the cluster.
    }
    if (number !== asked) return;
    found = [
      ...pages,
      ...names.topics.map((name) => [name, "topic", `/topics/${encodeURIComponent(name)}`]),
      ...names.groups.map((name) => [name, "group", `/groups/${encodeURIComponent(name)}`]),
    ];
    if (text.length > 3) found.push([`Search messages for ${text}`, "messages", `/messages${query({ q: text })}`]);
    at = 0;
    draw();
  };
  input.addEventListener("input", look);
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      at = (at + (event.key === "ArrowDown" ? 1 : found.length - 1)) % Math.max(found.length, 1);
      draw();
      list.children[at]?.scrollIntoView({ block: "nearest" });
      event.preventDefault();
    } else if (event.key === "Enter" && found[at]) choose(found[at][2]);
  });
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  look();
}

export function listen(go, switchTheme, closeMenu) {
  let before = "";
  let timer = 0;
  addEventListener("keydown", (event) => {
    if (event.metaKey || event.ctrlKey || event.altKey) {
      if (event.key === "k" && !document.querySelector("dialog[open]")) {
        event.preventDefault();
        palette(go);
      }
      return;
    }
    if (event.target.closest("input, textarea, select, dialog")) {
      if (event.key === "Escape" && event.target.matches("input")) event.target.blur();
      return;
    }
    if (event.key === "Escape") closeMenu();
    clearTimeout(timer);
    timer = setTimeout(() => { before = ""; }, 900);
    const pair = SHORTCUTS.find(([keys]) => keys === `${before} ${event.key}`);
    before = event.key === "g" && before !== "g" ? "g" : "";
    if (pair) go(pair[2]);
    else if (!before) single(event, go, switchTheme);
  });
}

function single(event, go, switchTheme) {
  const { key } = event;
  if (key === "/") {
    document.querySelector("main [data-search]")?.focus();
    event.preventDefault();
  } else if (key === "?") help();
  else if (key === "k") {
    event.preventDefault();
    palette(go);
  } else if (key === "t") switchTheme();
  else if (key === "n") document.querySelector("main [data-next]:not(:disabled)")?.click();
  else if (key === "p") document.querySelector("main [data-previous]:not(:disabled)")?.click();
  else if (key === "j" || key === "ArrowDown" || key === "ArrowUp") moveRow(key === "ArrowUp" ? -1 : 1, event);
  else if (key === "Enter" && document.activeElement?.matches("tr.link")) document.activeElement.click();
}

function moveRow(by, event) {
  const rows = [...document.querySelectorAll("main tr.link")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  const next = rows[at < 0 ? 0 : Math.min(Math.max(at + by, 0), rows.length - 1)];
  next.tabIndex = 0;
  next.focus();
  event.preventDefault();
}
