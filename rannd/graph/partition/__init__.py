"""Where a graph may be cut, and cutting it.

In: a traced graph. Out: which nodes are placed and which are recomputed (`placement.py`), subgraphs (`cut.py`), the
hash of a whole graph (`graph_hash.py`) and of a block (`block_hash.py`: equal layers are equal). `cut_point.py` has
the user's marks.
"""
