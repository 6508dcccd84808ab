"""Checkpoints that load under any plan.

In: a model, an optimizer and the script's own state. Out: a folder in the format of torch.distributed.checkpoint.
Begin with `checkpoint_api.py` (`pyrannc.save_checkpoint`, `pyrannc.load_checkpoint`), then `saving.py` and
`loading.py`; `manifest.py` tells whether a checkpoint is whole.
"""
