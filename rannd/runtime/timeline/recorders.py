"""Which recorder a rank has."""

from __future__ import annotations

import torch

from rannd.device.identity import is_accelerator
from rannd.runtime.timeline.device_recorder import DeviceRecorder
from rannd.runtime.timeline.host_recorder import HostRecorder
from rannd.runtime.timeline.recorder import OFF, StepRecorder

_OFF, _FULL = ("off", "false"), ("full", "true")


def recorder_for(device: torch.device, trace_events: str, event_trace_file: str) -> StepRecorder:
    """Return the recorder for the items `trace_events` and `event_trace_file`."""
    full = trace_events in _FULL or bool(event_trace_file)
    if not full and trace_events in _OFF:
        return OFF
    return DeviceRecorder(device, full=full) if is_accelerator(device) else HostRecorder(full=full)
