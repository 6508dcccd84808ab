"""Names of deterministic modules and builtins, and of those that read state outside the model; no logic."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = _names(
    """
    __future__ abc array bisect builtins cmath codecs collections contextlib copy dataclasses enum
    fractions functools heapq itertools keyword logging math numbers operator pprint re reprlib sre statistics string
    struct textwrap types typing warnings weakref
    """
)
"""Modules of the standard library whose functions return the same results in every process."""

BUILTINS = _names(
    """
    Ellipsis False None NotImplemented True __build_class__ __debug__ abs all any ascii bin bool bytearray bytes
    callable chr classmethod complex delattr dict dir divmod enumerate filter float format frozenset getattr hasattr
    hex int isinstance issubclass iter len list map max memoryview min next object oct ord pow print property range
    repr reversed round set setattr slice sorted staticmethod str sum super tuple type vars zip
    """
)
"""Builtins that depend only on their arguments. ``hash`` and ``id`` are missing: they differ between processes."""

BY_ANY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "vars", "dir", "attrgetter", "methodcaller"})
"""Functions that access attributes by name. Used as a value (not called directly), they may be given any name."""

OUTSIDE_MODULES = _names(
    """
    numpy.random torch.accelerator torch.classes torch.cuda torch.distributed torch.hub torch.mps torch.mtia
    torch.multiprocessing torch.package torch.random torch.serialization torch.utils.cpp_extension torch.utils.data
    torch.xpu
    """
)
"""Library modules that depend on the hardware, the disk, other processes or a random number generator."""

OUTSIDE_ATTRIBUTES = {
    "torch": _names(
        """
        accelerator classes cuda distributed from_file get_num_interop_threads get_num_threads get_rng_state hub
        initial_seed load mps mtia multiprocessing os package random save seed serialization sys xpu
        """
    ),
    "numpy": _names(
        """
        fromfile genfromtxt load loadtxt memmap os random sys
        """
    ),
}
"""Attributes of library modules for which the same is true."""

OUTSIDE_NAMES = _names(
    """
    __builtins__ __closure__ __code__ __globals__ __subclasses__ f_back f_builtins f_globals f_locals gi_frame
    tb_frame
    """
)
"""Attributes that give access to frames, globals or closures, so that the code does not show what it reads."""

OPERATORS = frozenset({"aten", "prim", "prims", "quantized", "torchvision"})
"""Namespaces of ``torch.ops`` whose operators are part of torch or torchvision."""

CONSTRUCTING = _names(
    """
    __init__ __init_subclass__ __new__ __post_init__ __prepare__ __set_name__
    """
)
"""Methods that run when a class or an instance is created."""

COPYING = _names(
    """
    __del__ __getnewargs__ __getnewargs_ex__ __getstate__ __reduce__ __reduce_ex__ __setstate__ __sizeof__
    """
)
"""Methods that run when an instance is copied, pickled or deleted."""

NOT_IN_FORWARD = CONSTRUCTING | _names(
    """
    _apply _load_from_state_dict _save_to_state_dict apply bfloat16 compile cpu cuda double eval extra_repr float
    get_extra_state half ipu load_state_dict mtia requires_grad_ set_extra_state share_memory state_dict to to_empty
    train type xpu zero_grad
    """
)
"""Methods of `nn.Module` that run neither in a call of the model nor in tracing."""

LOOKED_INTO = ("torch", "torch.nn.functional", "torch._tensor", "torch.functional", "torch._C._nn", "math", "builtins")
"""Modules that are searched for user functions that replace their own."""
