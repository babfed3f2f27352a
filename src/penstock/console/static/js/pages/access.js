// Users and access: those of the brokers, the console's accounts, the audit log.

import { del, may, part, put, session } from "../api.js";
import { h, show } from "../dom.js";
import { counted, time } from "../format.js";
import { ask, badge, body, empty, failed, field, note, options, panel, segments, table, toast } from "../ui.js";

const ACTIONS = ["All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List"];

export default async function access(page) {
  page.title("Users and access");
  const content = h("div", { class: "stack" });
  const views = [["brokers", "Brokers"], may("admin") && ["accounts", "Console"], may("admin") && ["audit", "Audit log"]].filter(Boolean);
  const open = (view) => {
    page.remember({ view: view === "brokers" ? "" : view });
    ({ brokers, accounts, audit })[view](page, content).catch((error) => page.problem(error));
  };
  const first = page.query.get("view") || "brokers";
  page.root.append(h("div", { class: "page-head" }, h("h1", {}, "Users and access")), views.length > 1 && segments(views, first, open), content);
  open(first);
}

async function brokers(page, content) {
  const at = await page.get("/access");
  if (!at.available) {
    show(content, panel("Users of the brokers", body(note("warn", at.problem), h("p", { class: "muted" }, "The brokers may not support access lists, or the console's user may not read them."))));
    return;
  }
  const again = () => brokers(page, content).catch(failed);
  const users = [
    { label: "User", cell: (row) => h("span", { class: "name" }, row.name) },
    { label: "Type", cell: (row) => badge((row.type || "unknown").toLowerCase(), /super/i.test(row.type || "") ? "accent" : "") },
    { label: "Status", cell: (row) => badge((row.status || "unknown").toLowerCase(), /enable/i.test(row.status || "") ? "good" : "bad") },
    may("admin") && { label: "", num: true, cell: (row) => h("span", { class: "row" }, h("button", { class: "small", type: "button", onclick: () => rule(row.name, again) }, "Add a rule"), h("button", { class: "small danger", type: "button", onclick: () => removeUser(page, row.name, again) }, "Delete")) },
  ].filter(Boolean);
  const rules = [
    { label: "User", cell: (row) => h("span", { class: "name" }, row.user) },
    { label: "Resource", cell: (row) => h("code", {}, row.resource) },
    { label: "Actions", cell: (row) => row.actions.join(", ") },
    { label: "From", cell: (row) => row.sources.join(", ") || "anywhere" },
    { label: "Decision", cell: (row) => badge(row.decision || "unknown", row.decision === "Allow" ? "good" : "bad") },
    may("admin") && { label: "", num: true, cell: (row) => h("button", { class: "small danger", type: "button", onclick: () => removeRule(page, row, again) }, "Delete") },
  ].filter(Boolean);
  show(
    content,
    panel("Users of the brokers", at.users.length ? table(users, at.users, { key: (row) => row.name }) : empty("The brokers have no users", ["Without access control everybody may do everything. To turn it on, set ", h("code", {}, "access.authentication"), " and ", h("code", {}, "access.initial_user"), " at the brokers."]), {
      actions: may("admin") && h("button", { class: "primary small", type: "button", onclick: () => user(again) }, "Add a user"),
    }),
    panel("Access rules", at.rules.length ? table(rules, at.rules) : empty("There are no rules", "A normal user may do nothing until a rule allows it: add one at the user. A super user needs no rule.")),
  );
}

function user(done) {
  const name = h("input", { autocomplete: "off" });
  const password = h("input", { type: "password", autocomplete: "new-password" });
  const isSuper = h("input", { type: "checkbox" });
  ask("Add a user of the brokers", h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Name", name), field("Password, which is also the secret key", password), h("label", { class: "check" }, isSuper, "Super user: may do everything")), "Add", async () => {
    await put(`/access/users/${part(name.value.trim())}`, { password: password.value, super: isSuper.checked });
    toast(`Added ${name.value.trim()}`);
    done();
  });
}

function rule(name, done) {
  const resource = h("input", { value: "Topic:*", autocomplete: "off" });
  const boxes = ACTIONS.map((action) => h("input", { type: "checkbox", value: action, checked: action === "Pub" || action === "Sub" }));
  const decision = h("select", {}, options(["Allow", "Deny"], "Allow"));
  ask(`Add a rule for ${name}`, h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Resource: Topic:NAME, Group:NAME, Cluster:NAME or *", resource), h("div", { class: "row" }, boxes.map((box, i) => h("label", { class: "check" }, box, ACTIONS[i]))), field("Decision", decision)), "Set", async () => {
    await put(`/access/users/${part(name)}/rules`, { resource: resource.value.trim(), actions: boxes.filter((box) => box.checked).map((box) => box.value), decision: decision.value });
    toast(`Set the rule of ${name}`);
    done();
  });
}

const ruleText = (row) => `${row.decision === "Deny" ? "must not" : "may"} ${row.actions.join(", ")} ${row.resource}`;

// The questions show what is there now, which may be more than what the page has shown before.
async function removeUser(page, name, done) {
  const at = await page.get("/access").catch(failed);
  if (!at) return;
  const rules = at.rules.filter((row) => row.user === name);
  ask(
    `Delete ${name}?`,
    h(
      "div",
      { class: "stack", id: "affected" },
      h("p", {}, `The user is deleted from all brokers, with ${rules.length ? counted(rules.length, "rule") : "no rules"}. Its clients are refused from now on.`),
      rules.length > 0 && h("ul", {}, rules.map((row) => h("li", { class: "break" }, `${name} ${ruleText(row)}`))),
    ),
    "Delete",
    async () => {
      await del(`/access/users/${part(name)}`);
      done();
    },
    { danger: true, confirm: name },
  );
}

async function removeRule(page, row, done) {
  const at = await page.get("/access").catch(failed);
  if (!at) return;
  const others = at.rules.filter((one) => one.user === row.user).length - 1;
  const effect = row.decision === "Deny" ? "Then its other rules decide about this resource." : "Then its clients are refused there, unless another rule allows it.";
  ask(
    `Delete this rule of ${row.user}?`,
    h(
      "div",
      { class: "stack", id: "affected" },
      h("p", {}, "The rule is deleted from all brokers: ", h("strong", { class: "break" }, `${row.user} ${ruleText(row)}`), "."),
      h("p", {}, `${effect} ${row.user} has ${others ? counted(others, "other rule") : "no other rules"}.`),
    ),
    "Delete",
    async () => {
      await del(`/access/users/${part(row.user)}/rules`, { resource: row.resource });
      done();
    },
    { danger: true },
  );
}

async function accounts(page, content) {
  const at = await page.get("/accounts");
  if (!at.in_use) {
    show(content, panel("Accounts of the console", empty(session.logins === "brokers" ? "Users of the brokers log in here" : "Nobody has to log in", session.logins === "brokers" ? "Their roles follow from the access lists of the brokers." : ["This console listens on a loopback address only. To have accounts with roles, start it with ", h("code", { class: "nowrap" }, "--logins console"), "."])));
    return;
  }
  const again = () => accounts(page, content).catch(failed);
  const columns = [
    { label: "Account", cell: (row) => h("span", { class: "name" }, row.name) },
    { label: "Role", cell: (row) => badge(row.role, row.role === "admin" ? "accent" : "") },
    { label: "Created", num: true, cell: (row) => time(row.created_ms) },
    { label: "", num: true, cell: (row) => h("span", { class: "row" }, h("button", { class: "small", type: "button", onclick: () => account(row, again) }, "Change"), h("button", { class: "small danger", type: "button", onclick: () => removeAccount(page, row.name, again) }, "Delete")) },
  ];
  show(content, panel("Accounts of the console", table(columns, at.rows, { key: (row) => row.name }), { actions: h("button", { class: "primary small", type: "button", onclick: () => account(null, again) }, "Add an account") }));
}

async function removeAccount(page, name, done) {
  const at = await page.get("/accounts").catch(failed);
  const row = at?.rows.find((one) => one.name === name);
  if (!row) return;
  const sessions = row.sessions ? `${counted(row.sessions, "session")} of it ${row.sessions === 1 ? "ends" : "end"} at once.` : "Nobody is logged in with it.";
  ask(
    `Delete ${row.name}?`,
    h("p", { id: "affected" }, `The account with the role ${row.role} is deleted. ${sessions} Its entries in the audit log stay.`),
    "Delete",
    async () => {
      await del(`/accounts/${part(row.name)}`);
      done();
    },
    { danger: true },
  );
}

function account(row, done) {
  const name = h("input", { value: row ? row.name : "", disabled: Boolean(row), autocomplete: "off" });
  const role = h("select", {}, options([["view", "view: look at everything"], ["operate", "operate: also topics, groups, offsets, messages"], ["admin", "admin: also brokers, users, accounts"]], row ? row.role : "view"));
  const password = h("input", { type: "password", autocomplete: "new-password" });
  ask(row ? `Change ${row.name}` : "Add an account", h("form", { class: "grid", onsubmit: (event) => event.preventDefault() }, field("Name", name), field("Role", role), field(row ? "New password; empty: unchanged" : "Password, at least 10 characters", password)), row ? "Change" : "Add", async () => {
    await put(`/accounts/${part(name.value.trim())}`, { role: role.value, password: password.value });
    done();
  });
}

async function audit(page, content) {
  const at = await page.get("/audit");
  const columns = [
    { label: "Time", cell: (row) => time(row.at_ms) },
    { label: "User", cell: (row) => h("span", { class: "name" }, row.user) },
    { label: "From", cell: (row) => row.address },
    { label: "Action", cell: (row) => h("code", { class: "break" }, row.action) },
    { label: "Target", cell: (row) => row.target && h("span", { class: "break small" }, row.target) },
    { label: "Values", cell: (row) => row.detail && row.detail !== "{}" && h("span", { class: "break small" }, row.detail) },
    { label: "Result", num: true, cell: (row) => badge(row.status < 400 ? "done" : String(row.status), row.status < 400 ? "good" : "bad") },
  ];
  show(content, panel("Audit log", at.rows.length ? table(columns, at.rows) : empty("Nothing has been changed yet", "Logins and changes through this console appear here."), { foot: at.more && "Older entries: GET /api/audit?before=ID" }));
}
