"""`pyrannc.profile`: measure a model once, for plans of any size (Varuna's Profiler)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rannd import config as configuration
from rannd import log
from rannd.errors import UsageError
from rannd.graph.call.signature import flatten_call
from rannd.profile.graph_profile import GraphProfile
from rannd.runtime import registry
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.world import current
from rannd.runtime.failure.user_traceback import shorten_tracebacks
from rannd.runtime.session import Session


def profile(model: nn.Module, inputs: Any) -> GraphProfile:
    """Measure the parts of a model, so that jobs with any number of ranks, and no larger mini-batches, plan at once.

    Collective, as a call of a wrapped model: ranks share the work, and one process alone will do. The times go to the
    daemon's cache, and to graph_profile_file where save_graph_profile is set. The model stays as it is.

    Args:
        model: The model, not wrapped, in the mode (and below the autocast) in which it will be called.
        inputs: A mini-batch of one rank: a tuple of positional arguments, a mapping of keyword arguments, or the only
            argument.

    Returns:
        What is known of the model's blocks now.

    Raises:
        ConfigError: The configuration is wrong.
        UsageError: The model is wrapped, or no model.
        TraceError: The model cannot be traced.
        ProfileError: A part of it cannot be measured.
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
        return session.profile(flatten_call(args, kwargs), model.training)
