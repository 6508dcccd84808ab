"""Tensors in files, read one at a time and written atomically.

In: folders of torch.distributed.checkpoint (`dcp_files.py` writes, `dcp_reading.py` reads them), and safetensors files
(`weight_files.py`). Out: tensors, without unpickling: begin with `pickle_reader.py`, then `dcp_metadata.py` (the index)
and `saved_value.py` (what torch.save wrote). `atomic_folder.py`: a folder is there whole or not at all.
"""
