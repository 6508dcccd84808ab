"""`pyrannc.profile`: profiles a model once for plans on any number of ranks (as Varuna's Profiler does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rannd import config as configuration
from rannd import log
from rannd.errors import UsageError
from rannd.profile.graph_profile import GraphProfile
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.world import current
from rannd.runtime.failure.user_traceback import shorten_tracebacks
from rannd.runtime.session import Session
from rannd.runtime.wrapping import registry


def profile(model: nn.Module, inputs: Any) -> GraphProfile:
    """Measure the blocks of a model, so that later jobs with any number of ranks plan without measuring.

    Their mini-batches may be as large as this one, or smaller. Collective, as a call of a wrapped model: ranks share
    the work, but a single process is enough. The times are stored in the daemon's cache, and in graph_profile_file if
    save_graph_profile is set. The model is not changed.

    Args:
        model: The model, not wrapped, in the mode (and under the autocast) in which it will be called.
        inputs: A mini-batch of one rank: a tuple of positional arguments, a mapping of keyword arguments, or a single
            argument.

    Returns:
        All known measurements of the model's blocks.

    Raises:
        ConfigError: The configuration is wrong.
        UsageError: `model` is wrapped, or is no torch.nn.Module.
        TraceError: The model cannot be traced.
        ProfileError: A block cannot be measured.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"profile measures a torch.nn.Module, not a {type(model).__qualname__}")
    registry.ensure_free(model)
    shorten_tracebacks()
    config = configuration.load()
    log.setup(level=config.log_level)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    if not isinstance(args, tuple):
        args = (args,)
    world = current(config)
    session = Session(Context.of(world, config, model))
    with world.watch.inside("profile"):
        return session.profile(args, kwargs, model.training)
