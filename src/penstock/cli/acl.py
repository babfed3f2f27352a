"""`penstock acl …`: what users may do."""

from typing import TYPE_CHECKING

import click

from penstock.cli.remote import Brokers, on_brokers, print_rows

if TYPE_CHECKING:
    from penstock.wire.bodies.cluster_bodies import AclInfo

_POLICIES = click.Choice(["Custom", "Default"], case_sensitive=False)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_policy = click.option(
    "--policy",
    type=_POLICIES,
    default="Custom",
    show_default=True,
    help="Default rules are asked only where no Custom rule fits.",
)
_source = click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="ADDRESS",
    help="Only from this address or network (10.0.0.0/8); may be given several times.",
)


@click.group(no_args_is_help=True)
def acl() -> None:
    """What users may do. Speaks to running brokers, Apache's too.

    RESOURCE is Topic:NAME, Group:NAME or Cluster:NAME, where NAME may end in *, or * for all.
    ACTIONS are some of Pub,Sub,Create,Update,Delete,Get,List, or All. The most specific rule
    decides; between equals a denial does.
    """


@acl.command()
@on_brokers
@click.argument("user")
@click.argument("resource")
@click.argument("actions")
@_source
@_policy
def grant(
    brokers: Brokers, user: str, resource: str, actions: str, sources: tuple[str, ...], policy: str
) -> None:
    """Let USER do ACTIONS with RESOURCE; replaces what was said about RESOURCE."""
    _put(brokers, user, resource, actions, sources=sources, policy=policy, decision="Allow")


@acl.command()
@on_brokers
@click.argument("user")
@click.argument("resource")
@click.argument("actions")
@_source
@_policy
def deny(
    brokers: Brokers, user: str, resource: str, actions: str, sources: tuple[str, ...], policy: str
) -> None:
    """Keep USER from ACTIONS with RESOURCE; replaces what was said about RESOURCE."""
    _put(brokers, user, resource, actions, sources=sources, policy=policy, decision="Deny")


@acl.command()
@on_brokers
@click.argument("user")
@click.argument("resource", required=False, default="")
@_policy
def delete(brokers: Brokers, user: str, resource: str, policy: str) -> None:
    """Delete the rule about RESOURCE, or all rules of USER."""
    from penstock.wire.codes import RequestCode

    ext = {"subject": _subject(user), "policyType": policy}
    if resource:
        ext["resource"] = resource
    for address, _ in brokers.ask_each(RequestCode.AUTH_DELETE_ACL, ext):
        print(f"deleted {resource or 'all rules'} of {user} on {address}")


@acl.command()
@on_brokers
@click.argument("user")
@_json
def get(brokers: Brokers, user: str, as_json: bool) -> None:
    """Show the rules of one user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import AclInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_GET_ACL, {"subject": _subject(user)})
    _print([fastjson.decode(body, AclInfo)] if body else [], as_json=as_json)


@acl.command(name="list")
@on_brokers
@click.option("--user", "part", default="", help="Only users whose name contains this.")
@click.option("--resource", default="", help="Only rules whose resource contains this.")
@_json
def list_rules(brokers: Brokers, part: str, resource: str, as_json: bool) -> None:
    """List the rules of all users."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import AclInfo
    from penstock.wire.codes import RequestCode

    filters = {"subjectFilter": part, "resourceFilter": resource}
    ext = {name: value for name, value in filters.items() if value}
    body = brokers.ask_first(RequestCode.AUTH_LIST_ACL, ext)
    _print(fastjson.decode(body, list[AclInfo]) if body else [], as_json=as_json)


def _put(
    brokers: Brokers,
    user: str,
    resource: str,
    actions: str,
    *,
    sources: tuple[str, ...],
    policy: str,
    decision: str,
) -> None:
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyEntryInfo, PolicyInfo
    from penstock.wire.codes import RequestCode

    entry = PolicyEntryInfo(
        resource=resource,
        actions=[action.strip() for action in actions.split(",") if action.strip()],
        source_ips=list(sources) or None,
        decision=decision,
    )
    subject = _subject(user)
    info = AclInfo(subject=subject, policies=[PolicyInfo(policy_type=policy, entries=[entry])])
    body = fastjson.encode(info)
    for address, _ in brokers.ask_each(RequestCode.AUTH_UPDATE_ACL, {"subject": subject}, body):
        print(f"{decision.lower()}: {user} {actions} {resource} on {address}")


def _subject(user: str) -> str:
    return user if user.startswith("User:") else f"User:{user}"


def _print(acls: "list[AclInfo]", *, as_json: bool) -> None:
    rows = [
        {
            "user": (info.subject or "").removeprefix("User:"),
            "policy": policy.policy_type or "",
            "resource": entry.resource or "",
            "actions": ",".join(entry.actions or []),
            "from": ",".join(entry.source_ips or []) or "anywhere",
            "decision": entry.decision or "",
        }
        for info in acls
        for policy in info.policies or []
        for entry in policy.entries or []
    ]
    if as_json:
        import json

        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        heads = ("USER", "POLICY", "RESOURCE", "ACTIONS", "FROM", "DECISION")
        print_rows(heads, [list(row.values()) for row in rows])
