"""OpenTelemetry: spans of clients, and the trace context in messages.

The packages of the extra `otel` are imported only when a client has `telemetry` enabled, or when
one of these functions is called.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.client.telemetry.message_context import context_of, processing
    from penstock.client.telemetry.otlp import export_traces

__all__ = ["context_of", "export_traces", "processing"]

_MODULES = {
    "context_of": "message_context",
    "export_traces": "otlp",
    "processing": "message_context",
}

__getattr__ = lazy_exports(__name__, _MODULES)
