"""Registry of monkey patches: process-wide changes to torch, numpy and Python while models are traced or wrapped.

A file that has to intercept another library's calls declares a `Patch` (a replaced attribute of a module or class) or a
`GlobalHook` (a hook that torch calls for all modules), and applies it inside a block or until it is removed:

    _HOOKS = declare("hooks of gradients", torch.Tensor, "register_hook", "an exported graph forgets them")

    with patched(_HOOKS.around(function)):    # function(original, tensor, hook), called in this thread only
        ...
    install(_CLIP.around(function))           # in all threads, until remove(_CLIP)

Patches of one attribute form a stack, together with patches by other libraries; the last one is on top:

    torch's own  <──  ours  <──  another library's  <──  ours

- Patches of a block are undone in reverse order however the block ends; the attribute is then the same object as
  before.
- Two threads may undo patches in any order: a patch that is undone below another one passes calls on from then on, and
  is removed together with the ones above it.
- A patch by another library on top of ours is left in place, with a warning. It may continue to call ours, which passes
  its calls on to the original.
- The function of a block is called in the block's thread only; other threads run the original.

`declared` lists all patches and hooks, `active` those that are applied now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

_MISSING = object()
"""Marks an attribute that the target itself does not have (a class may inherit it)."""

_lock = threading.RLock()  # reentrant, because a thread interrupted while holding it undoes its patches on the way out
_declared: list[Patch | GlobalHook] = []
_active: list[Use] = []
_installed: dict[Patch | GlobalHook, Use] = {}
_layers: dict[tuple[int, str], list[_Replacement]] = {}
"""Stack of patches of each attribute, by the target's id; the top is last."""


@dataclass(frozen=True, eq=False)
class Patch:
    """An attribute of another library's module or class that may be replaced."""

    name: str
    target: Any
    """Module or class; None: passed to `on` for each use."""
    attribute: str
    why: str
    versions: str = ""
    """Versions of torch that need it; empty: all."""

    def on(self, target: Any) -> Patch:
        """Copy of this patch for another target."""
        return dataclasses.replace(self, target=target)

    def by(self, value: Any) -> Use:
        """Use that replaces the attribute by a value, for all threads."""
        return _Replacement(self, lambda use: value)

    def around(
        self,
        function: Callable[..., Any],
        wraps: Callable[[Any, Callable[..., Any]], Any] = lambda original, made: functools.wraps(original)(made),
    ) -> Use:
        """Use that makes calls of the attribute run ``function(original, *args, **kwargs)``.

        `wraps(original, made)` returns a function that calls `made` and has the original's metadata.
        """

        def make(use: Use) -> Any:
            original = getattr(self.target, self.attribute)

            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs) if use.applies() else original(*args, **kwargs)

            made = wraps(original, stand_in)
            bound = inspect.getattr_static(self.target, self.attribute) is not original
            return staticmethod(made) if bound else made

        return _Replacement(self, make)


@dataclass(frozen=True, eq=False)
class GlobalHook:
    """A hook that torch calls for every module of the process."""

    name: str
    register: Callable[[Callable[..., Any]], RemovableHandle]
    why: str

    def by(self, function: Callable[..., Any]) -> Use:
        """Use that registers `function` as the hook."""
        return _HookUse(self, function)


class Use(ABC):
    """One application of a patch or hook, see `patched` and `install`."""

    def __init__(self, of: Patch | GlobalHook) -> None:
        self.of = of
        self.thread: int | None = None
        """Thread in which it applies; None: all threads."""
        self._live = False

    def applies(self) -> bool:
        """Whether it is applied in the calling thread."""
        return self._live and self.thread in (None, threading.get_ident())

    def place(self, thread: int | None) -> None:
        """Apply it in a thread; None: in all threads."""
        self.thread = thread
        with _lock:
            _active.append(self)
            self._live = True
            self._place()

    def undo(self) -> None:
        """Undo it. May be called repeatedly, and after an interrupted `place`."""
        self._live = False
        with _lock:
            self._undo()
            if self in _active:
                _active.remove(self)

    @abstractmethod
    def _place(self) -> None:
        """Apply it, under the lock."""

    @abstractmethod
    def _undo(self) -> None:
        """Undo what `_place` did, if anything, under the lock."""

    def __str__(self) -> str:
        return f"{self.of.name} ({self.of.why}), {f'in thread {self.thread}' if self.thread else 'in all threads'}"


class _Replacement(Use):
    of: Patch

    def __init__(self, patch: Patch, make: Callable[[Use], Any]) -> None:
        super().__init__(patch)
        self._make = make
        self._key = id(patch.target), patch.attribute

    def _place(self) -> None:
        self._before = self._current()
        self._value = self._make(self)
        _layers.setdefault(self._key, []).append(self)
        setattr(self.of.target, self.of.attribute, self._value)

    def _undo(self) -> None:
        layers = _layers.get(self._key, [])
        while layers and not layers[-1]._live:
            layers[-1]._take_off()
            layers.pop()
        if not layers:
            _layers.pop(self._key, None)

    def _take_off(self) -> None:
        """Restore the previous value; called when no other use of ours is on top."""
        current = self._current()
        if current is self._value and self._before is _MISSING:
            delattr(self.of.target, self.of.attribute)
        elif current is self._value:
            setattr(self.of.target, self.of.attribute, self._before)
        elif current is not self._before:
            owner = getattr(self.of.target, "__qualname__", getattr(self.of.target, "__name__", "?"))
            _logger().warning(
                "%s.%s was patched by other code while rannd had patched it (%s); leaving the other patch in place",
                owner,
                self.of.attribute,
                self.of.name,
            )

    def _current(self) -> Any:
        return vars(self.of.target).get(self.of.attribute, _MISSING)


class _HookUse(Use):
    of: GlobalHook

    def __init__(self, of: GlobalHook, function: Callable[..., Any]) -> None:
        super().__init__(of)
        self._function = function
        self._handle: RemovableHandle | None = None

    def _place(self) -> None:
        use, function = self, self._function
        self._handle = self.of.register(lambda *args: function(*args) if use.applies() else None)

    def _undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def declare(name: str, target: Any, attribute: str, why: str, versions: str = "") -> Patch:
    """Create a patch and add it to `declared`. Call it once per patch, at the top of the file that uses it."""
    patch = Patch(name, target, attribute, why, versions)
    _declared.append(patch)
    return patch


def declare_hook(name: str, register: Callable[[Callable[..., Any]], RemovableHandle], why: str) -> GlobalHook:
    """Create a hook of all modules and add it to `declared`."""
    hook = GlobalHook(name, register, why)
    _declared.append(hook)
    return hook


@contextlib.contextmanager
def patched(*uses: Use) -> Iterator[None]:
    """Context manager that applies patches and hooks in this thread, in this order; each use may be passed once."""
    try:
        try:
            for use in uses:
                use.place(threading.get_ident())
            yield
        finally:
            _undo(uses)
    finally:
        _undo(uses)  # again, because Ctrl-C may have interrupted the first call


def _undo(uses: Sequence[Use]) -> None:
    for use in reversed(uses):
        use.undo()


def install(*uses: Use) -> None:
    """Apply patches and hooks in all threads until `remove`; those already installed are kept."""
    with _lock:
        for use in uses:
            if use.of not in _installed:
                _installed[use.of] = use
                use.place(None)


def remove(*of: Patch | GlobalHook) -> None:
    """Undo `install`."""
    with _lock:
        for each in reversed(of):
            use = _installed.pop(each, None)
            if use is not None:
                use.undo()


def declared() -> tuple[Patch | GlobalHook, ...]:
    """All patches and hooks declared by the imported files."""
    return tuple(_declared)


def active() -> tuple[Use, ...]:
    """Patches and hooks applied now in any thread, the latest last; str() of each is a description."""
    return tuple(_active)


def caller() -> types.FrameType:
    """Frame that called a patched function; for use in the function that replaces it."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == caller.__code__.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _logger() -> logging.Logger:
    return logging.getLogger("rannd.RaNNCModule")  # the logger of rannd.log, which this file does not import


MODULE_ENTERED = declare_hook(
    "module forward pre-hooks", modules.register_module_forward_pre_hook, "which module of a model is called"
)
MODULE_LEFT = declare_hook("module forward hooks", modules.register_module_forward_hook, "the results of modules")
