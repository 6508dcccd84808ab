"""Parity harness: the same training under real ranks and in one process that emulates them.

=============  =====================================================================
file           what it knows
=============  =====================================================================
case           one line that says what to train, how, and under which plan
zoo, blocks    the models, their data and their objectives
script         what a training step does, as a list of actions two trainers play
emulator       DistributedDataParallel's semantics in one process, without pyrannc
ranks          one real rank, under pyrannc or under DistributedDataParallel
record         what a trainer writes down, and how it is stored
compare        whether two records say the same
launch         starts ranks (`worker.py`), collects records, survives crashes and hangs
cases          the matrix: a compact part for `make test`, the rest marked `full`
several        cases with several stages per slot
placing        plans for them, whatever the planner would choose
=============  =====================================================================
"""
