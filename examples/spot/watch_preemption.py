"""Tells the elastic jobs on a spot instance when the instance is going away; one runs on each instance, beside the job:

    python watch_preemption.py aws &
    python watch_preemption.py gcp &
    python watch_preemption.py azure &

It asks the provider's metadata service every few seconds. On a notice it runs `rannc-run notify-preempt`, again and
again until a job has taken it, and ends: while a job is between two starts, nobody listens on machines other than that
of rannc-run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

NOTICE_S = 30.0
"""Seconds that GCP and Azure give at least, for an answer without a time."""
TIMEOUT_S = 10.0

# The service is on the machine's own link: no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """What the service answers; None: there is nothing under this address."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(1 << 20).decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def left(moment: datetime) -> float:
    """Seconds until a moment."""
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def aws(address: str) -> float | None:
    """Spot instances of EC2 have 2 minutes: {"action": "terminate", "time": "2026-11-25T08:22:00Z"}; before it 404."""
    token = ask(f"{address}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    text = ask(f"{address}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    return left(datetime.fromisoformat(json.loads(text)["time"]).replace(tzinfo=UTC)) if text is not None else None


def gcp(address: str) -> float | None:
    """Spot VMs of Compute Engine have 30 seconds: TRUE, before it FALSE."""
    text = ask(f"{address}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return NOTICE_S if text is not None and text.strip() == "TRUE" else None


def azure(address: str) -> float | None:
    """Spot VMs of Azure have 30 seconds: an event for it of the type Preempt; others are told of it as well."""
    headers = {"Metadata": "true"}
    events = json.loads(ask(f"{address}/metadata/scheduledevents?api-version=2020-07-01", headers) or '{"Events": []}')
    going = [event for event in events["Events"] if event["EventType"] in ("Preempt", "Terminate")]
    if not going:
        return None
    name = ask(f"{address}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    for event in going:
        if name in event["Resources"]:
            # Empty once it has begun.
            return left(parsedate_to_datetime(event["NotBefore"])) if event["NotBefore"] else 0.0
    return None


SERVICES: dict[str, tuple[str, Callable[[str], float | None]]] = {
    "aws": ("http://169.254.169.254", aws),
    "gcp": ("http://metadata.google.internal", gcp),
    "azure": ("http://169.254.169.254", azure),
}


def main() -> int:
    """Ask until there is a notice, and hand it on until a job has taken it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("service", choices=SERVICES)
    parser.add_argument("--address", help="address of the metadata service, without a path")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between two questions")
    options = parser.parse_args()
    address, seconds_left = SERVICES[options.service]
    address = (options.address or address).rstrip("/")
    failed = ""
    if shutil.which("rannc-run") is None:
        parser.error("rannc-run is not on PATH; a notice could not be handed on")
    while True:
        try:
            seconds, problem = seconds_left(address), ""
        except (OSError, ValueError, KeyError, TypeError) as error:  # not there for a moment, or not such a machine
            seconds, problem = None, f"{address}: {error!r}"
        if problem != failed and problem:
            print(f"watch_preemption: {problem}; asking again", file=sys.stderr, flush=True)
        failed = problem
        if seconds is not None:
            told = subprocess.run(["rannc-run", "notify-preempt", "--in", f"{seconds:.0f}"], check=False)
            if told.returncode == 0:
                return 0
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
