"""`penstock user …`: users of brokers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click

from penstock.cli.access.acl_command import print_rules
from penstock.cli.confirmation.confirm import ask_secret, confirm, yes_option
from penstock.cli.remote import BrokerOptions, broker_options, json_option, print_json, print_table

if TYPE_CHECKING:
    from penstock.wire.bodies.cluster_bodies import UserInfo

_HIDDEN = "******"
_NOT_SENT = "(not sent by the broker)"

_show = click.option(
    "--show-password",
    is_flag=True,
    help="Show passwords that the broker sends; Penstock's brokers send none.",
)


@click.group(no_args_is_help=True)
def user() -> None:
    """Manage the users of running brokers, Penstock's or Apache's.

    This needs a super user, or the permission to change (Update) or read (Get) the cluster.
    """


@user.command()
@broker_options
@click.argument("name")
@click.option("--password", help="Password, which is also the secret key. Prompted for if omitted.")
@click.option("--super", "is_super", is_flag=True, help="Create a super user.")
@json_option
def create(
    brokers: BrokerOptions, name: str, password: str | None, is_super: bool, as_json: bool
) -> None:
    """Create a user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    if password is None:
        password = ask_secret("Password", "--password", repeat=True)
    info = UserInfo(username=name, password=password, user_type="Super" if is_super else "Normal")
    body = fastjson.encode(info)
    done = brokers.ask_each(RequestCode.AUTH_CREATE_USER, {"username": name}, body)
    _print_change(name, "created", done, as_json=as_json)


@user.command()
@broker_options
@click.argument("name")
@click.option("--password", help="Set a new password.")
@click.option("--super/--normal", "is_super", default=None, help="Change the type of the user.")
@click.option("--enable/--disable", "enabled", default=None, help="Enable or disable the user.")
@json_option
def update(
    brokers: BrokerOptions,
    name: str,
    password: str | None,
    is_super: bool | None,
    enabled: bool | None,
    as_json: bool,
) -> None:
    """Change the given properties of a user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    if password is None and is_super is None and enabled is None:
        raise click.UsageError(
            "nothing to change; give --password, --super, --normal, --enable or --disable"
        )
    info = UserInfo(
        username=name,
        password=password,
        user_type=None if is_super is None else "Super" if is_super else "Normal",
        user_status=None if enabled is None else "enable" if enabled else "disable",
    )
    body = fastjson.encode(info)
    done = brokers.ask_each(RequestCode.AUTH_UPDATE_USER, {"username": name}, body)
    _print_change(name, "changed", done, as_json=as_json)


@user.command()
@broker_options
@click.argument("name")
@yes_option
@json_option
def delete(brokers: BrokerOptions, name: str, yes: bool, as_json: bool) -> None:
    """Delete a user and its access rules."""
    from penstock.wire.codes import RequestCode

    if not yes:
        print_rules(brokers, name, err=True)
        confirm(f"Delete the user {name} and its rules?", yes=yes)
    done = brokers.ask_each(RequestCode.AUTH_DELETE_USER, {"username": name})
    _print_change(name, "deleted", done, as_json=as_json)


@user.command()
@broker_options
@click.argument("name")
@_show
@json_option
def get(brokers: BrokerOptions, name: str, show_password: bool, as_json: bool) -> int:
    """Show a user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_GET_USER, {"username": name})
    if not body:
        click.echo(f"penstock: user {name} does not exist", err=True)
        return 1
    _print([fastjson.decode(body, UserInfo)], show_password=show_password, as_json=as_json)
    return 0


@user.command(name="list")
@broker_options
@click.option("--filter", "part", default="", help="Only users whose name contains this text.")
@_show
@json_option
def list_users(brokers: BrokerOptions, part: str, show_password: bool, as_json: bool) -> None:
    """List users."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_LIST_USER, {"filter": part} if part else {})
    users = fastjson.decode(body, list[UserInfo]) if body else []
    if not users and not as_json:
        print("there is no user" + (f" whose name contains {part!r}" if part else ""))
        _print_access_control(brokers)
        return
    _print(users, show_password=show_password, as_json=as_json)


def _print_change(
    name: str,
    change: Literal["created", "changed", "deleted"],
    done: Sequence[tuple[str, bytes]],
    *,
    as_json: bool,
) -> None:
    from penstock.cli.schemas.access_output import ChangedUser

    addresses = [address for address, _ in done]
    if as_json:
        print_json(ChangedUser(user=name, change=change, brokers=addresses))
        return
    for address in addresses:
        print(f"{change} user {name} on {address}")


def _print_access_control(brokers: BrokerOptions) -> None:
    """Say whether the first broker checks requests, if it tells."""
    from penstock.errors import PenstockError
    from penstock.wire.codes import RequestCode
    from penstock.wire.java_properties import parse_properties

    try:
        settings = parse_properties(brokers.ask_first(RequestCode.GET_BROKER_CONFIG, {}))
    except PenstockError:
        settings = {}
    if settings.get("authenticationEnabled") == "false":
        print("access control is off: the broker accepts all requests (authenticationEnabled)")
    print("next: penstock user create NAME")


def _print(users: "list[UserInfo]", *, show_password: bool, as_json: bool) -> None:
    shown = [
        {
            "user": info.username or "",
            "type": info.user_type or "",
            "status": info.user_status or "",
            "password": (info.password or _NOT_SENT) if show_password else _HIDDEN,
        }
        for info in users
    ]
    if as_json:
        print_json(shown)
    else:
        print_table(("USER", "TYPE", "STATUS", "PASSWORD"), [list(row.values()) for row in shown])
