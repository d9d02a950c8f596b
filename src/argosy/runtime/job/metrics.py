"""Serve figures of a run to a Prometheus server on the same machine, at
http://127.0.0.1:PORT/metrics. Needs no torch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from argosy.errors import impossible

_HELP = {
    "argosy_steps_total": "Steps that were done.",
    "argosy_samples_total": "Samples that were trained on.",
    "argosy_loss": "Loss of the last step.",
    "argosy_step_seconds": "Seconds of the last step.",
    "argosy_decisions_total": "Changes of schedule, shares or plan, by what was changed.",
    "argosy_moved_bytes_total": "Bytes that changed hands between ranks in migrations.",
    "argosy_link_bytes_per_second": "What a link is believed to carry.",
    "argosy_device_speed": "How fast a device is believed to be, relative to its full speed.",
}
"""Help texts of the figures, by name."""


class Metrics:
    """The newest figures of a run, which the HTTP server reads."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.lock = threading.Lock()

    def step(self, loss: float, seconds: float, samples: int) -> None:
        with self.lock:
            self.values["argosy_steps_total", ()] += 1
            self.values["argosy_samples_total", ()] += samples
            self.values["argosy_loss", ()] = loss
            self.values["argosy_step_seconds", ()] = seconds

    def decision(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "decision":
            with self.lock:
                self.values["argosy_decisions_total", (("what", event["what"]),)] += 1
                self.values["argosy_moved_bytes_total", ()] += event.get("moved_bytes", 0)

    def beliefs(self, bandwidths: Mapping[str, float], speeds: Mapping[str, float]) -> None:
        with self.lock:
            for name, rate in bandwidths.items():
                self.values["argosy_link_bytes_per_second", (("link", name),)] = rate
            for name, speed in speeds.items():
                self.values["argosy_device_speed", (("device", name),)] = speed

    def text(self) -> str:
        """Return the figures in the text format of Prometheus."""
        with self.lock:
            values = sorted(self.values.items())
        lines: list[str] = []
        for (name, labels), value in values:
            if not any(line.startswith(f"# HELP {name} ") for line in lines):
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}"]
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{name}{{{inside}}} {value:.12g}" if inside else f"{name} {value:.12g}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def serve(metrics: Metrics, port: int) -> ThreadingHTTPServer:
    """Serve figures on the loopback interface only, in threads that end with the process; port 0
    takes any free port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_metrics = self.path == "/metrics"
            body = metrics.text().encode() if is_metrics else b"see /metrics\n"
            self.send_response(200 if is_metrics else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing about requests."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        raise impossible(f"use port {port}", error, "another --metrics-port") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
