"""`penstock acl …`: access rules of users."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.remote import BrokerOptions, broker_options, json_option, print_json, print_table

if TYPE_CHECKING:
    from penstock.cli.schemas.access_output import ChangedRule
    from penstock.wire.bodies.cluster_bodies import AclInfo

F = TypeVar("F", bound=Callable[..., Any])
_HEADS = ("USER", "POLICY", "RESOURCE", "ACTIONS", "FROM", "DECISION")
_POLICIES = click.Choice(["Custom", "Default"], case_sensitive=False)

_policy = click.option(
    "--policy",
    type=_POLICIES,
    default="Custom",
    show_default=True,
    help="Kind of rule. A Default rule applies only if no Custom rule matches.",
)
_source = click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="ADDRESS",
    help="Limit the rule to this address or network (10.0.0.0/8). Can be repeated.",
)


@click.group(no_args_is_help=True)
def acl() -> None:
    """Manage the access rules of running brokers, Penstock's or Apache's.

    RESOURCE is Topic:NAME, Group:NAME or Cluster:NAME, where NAME may end in *; or * for all.
    ACTIONS is a comma-separated list of Pub, Sub, Create, Update, Delete, Get and List, or All.
    The most specific rule applies. If an allowing and a denying rule are equally specific, the
    denying one applies.
    """


def _rule_command(command: F) -> F:
    """Add the arguments and options of the commands that set a rule."""
    result: Any = command
    for parameter in (
        json_option,
        _policy,
        _source,
        click.argument("actions"),
        click.argument("resource"),
        click.argument("user"),
        broker_options,
    ):
        result = parameter(result)
    return result  # type: ignore[no-any-return]


@acl.command()
@_rule_command
def grant(brokers: BrokerOptions, **rule: Any) -> None:
    """Allow USER the ACTIONS on RESOURCE. Replaces the rule for RESOURCE."""
    _put(brokers, **rule, decision="Allow")


@acl.command()
@_rule_command
def deny(brokers: BrokerOptions, **rule: Any) -> None:
    """Deny USER the ACTIONS on RESOURCE. Replaces the rule for RESOURCE."""
    _put(brokers, **rule, decision="Deny")


@acl.command()
@broker_options
@click.argument("user")
@click.argument("resource", required=False, default="")
@_policy
@yes_option
@json_option
def delete(
    brokers: BrokerOptions, user: str, resource: str, policy: str, yes: bool, as_json: bool
) -> None:
    """Delete the rule for RESOURCE, or all rules of USER."""
    from penstock.wire.codes import RequestCode

    if not yes:
        print_rules(brokers, user, resource=resource, policy=policy, err=True)
        confirm("Delete these rules?", yes=yes)
    ext = {"subject": _subject(user), "policyType": policy}
    if resource:
        ext["resource"] = resource
    done = brokers.ask_each(RequestCode.AUTH_DELETE_ACL, ext)
    if as_json:
        print_json(_change(user, policy, done, resource=resource or None))
        return
    for address, _ in done:
        rules = f"the rule for {resource}" if resource else "all rules"
        print(f"deleted {rules} of user {user} on {address}")


@acl.command()
@broker_options
@click.argument("user")
@json_option
def get(brokers: BrokerOptions, user: str, as_json: bool) -> None:
    """Show the rules of a user."""
    if as_json:
        print_json(_rows(_acls_of(brokers, user)))
    else:
        print_rules(brokers, user)


@acl.command(name="list")
@broker_options
@click.option("--user", "part", default="", help="Only users whose name contains this text.")
@click.option("--resource", default="", help="Only rules whose resource contains this text.")
@json_option
def list_rules(brokers: BrokerOptions, part: str, resource: str, as_json: bool) -> None:
    """List the rules of all users."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import AclInfo
    from penstock.wire.codes import RequestCode

    filters = {"subjectFilter": part, "resourceFilter": resource}
    ext = {name: value for name, value in filters.items() if value}
    body = brokers.ask_first(RequestCode.AUTH_LIST_ACL, ext)
    rows = _rows(fastjson.decode(body, list[AclInfo]) if body else [])
    if as_json:
        print_json(rows)
    elif not rows:
        print("there is no access rule" + (" that matches" if ext else ""))
        print("next: penstock acl grant --help")
    else:
        print_table(_HEADS, [list(row.values()) for row in rows])


def _put(
    brokers: BrokerOptions,
    *,
    user: str,
    resource: str,
    actions: str,
    sources: tuple[str, ...],
    policy: str,
    decision: str,
    as_json: bool,
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
    done = brokers.ask_each(RequestCode.AUTH_UPDATE_ACL, {"subject": subject}, body)
    if as_json:
        rule = {"resource": resource, "actions": ",".join(entry.actions or [])}
        print_json(_change(user, policy, done, **rule, decision=decision))
        return
    for address, _ in done:
        print(f"{decision.lower()}: {user} {actions} {resource} on {address}")


def _change(
    user: str,
    policy: str,
    done: Sequence[tuple[str, bytes]],
    *,
    resource: str | None,
    actions: str | None = None,
    decision: str | None = None,
) -> "ChangedRule":
    """A rule that was set, or without a decision deleted."""
    from penstock.cli.schemas.access_output import ChangedRule

    return ChangedRule(
        user=user.removeprefix("User:"),
        change="deleted" if decision is None else "set",
        policy=policy,
        resource=resource,
        actions=actions,
        decision=decision,
        brokers=[address for address, _ in done],
    )


def _subject(user: str) -> str:
    return user if user.startswith("User:") else f"User:{user}"


def print_rules(
    brokers: BrokerOptions, user: str, *, resource: str = "", policy: str = "", err: bool = False
) -> None:
    """Print the rules of a user, only those for a resource and of a policy if they are given."""
    rows = [
        row
        for row in _rows(_acls_of(brokers, user))
        if resource in ("", row["resource"]) and policy.lower() in ("", row["policy"].lower())
    ]
    print_table(_HEADS, [list(row.values()) for row in rows], err=err)


def _acls_of(brokers: BrokerOptions, user: str) -> "list[AclInfo]":
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import AclInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_GET_ACL, {"subject": _subject(user)})
    return [fastjson.decode(body, AclInfo)] if body else []


def _rows(acls: "list[AclInfo]") -> list[dict[str, str]]:
    return [
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
