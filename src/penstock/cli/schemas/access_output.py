"""JSON of `penstock user` and `penstock acl`."""

from typing import Annotated, Literal

import msgspec

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class UserOutput(JsonValue):
    """A user of the brokers."""

    user: str
    type: Annotated[str, doc("`Super` or `Normal`")]
    status: Annotated[str, doc("`enable` or `disable`")]
    password: Annotated[str, doc("`******` without `--show-password`")]


class RuleOutput(JsonValue):
    """An access rule of a user."""

    user: str
    policy: Annotated[str, doc("`Custom` or `Default`")]
    resource: str
    actions: Annotated[str, doc("separated by commas")]
    source: Annotated[str, doc("addresses, separated by commas, or `anywhere`")] = msgspec.field(
        name="from"
    )
    decision: Annotated[str, doc("`Allow` or `Deny`")]


class ChangedUser(JsonValue):
    """A user that was created, changed or deleted."""

    user: str
    change: Annotated[Literal["created", "changed", "deleted"], doc("what was done")]
    brokers: Annotated[list[str], doc("addresses of the brokers")]


class ChangedRule(JsonValue):
    """An access rule that was set or deleted."""

    user: str
    change: Annotated[Literal["set", "deleted"], doc("what was done")]
    policy: Annotated[str, doc("`Custom` or `Default`")]
    resource: Annotated[str | None, doc("null: all rules of the user")]
    actions: Annotated[str | None, doc("separated by commas; null for a deleted rule")]
    decision: Annotated[str | None, doc("`Allow` or `Deny`; null for a deleted rule")]
    brokers: Annotated[list[str], doc("addresses of the brokers")]


OUTPUTS = {
    "user create": JsonOutput(ChangedUser),
    "user update": JsonOutput(ChangedUser),
    "user delete": JsonOutput(ChangedUser),
    "user get": JsonOutput(list[UserOutput]),
    "user list": JsonOutput(list[UserOutput]),
    "acl grant": JsonOutput(ChangedRule),
    "acl deny": JsonOutput(ChangedRule),
    "acl delete": JsonOutput(ChangedRule),
    "acl get": JsonOutput(list[RuleOutput]),
    "acl list": JsonOutput(list[RuleOutput]),
}
