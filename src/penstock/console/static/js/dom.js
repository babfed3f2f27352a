// Builds elements. Text is always text: there is no innerHTML in this console.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Replaces the children. The keyboard focus stays on the element in the same place, or in the table
// row with the same key: a refresh must not take it away.
export function show(parent, ...children) {
  const fresh = document.createDocumentFragment();
  add(fresh, children);
  const place = focusedPlace(parent);
  parent.replaceChildren(fresh);
  if (place) focusPlace(parent, place);
  return parent;
}

function focusedPlace(parent) {
  const focused = document.activeElement;
  if (!focused || focused === parent || !parent.contains(focused)) return null;
  const row = focused.closest("tr[data-key]");
  const root = row && parent.contains(row) && row !== parent ? row : parent;
  return { tag: focused.tagName, key: root === row ? row.dataset.key : null, path: pathTo(root, focused) };
}

function pathTo(root, element) {
  const path = [];
  for (let at = element; at !== root; at = at.parentNode) path.unshift([...at.parentNode.children].indexOf(at));
  return path;
}

function focusPlace(parent, { tag, key, path }) {
  const root = key === null ? parent : [...parent.querySelectorAll("tr[data-key]")].find((row) => row.dataset.key === key);
  const found = root && path.reduce((at, i) => at?.children[i], root);
  if (found?.tagName !== tag) return;
  if (tag === "TR") found.tabIndex = 0;
  found.focus({ preventScroll: true });
}

const PATHS = {
  home: "M3 11l9-8 9 8M5 9.5V20h5v-6h4v6h5V9.5",
  topics: "M4 6h16M4 12h16M4 18h10",
  messages: "M4 5h16v11H9l-5 4z",
  groups: "M9 11a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7zM2.5 20c.6-3.6 3-5.5 6.5-5.5s5.900 1.900 6.500 5.500M16 4.500a3.500 3.500 0 0 1 0 6.500M18 14.800c2 .8 3.200 2.500 3.500 5.200",
  dead: "M12 3l9 16H3zM12 10v4M12 16.500v.5",
  scheduled: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zM12 7v5l3.500 2",
  transactions: "M4 8h13l-3.500-3.500M20 16H7l3.500 3.500",
  cluster: "M4 4h16v6H4zM4 14h16v6H4zM7.500 7h.5M7.500 17h.5",
  access: "M6 11V8a6 6 0 0 1 12 0v3M5 11h14v9H5zM12 15v2",
  pipelines: "M4 5h5v5H4zM15 14h5v5h-5zM9 7.500h5a3 3 0 0 1 3 3V14",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM16 16l4.500 4.500",
  menu: "M4 7h16M4 12h16M4 17h16",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 3v2M12 19v2M3 12h2M19 12h2M5.600 5.600L7 7M17 17l1.400 1.400M5.600 18.400L7 17M17 7l1.400-1.400",
  moon: "M20 14.500A8.500 8.500 0 0 1 9.500 4 8.500 8.500 0 1 0 20 14.500z",
  play: "M7 4.500l12 7.500-12 7.500z",
  stop: "M6 6h12v12H6z",
};

export function icon(name) {
  return s(
    "svg",
    { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8", "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true" },
    s("path", { d: PATHS[name] }),
  );
}
