// Requests to the JSON API.

export const session = { user: null, role: null, csrf: null, logins: "none", release: "", nameservers: [] };
const ROLES = { view: 1, operate: 2, admin: 3 };

export class ApiError extends Error {
  constructor(status, message, hint) {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

export function may(role) {
  return ROLES[session.role] >= ROLES[role];
}

async function request(method, path, body, signal) {
  const headers = {};
  if (method !== "GET") headers["x-penstock-csrf"] = session.csrf || "";
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(`/api${path}`, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The console does not answer.", "Check that penstock console still runs.");
  }
  let value = null;
  try {
    value = await response.json();
  } catch {
    throw new ApiError(response.status, "The answer of the console can't be read.", "");
  }
  if (!response.ok) {
    if (response.status === 401 && session.user) dispatchEvent(new Event("penstock-logged-out"));
    throw new ApiError(response.status, value.error.message, value.error.hint);
  }
  return value;
}

export function query(values) {
  const found = Object.entries(values).filter(([, v]) => v !== undefined && v !== null && v !== "");
  return found.length ? `?${new URLSearchParams(found)}` : "";
}

export const get = (path, signal) => request("GET", path, undefined, signal);
export const post = (path, body = {}) => request("POST", path, body);
export const put = (path, body = {}) => request("PUT", path, body);
export const del = (path, body) => request("DELETE", path, body);
export const part = encodeURIComponent;

// The page contains the session at first; later it is asked for.
export async function loadSession() {
  const { session: text } = document.body.dataset;
  delete document.body.dataset.session;
  Object.assign(session, text ? JSON.parse(text) : await get("/session"));
  return session;
}
