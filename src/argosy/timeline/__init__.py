"""What happened or would happen: spans on devices and links, memory over time."""

from argosy.timeline.timeline import LinkUse, Span, SpanKind, Timeline

__all__ = ["LinkUse", "Span", "SpanKind", "Timeline"]
