"""Small public models of all families, with random weights: the measure of what can be traced."""

from __future__ import annotations

from zoo.decoders import DECODERS
from zoo.encoders import ENCODERS, TRANSLATORS
from zoo.entry import Batch, Entry
from zoo.modalities import PAIRS, SERIES, SOUND
from zoo.peculiar import PECULIAR
from zoo.plain import PLAIN
from zoo.vision import VISION

__all__ = ["ZOO", "Batch", "Entry"]

ZOO: tuple[Entry, ...] = (*DECODERS, *ENCODERS, *TRANSLATORS, *VISION, *PAIRS, *SOUND, *SERIES, *PLAIN, *PECULIAR)
