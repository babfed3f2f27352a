"""Users and access lists of the brokers, by their requests."""

from typing import Any

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.errors import Refused
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from penstock.wire.codes import RequestCode

_SUBJECT = "User:"


async def read_user(admin: AsyncAdmin, name: str) -> UserInfo | None:
    """A user of the brokers; None if there is none with this name."""
    broker = (await admin.masters())[0]
    answer = await admin.ask(broker.address, RequestCode.AUTH_GET_USER, {"username": name})
    return fastjson.decode(answer.body, UserInfo) if answer.body else None


async def list_users(admin: AsyncAdmin) -> list[dict[str, object]]:
    """All users of the brokers; they are the same on all of them."""
    broker = (await admin.masters())[0]
    answer = await admin.ask(broker.address, RequestCode.AUTH_LIST_USER)
    users = fastjson.decode(answer.body, list[UserInfo]) if answer.body else []
    return [
        {"name": user.username, "type": user.user_type, "status": user.user_status}
        for user in users
    ]


async def read_rules(admin: AsyncAdmin, name: str | None = None) -> list[dict[str, Any]]:
    """The rules of one user or of all."""
    broker = (await admin.masters())[0]
    if name is None:
        answer = await admin.ask(broker.address, RequestCode.AUTH_LIST_ACL)
        lists = fastjson.decode(answer.body, list[AclInfo]) if answer.body else []
    else:
        fields = {"subject": _SUBJECT + name}
        try:
            answer = await admin.ask(broker.address, RequestCode.AUTH_GET_ACL, fields)
        except Refused:  # Apache's brokers refuse it for a user without rules
            return []
        lists = [fastjson.decode(answer.body, AclInfo)] if answer.body else []
    return [
        {
            "user": (acl.subject or "").removeprefix(_SUBJECT),
            "policy": policy.policy_type,
            "resource": entry.resource or "",
            "actions": entry.actions or [],
            "sources": entry.source_ips or [],
            "decision": entry.decision,
        }
        for acl in lists
        for policy in acl.policies or []
        for entry in policy.entries or []
    ]


async def put_user(
    admin: AsyncAdmin, name: str, password: str | None, *, is_super: bool | None, exists: bool
) -> None:
    """Create a user on all masters, or change it there."""
    code = RequestCode.AUTH_UPDATE_USER if exists else RequestCode.AUTH_CREATE_USER
    kind = None if is_super is None else "Super" if is_super else "Normal"
    info = UserInfo(username=name, password=password, user_type=kind)
    await admin.tell_each(await admin.masters(), code, {"username": name}, fastjson.encode(info))


async def delete_user(admin: AsyncAdmin, name: str) -> None:
    """Delete a user and its rules from all masters."""
    await admin.tell_each(await admin.masters(), RequestCode.AUTH_DELETE_USER, {"username": name})


async def put_rule(
    admin: AsyncAdmin, user: str, resource: str, actions: list[str], decision: str
) -> None:
    """Set the rule of a user for a resource on all masters."""
    entry = PolicyEntryInfo(resource=resource, actions=actions, decision=decision)
    subject = _SUBJECT + user
    info = AclInfo(subject=subject, policies=[PolicyInfo(policy_type="Custom", entries=[entry])])
    await admin.tell_each(
        await admin.masters(),
        RequestCode.AUTH_UPDATE_ACL,
        {"subject": subject},
        fastjson.encode(info),
    )


async def delete_rule(admin: AsyncAdmin, user: str, resource: str) -> None:
    """Delete the rule of a user for a resource from all masters."""
    fields = {"subject": _SUBJECT + user, "policyType": "Custom", "resource": resource}
    await admin.tell_each(await admin.masters(), RequestCode.AUTH_DELETE_ACL, fields)
