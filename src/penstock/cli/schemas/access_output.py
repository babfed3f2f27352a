"""JSON of `penstock user` and `penstock acl`."""

from typing import Annotated

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


OUTPUTS = {
    "user get": JsonOutput(list[UserOutput]),
    "user list": JsonOutput(list[UserOutput]),
    "acl get": JsonOutput(list[RuleOutput]),
    "acl list": JsonOutput(list[RuleOutput]),
}
