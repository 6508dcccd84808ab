"""Process-wide changes to torch, numpy and Python while models are traced or wrapped: one registry of all of them.

A file that has to see what another library does declares a `Patch` (an attribute of a module or class that is
replaced) or a `GlobalHook` (what torch calls for all modules), and uses it for a while, or until it is removed:

    _HOOKS = declare("hooks of gradients", torch.Tensor, "register_hook", "an exported graph forgets them")

    with patched(_HOOKS.around(function)):    # function(original, tensor, hook), called in this thread alone
        ...
    install(_CLIP.around(function))           # in all threads, until remove(_CLIP)

Uses of one attribute lie one above the other, the last on top, others' changes among them:

    torch's own  <──  ours  <──  somebody else's  <──  ours

- However a block ends, its uses are undone in reverse order, and the attribute is what it was, by identity.
- Two threads may undo in any order: a use that is undone below another one passes calls on at once, and goes with
  what lies above it.
- Where somebody else's change lies on top, it stays, with a warning. It may go on calling ours, which passes on what it
  gets to what it had replaced.
- The function of a block is called in the block's thread alone; others get what they would get without it.

`declared` lists all that may be changed, `active` what is changed now.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

_MISSING = object()
"""In place of a value: the target has none of its own (a class may inherit one)."""

_lock = threading.RLock()  # one thread may be interrupted inside of it, and undo on its way out
_declared: list[Patch | GlobalHook] = []
_active: list[Use] = []
_installed: dict[Patch | GlobalHook, Use] = {}
_layers: dict[tuple[int, str], list[_Replacement]] = {}
"""Uses of each attribute, by the target's id, the last one on top."""


@dataclass(frozen=True, eq=False)
class Patch:
    """An attribute of another library's module or class that is replaced."""

    name: str
    target: Any
    """None: given by `on`, at each use."""
    attribute: str
    why: str
    versions: str = ""
    """Of torch, for which it is needed; empty: all."""

    def on(self, target: Any) -> Patch:
        """The same for a target that is known only now."""
        return dataclasses.replace(self, target=target)

    def by(self, value: Any) -> Use:
        """Replace the attribute by a value as it is, for all threads."""
        return _Replacement(self, lambda use: value)

    def around(
        self,
        function: Callable[..., Any],
        wraps: Callable[[Any, Callable[..., Any]], Any] = lambda original, made: functools.wraps(original)(made),
    ) -> Use:
        """Let calls run ``function(original, *args, **kwargs)``.

        `wraps(original, made)` gives a function that does what `made` does and looks like the original.
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
        """Let torch call `function`."""
        return _HookUse(self, function)


class Use:
    """One use of a patch or hook, see `patched` and `install`."""

    def __init__(self, of: Patch | GlobalHook) -> None:
        self.of = of
        self.thread: int | None = None
        """Where it applies; None: in all threads."""
        self._live = False

    def applies(self) -> bool:
        """Whether it is in force for the thread that asks."""
        return self._live and self.thread in (None, threading.get_ident())

    def place(self, thread: int | None) -> None:
        """Put it in force."""
        self.thread = thread
        with _lock:
            _active.append(self)
            self._live = True
            self._place()

    def undo(self) -> None:
        """Put an end to it. May be called again, also where `place` was interrupted."""
        self._live = False
        with _lock:
            self._undo()
            if self in _active:
                _active.remove(self)

    def _place(self) -> None:
        raise NotImplementedError

    def _undo(self) -> None:
        raise NotImplementedError

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
        """Restore what was there before, where no use of ours lies above."""
        current = self._current()
        if current is self._value and self._before is _MISSING:
            delattr(self.of.target, self.of.attribute)
        elif current is self._value:
            setattr(self.of.target, self.of.attribute, self._before)
        elif current is not self._before:
            owner = getattr(self.of.target, "__qualname__", getattr(self.of.target, "__name__", "?"))
            _logger().warning(
                "%s.%s was replaced while rannd had replaced it (%s), and stays as it is now",
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
    """A patch, noted in the list of all; once for each, at the top of the file that uses it."""
    patch = Patch(name, target, attribute, why, versions)
    _declared.append(patch)
    return patch


def declare_hook(name: str, register: Callable[[Callable[..., Any]], RemovableHandle], why: str) -> GlobalHook:
    """A hook of all modules, noted in the list of all."""
    hook = GlobalHook(name, register, why)
    _declared.append(hook)
    return hook


@contextlib.contextmanager
def patched(*uses: Use) -> Iterator[None]:
    """Put uses in force for this thread, in this order, until the block ends; each may be given once."""
    try:
        try:
            for use in uses:
                use.place(threading.get_ident())
            yield
        finally:
            _undo(uses)
    finally:
        _undo(uses)  # Ctrl-C may have interrupted the first


def _undo(uses: Sequence[Use]) -> None:
    for use in reversed(uses):
        use.undo()


def install(*uses: Use) -> None:
    """Put uses in force for all threads until `remove`; a patch that is installed already stays as it is."""
    with _lock:
        for use in uses:
            if use.of not in _installed:
                _installed[use.of] = use
                use.place(None)


def remove(*of: Patch | GlobalHook) -> None:
    """Undo what was installed."""
    with _lock:
        for each in reversed(of):
            use = _installed.pop(each, None)
            if use is not None:
                use.undo()


def declared() -> tuple[Patch | GlobalHook, ...]:
    """All that may be changed by the files that are imported."""
    return tuple(_declared)


def active() -> tuple[Use, ...]:
    """What is in force now, in any thread, the latest last; as texts for diagnosis."""
    return tuple(_active)


def caller() -> types.FrameType:
    """The frame that called a patched function, for the function that runs in its place."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == caller.__code__.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _logger() -> logging.Logger:
    return logging.getLogger("rannd.RaNNCModule")  # as rannd.log gives it: this file knows nothing of rannd


MODULE_ENTERED = declare_hook(
    "modules that are entered", modules.register_module_forward_pre_hook, "which module of a model runs"
)
MODULE_LEFT = declare_hook("modules that are left", modules.register_module_forward_hook, "what a module has made")
