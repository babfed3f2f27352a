// The frame of the console: navigation, addresses, loading of pages.

import { get, loadSession, post, session } from "./api.js";
import { h, icon, show } from "./dom.js";
import { help, listen, palette } from "./keys.js";
import { empty, errorNote, failed, panel } from "./ui.js";

const NAV = [
  ["/", "Home", "home"],
  ["/topics", "Topics", "topics"],
  ["/messages", "Messages", "messages"],
  ["/groups", "Groups", "groups"],
  ["/dead-letters", "Dead letters", "dead"],
  ["/scheduled", "Scheduled", "scheduled"],
  ["/transactions", "Transactions", "transactions"],
  ["/pipelines", "Pipelines", "pipelines"],
  ["/cluster", "Cluster", "cluster"],
  ["/access", "Users and access", "access"],
];
const ROUTES = [
  [/^\/$/, "home"],
  [/^\/topics$/, "topics"],
  [/^\/topics\/([^/]+)$/, "topic"],
  [/^\/messages$/, "messages"],
  [/^\/message\/([^/]+)\/([^/]+)\/(\d+)\/(\d+)$/, "message"],
  [/^\/groups$/, "groups"],
  [/^\/groups\/([^/]+)$/, "group"],
  [/^\/dead-letters$/, "dead_letters"],
  [/^\/dead-letters\/([^/]+)$/, "dead_letters"],
  [/^\/scheduled$/, "scheduled"],
  [/^\/transactions$/, "transactions"],
  [/^\/cluster$/, "cluster"],
  [/^\/access$/, "access"],
  [/^\/pipelines$/, "pipelines"],
];

const app = document.getElementById("app");
const icons = document.querySelector("link[rel=icon]").href;
let current = null;
let main = null;
let side = null;

export function go(path) {
  history.pushState(null, "", path);
  open();
}

// One shown page. Its timers and requests end when another page is shown.
class Page {
  constructor(name, params) {
    this.name = name;
    this.params = params;
    this.query = new URLSearchParams(location.search);
    this.ended = new AbortController();
    this.signal = this.ended.signal;
    this.root = h("div", { class: "stack" });
    this.go = go;
  }

  // Call `work` now and every `ms` while the page is visible. Errors are shown above the page.
  every(ms, work) {
    const tick = async () => {
      if (this.signal.aborted) return;
      if (document.visibilityState === "visible") {
        try {
          await work();
          this.problem(null);
        } catch (error) {
          if (error.name !== "AbortError") this.problem(error);
        }
      }
      if (!this.signal.aborted) setTimeout(tick, ms);
    };
    return tick();
  }

  problem(error) {
    if (this.signal.aborted) return;
    if (!this.noteBox) this.root.prepend((this.noteBox = h("div", { hidden: true })));
    this.noteBox.hidden = !error;
    show(this.noteBox, error && errorNote(error));
  }

  get(path) {
    return get(path, this.signal);
  }

  title(text) {
    document.title = `${text} · Penstock`;
  }

  // Remember the state of the page in its address, without a new entry in the history.
  remember(values) {
    const kept = new URLSearchParams();
    for (const [name, value] of Object.entries(values)) if (value) kept.set(name, value);
    const text = kept.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
  }
}

async function open() {
  current?.ended.abort();
  document.querySelectorAll("dialog[open]").forEach((box) => box.close());
  side.classList.remove("open");
  delete main.dataset.page;
  const path = location.pathname;
  for (const link of side.querySelectorAll(".nav")) {
    const target = link.getAttribute("href");
    const on = target === "/" ? path === "/" : path.startsWith(target) || (target === "/messages" && path.startsWith("/message"));
    if (on) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [pattern, name] = ROUTES.find(([one]) => one.test(path)) || [null, null];
  if (!name) {
    show(main, panel(null, empty("There is no such page", [`${path} is no address of this console. `, h("a", { href: "/" }, "Go to Home")])));
    return;
  }
  const page = new Page(name, pattern.exec(path).slice(1).map(decodeURIComponent));
  current = page;
  const bar = document.querySelector(".loading");
  bar.classList.add("on");
  try {
    const module = await import(`./pages/${name}.js`);
    if (page.signal.aborted) return;
    page.title(NAV.find(([target]) => target === `/${name.replace("_", "-")}`)?.[1] || "Home");
    const built = module.default(page);
    show(main, page.root);
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
    await built;
  } catch (error) {
    if (error.name !== "AbortError" && !page.signal.aborted) show(main, errorNote(error));
  } finally {
    if (current === page) {
      bar.classList.remove("on");
      main.dataset.page = name;
    }
  }
}

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("penstock-theme", next);
  dispatchEvent(new Event("penstock-theme"));
}

// The menu of a phone. The focus returns to its button, from which it was opened.
function closeMenu() {
  if (!side?.classList.contains("open")) return;
  side.classList.remove("open");
  document.querySelector(".top [aria-label=Menu]")?.focus();
}

function frame() {
  const links = NAV.map(([path, name, picture]) =>
    h("a", { class: "nav", href: path }, icon(picture), name),
  );
  const brand = () => h("a", { class: "brand", href: "/" }, h("img", { src: icons, alt: "" }), "Penstock");
  side = h(
    "nav",
    { class: "side", "aria-label": "Pages" },
    brand(),
    links,
    h(
      "div",
      { class: "side-foot" },
      h("div", { class: "break" }, session.nameservers.join(", ")),
      h(
        "div",
        { class: "row" },
        h("span", {}, session.logins === "none" ? `Penstock ${session.release}` : `${session.user} (${session.role})`),
        session.logins !== "none" && h("button", { class: "plain small", type: "button", onclick: logOut }, "Log out"),
      ),
      h(
        "div",
        { class: "row" },
        h("button", { class: "small", type: "button", onclick: () => palette(go), title: "Find (k)" }, icon("search"), "Find"),
        h("span", { class: "row" },
          h("button", { class: "small", type: "button", onclick: help, title: "Keyboard shortcuts (?)", "aria-label": "Keyboard shortcuts" }, "?"),
          h("button", { class: "small", type: "button", onclick: switchTheme, title: "Light or dark (t)", "aria-label": "Light or dark" }, h("span", { class: "to-light" }, icon("sun")), h("span", { class: "to-dark" }, icon("moon"))),
        ),
      ),
    ),
  );
  main = h("main", { class: "main", id: "main", tabindex: "-1" });
  const menu = h("button", { class: "icon-button", type: "button", "aria-label": "Menu", onclick: () => side.classList.add("open") }, icon("menu"));
  const find = h("button", { class: "icon-button", type: "button", "aria-label": "Find", onclick: () => palette(go) }, icon("search"));
  show(
    app,
    h("div", { class: "loading" }),
    h("div", { class: "top" }, menu, brand(), h("span", { class: "grow" }), find),
    h("div", { class: "frame" }, side, h("div", { class: "shade", onclick: closeMenu }), main),
  );
}

async function logOut() {
  try {
    await post("/logout");
  } catch (error) {
    failed(error);
  }
  location.assign("/");
}

function logIn() {
  const name = h("input", { name: "name", autocomplete: "username", required: true, autofocus: true });
  const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
  const problem = h("div", {});
  const button = h("button", { class: "primary", type: "submit" }, "Log in");
  const from = session.logins === "brokers" ? "Use a user of the brokers." : "Use an account of this console.";
  const form = h(
    "form",
    {
      class: "grid",
      onsubmit: async (event) => {
        event.preventDefault();
        button.disabled = true;
        try {
          await post("/login", { name: name.value, password: password.value });
          await begin();
        } catch (error) {
          show(problem, errorNote(error));
          button.disabled = false;
          password.select();
        }
      },
    },
    h("p", { class: "muted" }, from),
    h("label", { class: "field" }, "Name", name),
    h("label", { class: "field" }, "Password", password),
    problem,
    button,
  );
  document.title = "Log in · Penstock";
  show(app, h("div", { class: "login" }, h("div", { class: "panel" }, h("div", { class: "brand" }, h("img", { src: icons, alt: "" }), "Penstock"), form)));
  name.focus();
}

async function begin() {
  try {
    await loadSession();
  } catch (error) {
    show(app, h("div", { class: "login" }, errorNote(error)));
    return;
  }
  if (!session.user) {
    current?.ended.abort();
    logIn();
    return;
  }
  frame();
  await open();
}

addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='/']");
  if (!link || link.target || link.hasAttribute("download") || event.defaultPrevented) return;
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
addEventListener("popstate", () => main && open());
addEventListener("penstock-go", (event) => go(event.detail));
addEventListener("penstock-logged-out", begin);
listen((path) => main && go(path), switchTheme, closeMenu);
begin();
