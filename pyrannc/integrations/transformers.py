"""`RaNNCTrainer`, to be used instead of Hugging Face's `Trainer` in a script that `rannc-run` starts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import transformers
from torch import nn

import pyrannc
from rannd import log
from rannd.errors import UsageError
from rannd.runtime.parameters.state_dict import call_whole, same_configurations
from rannd.runtime.step_metrics import StepMetrics
from rannd.runtime.wrapping.other_wrappers import NOT_COMPILED

STATE = "rannc"
"""Folder in a Trainer's checkpoint with the state of all ranks, see `pyrannc.save_checkpoint`."""


class RaNNCTrainer(transformers.Trainer):
    """A Trainer whose model is partitioned over the ranks of `rannc-run`.

    Takes the arguments of `transformers.Trainer`, with an unwrapped model. Each rank reads its own share of the data,
    as under DistributedDataParallel. A checkpoint has the whole model for `from_pretrained`, which rank 0 writes, and
    the state of all ranks, from which any number of ranks goes on.

    Args:
        plan_metrics: Whether logs of training steps have what `PlanMetrics` tells, and so all of Trainer's trackers.

    Raises:
        UsageError: The model is wrapped already, DeepSpeed, FSDP or DataParallel would distribute it, Trainer would
            look for a batch size that fits, or does not know of the other ranks.
    """

    def __init__(self, *args: Any, plan_metrics: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tells = plan_metrics
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError("RaNNCTrainer partitions the model; remove deepspeed and fsdp from the TrainingArguments")
        if self.args.auto_find_batch_size:
            raise UsageError(
                "auto_find_batch_size tries smaller batches on the rank that runs out of memory, alone; remove it: "
                "the plan fits per_device_train_batch_size into memory, or says what is lacking"
            )
        if self.args.torch_compile and pyrannc.get_rank() == 0:
            log.get("RaNNCModule").warning(NOT_COMPILED)
        if self.args.n_gpu > 1:
            raise UsageError(
                f"one process sees {self.args.n_gpu} GPUs, to which Trainer copies the model (DataParallel); start "
                "the script with rannc-run"
            )
        ranks = pyrannc.get_world_size()
        if self.args.world_size != ranks:
            raise UsageError(
                f"the job has {ranks} ranks, but Trainer sees {self.args.world_size}, so that each would read the same "
                "data; on CPUs set use_cpu=True in the TrainingArguments"
            )
        self._wrapper: pyrannc.RaNNCModule | None = None
        self._trains = False
        """Whether the wrapper has the optimizer."""
        self._metrics: StepMetrics | None = None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the wrapper, which Trainer then does not give to Accelerate."""
        if self._wrapper is not None and training and not self._trains:  # evaluated before: without an optimizer
            self._wrapper.undeploy()
            self._wrapper.drop()
            self._wrapper = None
        if self._wrapper is None:
            assert isinstance(self.model, nn.Module)
            # What the script computes its loss of is not known to the model's graph.
            own = type(self).compute_loss is not transformers.Trainer.compute_loss
            outside = own or self.label_smoother is not None or self.compute_loss_func is not None
            self._wrapper = pyrannc.RaNNCModule(
                self.model,
                getattr(self.optimizer, "optimizer", self.optimizer) if training else None,
                outputs="all" if outside else "auto",
                scaler=getattr(self.accelerator, "scaler", None) if training else None,
                total_calls=self.state.max_steps * self.args.gradient_accumulation_steps if training else None,
            )
            self._trains = training
            self._metrics = StepMetrics(self._wrapper._session) if training and self._tells else None
            self.model_wrapped = self._wrapper
        return self._wrapper

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Compute in mixed precision here: Accelerate does it in the forward of models that it has prepared."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # asks all gradients whether they are DTensors

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the plan does to the logs of steps, if that is wanted."""
        if self._metrics is not None and "loss" in logs and "train_runtime" not in logs:
            logs |= self._metrics.collect()
        super().log(logs, start_time)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model by its own method, for `from_pretrained`. Collective."""
        if self._wrapper is not None and self.args.save_on_each_node:
            with same_configurations(self._wrapper.module):
                self._save(output_dir, state_dict=self._wrapper.state_dict(rank0_only=False))
        elif self._wrapper is not None:
            session = self._wrapper._session
            call_whole(session.world, session.parameters, self._wrapper.module, self._save, (output_dir,), {})
        else:
            self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._wrapper is not None
        pyrannc.save_checkpoint(Path(output_dir, STATE), self._wrapper, self.optimizer, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, STATE).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # of a Trainer in one process, or without optimizer
            return
        assert self._wrapper is not None
        pyrannc.load_checkpoint(Path(checkpoint, STATE), self._wrapper, self.optimizer, scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model if model is not None else self._wrapper)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
