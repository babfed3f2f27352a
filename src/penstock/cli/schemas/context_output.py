"""JSON of `penstock context`."""

from collections.abc import Mapping
from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class ContextRow(JsonValue):
    """A named context. A value that is not set is null."""

    context: str
    in_use: Annotated[bool, doc("whether commands without `--context` use it")]
    nameserver: str | None
    namespace: str | None
    access_key: str | None
    secret_key: Annotated[str | None, doc("`******` without `--show-secrets`")]
    strict_signing: bool | None
    tls: bool | None
    tls_ca: str | None

    @classmethod
    def of(
        cls,
        name: str,
        chosen: str | None,
        values: Mapping[str, str | bool],
        *,
        secrets: bool = False,
    ) -> "ContextRow":
        """The row of a context; `chosen` is the one in use."""

        def text(key: str) -> str | None:
            return str(values[key]) if key in values else None

        def flag(key: str) -> bool | None:
            return bool(values[key]) if key in values else None

        return cls(
            context=name,
            in_use=name == chosen,
            nameserver=text("nameserver"),
            namespace=text("namespace"),
            access_key=text("access_key"),
            secret_key=text("secret_key") if secrets or "secret_key" not in values else "******",
            strict_signing=flag("strict_signing"),
            tls=flag("tls"),
            tls_ca=text("tls_ca"),
        )


class RemovedContext(JsonValue):
    """A context that was removed."""

    context: str


OUTPUTS = {
    "context add": JsonOutput(ContextRow),
    "context use": JsonOutput(ContextRow | None),
    "context remove": JsonOutput(RemovedContext),
    "context list": JsonOutput(list[ContextRow]),
    "context show": JsonOutput(ContextRow),
}
