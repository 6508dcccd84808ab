"""Stands in for the metadata services of AWS, GCP and Azure, with a spot instance that is to go.

``python metadata_service.py SECONDS`` serves on port 8000 of the loopback interface. Standard library only.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

OWN_NAME = "spot_0"
"""The virtual machine's own name, as Azure has it."""


class Service(HTTPServer):
    """A server of this machine.

    Args:
        port: 0: any.
        seconds: From each answer on until the instance goes; None: it stays.
    """

    def __init__(self, port: int = 0, seconds: float | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.seconds = seconds
        self.resources = [OWN_NAME]
        """Whom Azure's event is for."""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        """What programs connect to."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    """As the pages of the providers have it, 2026: what is asked without their headers is refused."""

    server: Service

    def do_PUT(self) -> None:
        granted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._say(200, "the token") if granted else self._say(400)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answers = {
            "/latest/meta-data/spot/instance-action": self._aws,
            "/computeMetadata/v1/instance/preempted": self._gcp,
            "/metadata/scheduledevents?api-version=2020-07-01": self._azure,
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text": self._azure_name,
        }
        answers.get(self.path, lambda: self._say(404))()

    def _goes(self) -> datetime:
        assert self.server.seconds is not None
        return datetime.now(UTC) + timedelta(seconds=self.server.seconds)

    def _aws(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "the token":
            self._say(401)
        elif self.server.seconds is None:
            self._say(404)
        else:
            self._say(200, json.dumps({"action": "terminate", "time": self._goes().strftime("%Y-%m-%dT%H:%M:%SZ")}))

    def _gcp(self) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self._say(403)
        else:
            self._say(200, "FALSE" if self.server.seconds is None else "TRUE")

    def _azure(self) -> None:
        event = {"EventId": "1", "ResourceType": "VirtualMachine", "EventStatus": "Scheduled"}
        events = [{**event, "EventType": "Freeze", "Resources": [OWN_NAME], "NotBefore": ""}]
        if self.server.seconds is not None:
            goes = format_datetime(self._goes(), usegmt=True)
            events += [{**event, "EventType": "Preempt", "Resources": self.server.resources, "NotBefore": goes}]
        self._azure_says(json.dumps({"DocumentIncarnation": 1, "Events": events}))

    def _azure_name(self) -> None:
        self._azure_says(OWN_NAME)

    def _azure_says(self, text: str) -> None:
        self._say(200, text) if self.headers["Metadata"] == "true" else self._say(400)

    def _say(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    Service(8000, float(sys.argv[1])).serve_forever()
