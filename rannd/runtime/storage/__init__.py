"""Tensors in files, read one at a time and written atomically.

In: folders of torch.distributed.checkpoint and safetensors files. Out: tensors (`weight_files.py`, `dcp_files.py`),
without unpickling (`dcp_metadata.py` reads the index as data). `atomic_folder.py`: a folder is there whole or not at
all.
"""
