"""Export of spans over OTLP in one call, for applications without their own set-up."""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def export_traces(
    service: str | None = None, *, endpoint: str | None = None, install: bool = True
) -> TracerProvider:
    """Send the spans of this process to a collector over OTLP/HTTP; returns the provider.

    `service` is the service name. `endpoint` is the URL of the collector, for example
    "http://collector:4318/v1/traces". By default both come from OpenTelemetry's environment
    variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_ENDPOINT), as do headers, timeouts and the
    sampler. `install` makes the provider the global one, which all libraries use. Spans are sent
    by a thread; the end of the process waits for it.
    """
    attributes = {} if service is None else {SERVICE_NAME: service}
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    if install:
        trace.set_tracer_provider(provider)
    return provider
