"""Creates the spans of a client if its options enable them."""

from typing import TYPE_CHECKING, cast

from penstock.client.client_session import Session

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from penstock.client.telemetry.spans import ClientSpans


def make_spans(
    session: Session, *, group: str | None = None, broadcast: bool | None = None
) -> "ClientSpans | None":
    """The spans of a client; None without `telemetry`. `group` and `broadcast`: of a consumer."""
    telemetry = session.options.telemetry
    if not telemetry:
        return None
    from penstock.client.telemetry.spans import ClientSpans

    model = None
    if broadcast is not None:
        model = "broadcasting" if broadcast else "clustering"
    provider = None if telemetry is True else cast("TracerProvider", telemetry)
    return ClientSpans(session, provider, group=group, model=model)
