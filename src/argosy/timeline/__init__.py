"""Record what happened or would happen: spans on devices and links, memory over time."""

from argosy.timeline.timeline import Contact, ContactKind, LinkUse, Span, SpanKind, Timeline

__all__ = ["Contact", "ContactKind", "LinkUse", "Span", "SpanKind", "Timeline"]
