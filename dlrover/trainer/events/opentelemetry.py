"""
Events as OpenTelemetry spans, by OTLP over HTTP. Needs the extra `otel`; where to send them is OpenTelemetry's own matter
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, ...).
"""

from __future__ import annotations

from typing import Any

from dlrover.trainer.events.event import Event, EventType, content_as_json

MAX_OPEN = 4096
"""Spans that have begun and not ended; beyond, the oldest is ended as it is."""


class OpenTelemetryExporter:
    def __init__(self, processor: Any = None) -> None:
        """`processor`: instead of the OTLP exporter's, for those who have set up their own."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
                from opentelemetry.sdk.trace.export import BatchSpanProcessor

                processor = BatchSpanProcessor(OTLPSpanExporter())
        except ImportError as error:
            raise ImportError(
                "DLROVER_EVENT_EVENT_EXPORTER=OTLP needs OpenTelemetry. Install it with: pip install 'dlrover[otel]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create())
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("dlrover")
        self._open: dict[str, Any] = {}

    def export(self, event: Event) -> None:
        at = round(event.event_time.timestamp() * 1e9)
        attributes = {
            "dlrover.target": event.target,
            "dlrover.event_id": event.event_id,
            "process.pid": event.pid,
            "dlrover.content": content_as_json(event.content),
        }
        if event.event_type is EventType.BEGIN:
            self._open[event.event_id] = self._tracer.start_span(event.name, start_time=at, attributes=attributes)
            if len(self._open) > MAX_OPEN:
                self._open.pop(next(iter(self._open))).end()
        elif event.event_type is EventType.END and event.event_id in self._open:
            span = self._open.pop(event.event_id)
            span.set_attribute("dlrover.result", attributes["dlrover.content"])
            if event.content.get("success") is False:
                from opentelemetry.trace import StatusCode

                span.set_status(StatusCode.ERROR, str(event.content.get("error", ""))[:1000])
            span.end(end_time=at)
        else:
            self._tracer.start_span(event.name, start_time=at, attributes=attributes).end(end_time=at)

    def close(self) -> None:
        for span in self._open.values():
            span.end()
        self._open.clear()
        self._provider.shutdown()
