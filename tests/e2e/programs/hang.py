"""Says which process it is and hangs; 'stubborn' ignores SIGTERM and SIGINT, with 'child' its child hangs too."""

import os
import signal
import sys

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "child" in sys.argv and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"pid {os.getpid()}", flush=True)
    signal.pause()
print(f"pid {os.getpid()} watcher {os.getppid()}", flush=True)
while True:
    signal.pause()
