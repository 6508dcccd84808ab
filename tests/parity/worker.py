"""One rank of the parity harness: trains the cases of a file one after the other and records each.

usage: mpirun -np N python worker.py {rannc|ddp} FIRST FOLDER

Under rannc each case is trained a second time over the strict transport, which follows NCCL's rules, with equal results
bit by bit. Reads FOLDER/cases.json, skips the cases before number FIRST, and writes for each of the others
`<number>.rank<rank>.npz`, or `.error` with a traceback. A rank that fails takes the job down: the others
wait for it in a collective. `.stuck` receives every thread's stack where a case takes too long or crashes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    # ranks outlive a killed mpirun otherwise
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    backend_name, first, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

    from parity import ranks
    from parity.case import decode_cases
    from parity.record import check_equal, save

    backend: ranks.Backend = ranks.Rannc() if backend_name == "rannc" else ranks.Ddp(folder / f"rendezvous{first}")
    cases = decode_cases((folder / "cases.json").read_bytes())
    limit = float(os.environ["PARITY_CASE_SECONDS"])
    for number in range(first, len(cases)):
        stem = folder / f"{number}.rank{backend.rank}"
        with stem.with_suffix(f"{stem.suffix}.stuck").open("w") as stuck:
            faulthandler.enable(stuck)  # the file says where a rank crashes, as well
            faulthandler.dump_traceback_later(limit, exit=True, file=stuck)
            try:
                record = ranks.train(cases[number], backend)
                if isinstance(backend, ranks.Rannc):
                    with backend.strict():
                        check_equal(ranks.train(cases[number], backend), record)
                save(record, stem.with_suffix(f"{stem.suffix}.npz"))
                backend.barrier()  # a failure in the next case must not take a rank that still saves this one
            except Exception:
                stem.with_suffix(f"{stem.suffix}.error").write_text(traceback.format_exc())
                sys.stderr.flush()
                os._exit(3)  # not sys.exit: leaving in order would wait for the other ranks
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
    backend.close()


if __name__ == "__main__":
    main()
