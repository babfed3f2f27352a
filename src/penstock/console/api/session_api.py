"""Who is logged in: log in, log out, accounts of the console, the audit log."""

from starlette.requests import Request

from penstock.console.console_context import ANYBODY, Console, close_clients
from penstock.console.console_settings import Logins
from penstock.console.endpoints import COOKIE, ApiCall, ApiError, endpoint, json_response
from penstock.console.security.accounts import Role, role_of
from penstock.console.security.audit import AuditEntry
from penstock.version import VERSION


@endpoint("GET", "/session", open=True)
async def session(call: ApiCall) -> object:
    """The user, its role and the CSRF token; `user` is null without a login."""
    return session_json(call.console, call.request)


def session_json(console: Console, request: Request) -> dict[str, object]:
    """The session of a request."""
    value: dict[str, object] = {
        "release": VERSION,
        "logins": console.settings.logins.value,
        "nameservers": list(console.admin.nameservers()),
        "user": None,
        "role": None,
        "csrf": None,
    }
    found = console.sessions.find(request.cookies.get(COOKIE), console.now_ms())
    if not console.needs_login:
        value |= {"user": ANYBODY.name, "role": ANYBODY.role.text, "csrf": console.csrf}
    elif found is not None:
        value |= {"user": found.login.name, "role": found.login.role.text, "csrf": found.csrf}
    return value


@endpoint("POST", "/login", open=True, body={"name": "user name", "password": "password"})
async def log_in(call: ApiCall) -> object:
    """Log in. The response sets the cookie of the session. Failed attempts are limited."""
    console = call.console
    if not console.needs_login:
        raise ApiError(409, "this console has no logins")
    name, password = call.given("name", str), call.given("password", str)
    now_ms = console.now_ms()
    wait_ms = console.limit.wait_ms(call.address, name, now_ms)
    if wait_ms:
        await _record(call, name, 429)
        raise ApiError(429, "too many failed logins", f"try again in {-(-wait_ms // 1000)} s")
    console.limit.failed(
        call.address, name, now_ms
    )  # also counts attempts that run at the same time
    login = await console.logins.log_in(name, password)
    if login is None:
        await _record(call, name, 401)
        raise ApiError(401, "the name or the password is wrong")
    console.limit.succeeded(call.address, name)
    await _record(call, name, 200)
    await console.end_expired_sessions()
    token, found = console.sessions.create(login, now_ms)
    response = json_response({"user": login.name, "role": login.role.text, "csrf": found.csrf})
    secure = call.request.url.scheme == "https"  # a trusted proxy may have TLS instead
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
    return response


@endpoint("POST", "/logout")
async def log_out(call: ApiCall) -> object:
    """End the session."""
    await close_clients(call.console.sessions.end(call.request.cookies.get(COOKIE)))
    response = json_response({"user": None})
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


@endpoint("GET", "/accounts", Role.ADMIN)
async def list_accounts(call: ApiCall) -> object:
    """The console's own accounts; `sessions` is how often each one is logged in."""
    own = call.console.settings.logins is Logins.CONSOLE
    rows = await call.console.accounts.list() if own else []
    sessions, now_ms = call.console.sessions, call.console.now_ms()
    return {
        "in_use": own,
        "rows": [{**row, "sessions": sessions.count_of(str(row["name"]), now_ms)} for row in rows],
    }


@endpoint(
    "PUT",
    "/accounts/{name}",
    Role.ADMIN,
    body={"role": "view, operate or admin", "password": "new password; needed for a new account"},
)
async def put_account(call: ApiCall) -> object:
    """Create an account of the console, or change its role or password. Ends its sessions."""
    _need_accounts(call)
    accounts, name = call.console.accounts, call.path("name")
    role = role_of(call.given("role", str))
    password = call.given("password", str, "")
    known = any(row["name"] == name for row in await accounts.list())
    if known:
        await accounts.set_role(name, role)
    if password or not known:
        await accounts.put(name, role, password, call.console.now_ms())
    if name != call.login.name:
        await close_clients(call.console.sessions.end_all_of(name))
    return {"name": name, "role": role.text}


@endpoint("DELETE", "/accounts/{name}", Role.ADMIN)
async def delete_account(call: ApiCall) -> object:
    """Delete an account of the console and end its sessions."""
    _need_accounts(call)
    name = call.path("name")
    await call.console.accounts.delete(name)
    await close_clients(call.console.sessions.end_all_of(name))
    return {"deleted": name}


@endpoint(
    "GET",
    "/audit",
    Role.ADMIN,
    parameters={"size": "entries, up to 500", "before": "only entries with a lower id"},
)
async def audit(call: ApiCall) -> object:
    """The audit log: logins and changes, the newest first."""
    size = call.number("size", 100, least=1, most=500)
    before = call.number("before", 2**62, most=2**62)
    rows = await call.console.audit.entries(size, before)
    return {"rows": rows, "more": len(rows) == size}


def _need_accounts(call: ApiCall) -> None:
    if call.console.settings.logins is not Logins.CONSOLE:
        raise ApiError(409, "this console has no accounts of its own", "use --logins console")


async def _record(call: ApiCall, name: str, status: int) -> None:
    await call.console.audit.add(
        AuditEntry(
            at_ms=call.console.now_ms(),
            user=name[:64],
            address=call.address,
            action="log in",
            target="",
            detail="",
            status=status,
        )
    )
