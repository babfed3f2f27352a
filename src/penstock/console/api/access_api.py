"""Users and access lists of the brokers."""

from penstock.console import broker_access
from penstock.console.console_context import close_clients
from penstock.console.console_settings import Logins
from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter, PenstockError

ACTIONS = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


@endpoint("GET", "/access")
async def access(call: ApiCall) -> object:
    """The users of the brokers and their rules; `problem` says why they can't be read."""
    try:
        users = await broker_access.list_users(call.admin)
        rules = await broker_access.read_rules(call.admin)
    except PenstockError as error:
        return {"available": False, "problem": error.remark(), "users": [], "rules": []}
    return {"available": True, "problem": None, "users": users, "rules": rules}


@endpoint(
    "PUT",
    "/access/users/{name}",
    Role.ADMIN,
    body={"password": "new password; needed for a new user", "super": "whether it is a super user"},
)
async def put_user(call: ApiCall) -> object:
    """Create a user on all brokers, or change it. Ends its sessions."""
    name = call.path("name")
    known = any(user["name"] == name for user in await broker_access.list_users(call.admin))
    password = call.given("password", str, "") or None
    if not known and password is None:
        raise InvalidParameter("a new user needs a password")
    is_super = call.given("super", bool) if "super" in call.body else None
    await broker_access.put_user(call.admin, name, password, is_super=is_super, exists=known)
    await _end_sessions(call, name)
    return {"name": name, "created": not known}


@endpoint("DELETE", "/access/users/{name}", Role.ADMIN)
async def delete_user(call: ApiCall) -> object:
    """Delete a user and its rules from all brokers. Ends its sessions."""
    await broker_access.delete_user(call.admin, call.path("name"))
    await _end_sessions(call, call.path("name"))
    return {"deleted": call.path("name")}


@endpoint(
    "PUT",
    "/access/users/{name}/rules",
    Role.ADMIN,
    body={
        "resource": "Topic:NAME, Group:NAME, Cluster:NAME (NAME may end in *), or *",
        "actions": "list of Pub, Sub, Create, Update, Delete, Get, List, or All",
        "decision": "Allow or Deny",
    },
)
async def put_rule(call: ApiCall) -> object:
    """Set the rule of a user for a resource."""
    actions = call.given("actions", list)
    decision = call.given("decision", str, "Allow")
    if not actions or any(action not in ACTIONS for action in actions):
        raise InvalidParameter("the actions are not valid", hint=f"use {', '.join(ACTIONS)}")
    if decision not in ("Allow", "Deny"):
        raise InvalidParameter("the decision is not valid", hint="use Allow or Deny")
    await broker_access.put_rule(
        call.admin, call.path("name"), call.given("resource", str), actions, decision
    )
    return {"user": call.path("name")}


@endpoint(
    "DELETE",
    "/access/users/{name}/rules",
    Role.ADMIN,
    body={"resource": "the resource of the rule"},
)
async def delete_rule(call: ApiCall) -> object:
    """Delete the rule of a user for a resource."""
    await broker_access.delete_rule(call.admin, call.path("name"), call.given("resource", str))
    return {"user": call.path("name")}


async def _end_sessions(call: ApiCall, name: str) -> None:
    """A user of the brokers whose password, type or existence has changed logs in again."""
    if call.console.settings.logins is Logins.BROKERS:
        await close_clients(call.console.sessions.end_all_of(name))
