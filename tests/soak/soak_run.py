"""soak_run.py JOBS AT_ONCE SEED: jobs in a row against one daemon, of which some are hit; nothing may be lost or grow.

::

    soak_plan.draw ──► SoakJob.turn, AT_ONCE at a time ──► SoakJob.faults
                            │ a killed job with checkpoints: a later one of its kind goes on from there
                            ▼
    daemon: a sample each second, and one at rest before and after ──► growth; files, sockets, store, checkpoints

A line for each job; exit code 1 if anything is wrong, and then everything is kept for a look.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import soak_plan
from soak_job import ROOT, Output, Places, SoakJob, kill
from soak_leaks import DaemonSample, below, growth, look_at_daemon, processes_of, shared_memory, temporary, unused
from soak_plan import Kind, Planned

from rannd.runner.watch.processes import adopt_orphans

TICK = 0.05
SAMPLE = 1.0
"""Seconds between two samples of the daemon."""
REST = 60.0
"""Seconds within which the daemon has to close what belongs to clients that are gone."""
MORE_RSS = 2 * 2**20
"""Bytes by which the daemon may grow from the first to the last third of a life, of which the first jobs take 1 MiB."""
MORE_FDS = 2
"""The same of descriptors, while jobs come and go. At rest it has to have no more than before the first job."""
MOST_FAULTS = 20


class Soak:
    """The jobs of one soak, and what is seen of them."""

    def __init__(self, jobs: int, at_once: int, seed: int) -> None:
        self.places = Places(Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp")))
        self.waiting = soak_plan.draw(jobs, seed)
        self.jobs, self.at_once = jobs, at_once
        self.running: list[SoakJob] = []
        self.ended: list[SoakJob] = []
        self.wrong: list[str] = []
        self.right: dict[Kind, Output] = {}
        self.seconds: dict[Kind, float] = {}
        self.unfinished: defaultdict[Kind, list[tuple[Path, int]]] = defaultdict(list)
        """Folders of killed jobs, and the step that was saved there."""
        self.samples: list[DaemonSample] = []
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self.at_first: DaemonSample | None = None
        self.files_at_first: set[str] = set()
        self.entries_at_first = 0
        self.shared_at_first = shared_memory()
        self.began = time.monotonic()
        self._sampled = 0.0

    def run(self) -> None:
        """Everything."""
        self.command("rannc-cache", "ls")
        self.at_first = self._at_rest(None)
        kinds = len({planned.kind for planned in self.waiting})
        first, self.waiting = self.waiting[:kinds], self.waiting[kinds:]
        self._play(first)
        if not all(output.complete(kind) for kind, output in self.right.items()):
            return  # nothing to compare with
        self.files_at_first, self.entries_at_first = self._lasting_files(), self._entries()
        print(f"before the hits: {self.entries_at_first} traces and deployments", flush=True)
        self._play(self.waiting)
        self._look_at_the_end()

    def _play(self, planned: list[Planned]) -> None:
        """Run these jobs."""
        waiting = list(planned)
        while (waiting or self.running) and len(self.wrong) < MOST_FAULTS:
            while waiting and len(self.running) < self.at_once:
                self._start(waiting.pop(0))
            time.sleep(TICK)
            for job in list(self.running):
                if job.turn():
                    self.running.remove(job)
                    self._take(job)
            if time.monotonic() > self._sampled + SAMPLE:
                self._sampled = time.monotonic()
                self._reap()
                self._sample()

    def _start(self, planned: Planned) -> None:
        folder, known = self.places.base / "jobs" / str(planned.number), 0
        if self.unfinished[planned.kind]:
            folder, known = self.unfinished[planned.kind].pop(0)
            self.counts["resumed"] += known > 0
        self.running.append(SoakJob(planned, self.places, folder, known, self.seconds.get(planned.kind, 0.0)))

    def _take(self, job: SoakJob) -> None:
        """A job that has ended."""
        self.ended.append(job)
        seconds = job.ended - job.started
        if job.kind not in self.right:
            self.right[job.kind] = job.output
            wrong = job.faults(None)
        else:
            wrong = job.faults(self.right[job.kind])
        if not job.hits and not job.known:
            self.seconds[job.kind] = min(seconds, self.seconds.get(job.kind, seconds))
        self.counts["hit" if job.is_hit else "not hit"] += 1
        if job.is_hit:
            self.counts["hit too late"] += job.code == 0
            self.longest = max(self.longest, job.lasted)
        self.counts["daemon hit"] += "daemon" in job.hits
        self.counts["other plan"] += job.output.plan not in ("", self.right[job.kind].plan)
        if job.kind.saves != "none" and job.code != 0:
            self.unfinished[job.kind].append((job.folder, max(job.known, job.output.saved)))
        self._say(job, seconds)
        for each in wrong:
            self._fault(f"job {job.planned.number} ({job.kind}; {job.planned.hit}): {each}; see {job.output_file}")

    def _say(self, job: SoakJob, seconds: float) -> None:
        told = [str(job.kind)]
        if job.known:
            told.append(f"from step {job.known} on")
        for hit in filter(None, (job.planned.hit, job.planned.hits_daemon)):
            told.append(str(hit) + ("" if hit.target in job.hits else " (had ended before)"))
        told.append(f"code {job.code} after {seconds:.1f} s" + (f", {job.lasted:.1f} s after it" if job.is_hit else ""))
        told.append(str(self.samples[-1]) if self.samples else "no daemon")
        since = f"{time.monotonic() - self.began:6.0f} s  {len(self.ended)}/{self.jobs}"
        print(f"{since}  job {job.planned.number}: {'; '.join(told)}", flush=True)

    def _fault(self, text: str) -> None:
        self.wrong.append(text)
        print(f"WRONG: {text}", flush=True)

    # -- the daemon -----------------------------------------------------------------------------------------------

    def _sample(self) -> DaemonSample | None:
        found = look_at_daemon(self.places.runtime, len(self.ended))
        if found is not None:
            self.samples.append(found)
        return found

    def _at_rest(self, wanted: DaemonSample | None) -> DaemonSample:
        """The daemon without jobs, once it has no more descriptors than in `wanted`, or after a while."""
        self.command("rannd", "start")  # it may have been the last thing that was hit
        end = time.monotonic() + REST
        before: DaemonSample | None = None
        while True:
            time.sleep(1.0)
            self._reap()
            found = look_at_daemon(self.places.runtime, len(self.ended))
            if found is not None:
                still = before is not None and before.fds == found.fds
                if time.monotonic() > end or (still if wanted is None else found.fds <= wanted.fds):
                    return found
                before = found

    def _growth_of_the_daemon(self) -> None:
        """Compare thirds of the samples of the process that lived longest, and the daemon at rest."""
        assert self.at_first is not None
        last = self._at_rest(self.at_first)
        print(f"at rest: {last}; before the first job: {self.at_first}", flush=True)
        if last.fds > self.at_first.fds:
            self._fault(f"the daemon has {last.fds} descriptors at rest, it had {self.at_first.fds}")
        if last.threads > self.at_first.threads:
            self._fault(f"the daemon has {last.threads} threads at rest, it had {self.at_first.threads}")
        pid, _ = Counter(sample.pid for sample in self.samples).most_common(1)[0]
        mine = [sample for sample in self.samples if sample.pid == pid]
        rss, fds = growth([sample.rss for sample in mine]), growth([sample.fds for sample in mine])
        threads = growth([sample.threads for sample in mine])
        print(
            f"daemon {pid}, {len(mine)} samples, jobs {mine[0].jobs} to {mine[-1].jobs}, medians of the first and the "
            f"last third: memory {rss / 2**20:+.2f} MiB, descriptors {fds:+.0f}, threads {threads:+.0f}; at most "
            f"{max(sample.rss for sample in mine) / 2**20:.1f} MiB, {max(sample.fds for sample in mine)} descriptors",
            flush=True,
        )
        if rss > MORE_RSS:
            self._fault(f"the daemon's memory grew by {rss / 2**20:.1f} MiB")
        if fds > MORE_FDS:
            self._fault(f"the daemon's descriptors grew by {fds:.0f}")
        if threads > 0:
            self._fault(f"the daemon's threads grew by {threads:.0f}")
        for sample in self.samples:
            if sample.zombies or sample.listening:
                self._fault(f"after {sample.jobs} jobs: {sample.zombies} zombies, {sample.listening} listening sockets")

    # -- what is left ---------------------------------------------------------------------------------------------

    def _look_at_the_end(self) -> None:
        self._growth_of_the_daemon()
        left = {pid: words for job in self.ended for pid, words in processes_of(job.mark).items()}
        if left:
            self._fault(f"processes are left: {left}")
        if new := sorted(self._lasting_files() - self.files_at_first):
            self._fault(f"files that were not there before the hits: {new}")
        if late := [path for folder in self.places.base.glob("tmp/*") for path in temporary(folder)]:
            self._fault(f"temporary files, after the end of their jobs: {late}")
        end = time.monotonic() + REST  # other programs on this machine may be about to remove theirs
        while (shared := unused(shared_memory() - self.shared_at_first)) and time.monotonic() < end:
            time.sleep(SAMPLE)
        if shared:
            self._fault(f"shared memory that nobody uses: {sorted(shared)}")
        entries = self._entries()
        print(f"{entries} traces and deployments in the store, all entries sound", flush=True)
        if entries != self.entries_at_first:
            self._fault(f"the store has {entries} traces and deployments, it had {self.entries_at_first}")
        self._load_checkpoints()

    def _lasting_files(self) -> set[str]:
        """Everything in the home, and of the daemon, but for a journal of the store, which comes and goes."""
        files = below(self.places.home) | below(self.places.runtime) | below(self.places.cache)
        return {file for file in files if not file.endswith(("-journal", "-wal", "-shm"))}

    def _entries(self) -> int:
        """Traces and deployments in the store, whose entries are all checked; what was measured may be more."""
        self.command("rannc-cache", "verify")  # fails if one is corrupt
        kinds = [line.split("\t")[0] for line in self.command("rannc-cache", "ls").splitlines()]
        return kinds.count("trace") + kinds.count("deployment")

    def _load_checkpoints(self) -> None:
        """Load the last checkpoint of each job that was killed and that no other has finished."""
        known = {folder: (kind, step) for kind, each in self.unfinished.items() for folder, step in each}
        there = {folder: kind.model for folder, (kind, _) in known.items() if (folder / "last").exists()}
        lost = [str(folder) for folder, (_, step) in known.items() if step and folder not in there]
        if lost:
            self._fault(f"no checkpoint, though one had been saved: {lost}")
        if there:
            arguments = [f"{model}={folder}" for folder, model in there.items()]
            text = self.command(sys.executable, str(ROOT / "tests/soak/programs/soak_loading.py"), *arguments)
            steps = {Path(path): int(step) for path, step in re.findall(r"loaded (\S+) step (\d+)", text)}
            for folder in there:
                if steps.get(folder, -1) < known[folder][1]:
                    self._fault(f"{folder}: step {steps.get(folder)} was loaded, {known[folder][1]} had been saved")
            self.counts["loaded at the end"] = len(steps)

    # -- helpers --------------------------------------------------------------------------------------------------

    def command(self, *words: str) -> str:
        """Output of a command that has to succeed."""
        done = subprocess.run(
            words,
            env=self.places.environment("commands"),
            cwd=self.places.base,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode:
            self._fault(f"{' '.join(words)[:300]} ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def _reap(self) -> None:
        """Reap what killed processes have left to this one, as process 1 does it elsewhere."""
        jobs = {job.process.pid for job in self.running}
        for child in psutil.Process().children():
            if child.pid not in jobs:
                with suppress(psutil.Error, ChildProcessError):
                    if child.status() == psutil.STATUS_ZOMBIE:
                        os.waitpid(child.pid, os.WNOHANG)

    def close(self) -> None:
        """End what still runs."""
        for job in self.running:
            job.end()
        daemon = look_at_daemon(self.places.runtime, 0)
        if daemon is not None:
            kill(daemon.pid, signal.SIGTERM)
        if not self.wrong:
            shutil.rmtree(self.places.base)

    def figures(self) -> str:
        """What is told at the end."""
        hits: Counter[str] = Counter()
        for job in self.ended:
            if job.is_hit and job.planned.hit is not None:
                hits[f"{job.planned.hit.target} {job.planned.hit.signum.name}"] += 1
        times = [job.ended - job.started for job in self.ended if not job.hits]
        return (
            f"{len(self.ended)} jobs, {self.at_once} at a time, in {(time.monotonic() - self.began) / 60:.1f} min; "
            f"one that is not hit takes {statistics.median(times):.1f} s\n"
            f"{dict(self.counts)}\nhits: {dict(sorted(hits.items()))}\n"
            f"longest from a hit to the end of the last process: {self.longest:.1f} s\n"
            f"wrong: {len(self.wrong)}"
        )


def main() -> int:
    """Run it; the exit code."""
    jobs, at_once, seed = map(int, sys.argv[1:])
    adopt_orphans()
    for signum in (signal.SIGINT, signal.SIGTERM):
        # Also where a shell has started this in the background, with SIGINT ignored: jobs inherit that.
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    soak = Soak(jobs, at_once, seed)
    print(f"{jobs} jobs, {at_once} at a time, seed {seed}, in {soak.places.base}", flush=True)
    try:
        soak.run()
        print(soak.figures(), flush=True)
    finally:
        soak.close()
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
