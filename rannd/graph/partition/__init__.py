"""Partitioning of a traced graph into subgraphs, and structural hashes.

In: a traced graph. Out: which nodes are placed on a stage and which are recomputed (`placement.py`), subgraphs
(`cut.py`), the hash of a whole graph (`graph_hash.py`) and of a block (`block_hash.py`: equal for equal layers).
`cut_point.py` has `CutPoint`, with which users mark where stages may end.
"""
