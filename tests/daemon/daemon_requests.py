"""One request of each kind."""

from rannd.daemon.common import protocol

KEY = "0" * 40
REQUESTS = [
    protocol.Hello("0.1.0", 10.0, 1 << 30),
    protocol.Get([KEY]),
    protocol.Put("0.1.0", [protocol.NewEntry(KEY, "trace", {"a": "1"}, b"\0\xff")]),
    protocol.Acquire(KEY, "f" * 32, 1, 5.0),
    protocol.Beat(KEY, "f" * 32, "profiling, 40 %"),
    protocol.Release(KEY, "f" * 32),
    protocol.Discard(KEY, "out of memory"),
    protocol.Status(),
    protocol.List("", "ab"),
    protocol.Clear("trace", 1.0, ["abcd"]),
    protocol.Verify(),
    protocol.Why("trace", {"a": "1"}),
    protocol.Misses(),
    protocol.Prune(1 << 20),
    protocol.Zero(),
    protocol.Stop("because"),
]
