"""Which rank a program is, under any launcher: its number as text, '-' outside of a job."""

import os

NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
RANK = next((os.environ[name] for name in NAMES if name in os.environ), "-")
