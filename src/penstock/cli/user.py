"""`penstock user …`: the users that brokers know."""

from typing import TYPE_CHECKING

import click

from penstock.cli.remote import Brokers, on_brokers, print_rows

if TYPE_CHECKING:
    from penstock.wire.bodies.cluster_bodies import UserInfo

_HIDDEN = "******"
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_show = click.option("--show-password", is_flag=True, help="Print passwords too.")


@click.group(no_args_is_help=True)
def user() -> None:
    """Users of brokers, who sign their requests. Speaks to running brokers, Apache's too.

    Who may do this is a super user, or has the right to change (Update) or see (Get) the cluster.
    """


@user.command()
@on_brokers
@click.argument("name")
@click.option(
    "--password",
    prompt=True,
    hide_input=True,
    confirmation_prompt=True,
    help="Its secret key; asked for if not given.",
)
@click.option("--super", "is_super", is_flag=True, help="May do everything.")
def create(brokers: Brokers, name: str, password: str, is_super: bool) -> None:
    """Create a user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    info = UserInfo(username=name, password=password, user_type="Super" if is_super else "Normal")
    body = fastjson.encode(info)
    for address, _ in brokers.ask_each(RequestCode.AUTH_CREATE_USER, {"username": name}, body):
        print(f"created user {name} on {address}")


@user.command()
@on_brokers
@click.argument("name")
@click.option("--password", help="A new password.")
@click.option("--super/--normal", "is_super", default=None, help="Whether it may do everything.")
@click.option("--enable/--disable", "enabled", default=None, help="Whether it may do anything.")
def update(
    brokers: Brokers, name: str, password: str | None, is_super: bool | None, enabled: bool | None
) -> None:
    """Change a user: whatever is given."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    if password is None and is_super is None and enabled is None:
        raise click.UsageError("nothing to change: give --password, --super, --disable ...")
    info = UserInfo(
        username=name,
        password=password,
        user_type=None if is_super is None else "Super" if is_super else "Normal",
        user_status=None if enabled is None else "enable" if enabled else "disable",
    )
    body = fastjson.encode(info)
    for address, _ in brokers.ask_each(RequestCode.AUTH_UPDATE_USER, {"username": name}, body):
        print(f"changed user {name} on {address}")


@user.command()
@on_brokers
@click.argument("name")
def delete(brokers: Brokers, name: str) -> None:
    """Delete a user and what it may do."""
    from penstock.wire.codes import RequestCode

    for address, _ in brokers.ask_each(RequestCode.AUTH_DELETE_USER, {"username": name}):
        print(f"deleted user {name} on {address}")


@user.command()
@on_brokers
@click.argument("name")
@_show
@_json
def get(brokers: Brokers, name: str, show_password: bool, as_json: bool) -> int:
    """Show one user."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_GET_USER, {"username": name})
    if not body:
        click.echo(f"penstock: there is no user {name}", err=True)
        return 1
    _print([fastjson.decode(body, UserInfo)], show_password=show_password, as_json=as_json)
    return 0


@user.command(name="list")
@on_brokers
@click.option("--filter", "part", default="", help="Only those whose name contains this.")
@_show
@_json
def list_users(brokers: Brokers, part: str, show_password: bool, as_json: bool) -> None:
    """List users."""
    from penstock.wire import fastjson
    from penstock.wire.bodies.cluster_bodies import UserInfo
    from penstock.wire.codes import RequestCode

    body = brokers.ask_first(RequestCode.AUTH_LIST_USER, {"filter": part} if part else {})
    users = fastjson.decode(body, list[UserInfo]) if body else []
    _print(users, show_password=show_password, as_json=as_json)


def _print(users: "list[UserInfo]", *, show_password: bool, as_json: bool) -> None:
    shown = [
        {
            "user": info.username or "",
            "type": info.user_type or "",
            "status": info.user_status or "",
            "password": (info.password or "") if show_password else _HIDDEN,
        }
        for info in users
    ]
    if as_json:
        import json

        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        print_rows(("USER", "TYPE", "STATUS", "PASSWORD"), [list(row.values()) for row in shown])
