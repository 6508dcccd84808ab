"""What torch.save writes is read as torch reads it; what somebody else has made of it runs nothing and costs little."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bounded import costs_little
from torch import nn

from rannd.runtime.storage.saved_value import find_tensor, read_value

DOUBLINGS = 60
TENSOR = torch.arange(12.0).reshape(3, 4)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(data: bytes) -> Any:
    return read_value(io.BytesIO(data), 0, len(data))


def archive(
    pickled: bytes,
    members: dict[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
    order: str = "little",
) -> bytes:
    """An archive as torch.save writes it, of a pickle and storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as opened:
        opened.writestr("archive/data.pkl", pickled)
        opened.writestr("archive/byteorder", order)
        for name, data in (members or {}).items():
            opened.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()


class Call:
    """Pickled as a call of something with these arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


class Storage:
    """Pickled as a reference to a storage."""

    def __init__(self, *said: Any) -> None:
        self.said = said


class _Pickler(pickle.Pickler):
    def persistent_id(self, each: Any) -> Any:
        return each.said if isinstance(each, Storage) else None


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def tensor(size: Any = (4,), stride: Any = (1,), offset: Any = 0, count: Any = 4, data: bytes = bytes(16)) -> bytes:
    """An archive of a tensor, as the pickle describes it, and the bytes of its storage."""
    storage = Storage("storage", torch.FloatStorage, "0", "cpu", count)
    made = Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())
    return archive(pickled(made), {"0": data})


@pytest.mark.parametrize(
    "value",
    [
        TENSOR,
        TENSOR.t(),
        TENSOR[1:, ::2],
        torch.tensor(3),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.float8_e5m2),
        torch.ones(3, dtype=torch.uint16),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        nn.Parameter(TENSOR),
        nn.Parameter(TENSOR, requires_grad=False),
    ],
)
def test_tensors(value: torch.Tensor) -> None:
    data = saved(value)
    found = read_value(io.BytesIO(b"before" + data + b"behind"), 6, len(data))
    wanted = torch.load(io.BytesIO(data), weights_only=True)
    assert (type(found), found.dtype, found.shape) == (type(wanted), wanted.dtype, wanted.shape)
    assert found.requires_grad == wanted.requires_grad
    assert bool((found.to(torch.complex64) == wanted.to(torch.complex64)).all())


PLAIN: dict[str, Any] = {
    "numbers": [1, -7, 2**500, 2.5, float("inf"), 3j, True, None],
    "texts": ["", "x\n", "\udc80", b"", b"\xff\0", bytearray(b"z"), bytearray()],
    "sets": [set(), {1, 2, (3, "a")}],
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter([1, 1, 2]),
    "torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.device("cuda:1")],
    "empty": [[], (), {}],
    "keys": {(1, (2, "x")): 1, 5: 2, 0.5: 3, None: 4, True: 5, b"k": 6, -1: 7, -2: 8, torch.float32: 9},
    "nested": [[[[({"a": ([1],)},)]]]],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values(name: str) -> None:
    found = read(saved(PLAIN[name]))
    assert found == PLAIN[name]
    assert repr(found) == repr(PLAIN[name])


def test_a_tensor_in_several_places_stays_one() -> None:
    found = read(saved([TENSOR, TENSOR[1], TENSOR]))
    assert found[0] is found[2]
    found[0].zero_()
    assert not found[1].any()


def test_what_the_state_dict_of_a_module_has() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    found = read(saved(state))
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: saved(print), "names builtins.print, which a value does not"),
        (lambda: archive(pickled(Call(os.system, "true"))), "names posix.system"),
        (lambda: archive(b"cos\nsystem\n."), "names os.system"),
        (lambda: archive(pickled(Call(bytearray, 1 << 40))), "no plain data: TypeError"),
        (lambda: archive(pickled(Call(torch.Size, [-1]))), "in the place of a size"),
        (lambda: archive(pickled(Call(Counter, {1: "x"}))), "no dict of numbers"),
        (lambda: archive(pickled(Call(set, [[1]]))), "a list is no key"),
        (lambda: archive(b"\x80\x02}]K\x01s."), "a list is no key"),
        (lambda: archive(b"\x80\x02}}K\x01s."), "a dict is no key"),
        (lambda: archive(b"\x80\x02}(K\x01u."), "puts items into what is no dict"),
        (lambda: archive(b"\x80\x02}}b."), "a dict has attributes"),
        (lambda: archive(b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\0\0\0itemsK\x01sb."), "a dict has attributes"),
        (lambda: archive(b"\x80\x02ctorch\nSize\n]\x85R}b."), "gives attributes to a torch.Size"),
        (lambda: archive(b"\x80\x02ctorch\nFloatStorage\n."), "KeyError"),
        (lambda: archive(b"\x80\x02K\x01Q."), "TypeError"),
        (lambda: archive(b"\x80\x02]"), "exhausted|too early"),
        (lambda: archive(pickled(Storage("module", torch.FloatStorage, "0", "cpu", 1))), "what is no storage"),
        (lambda: archive(pickled(Storage("storage", "x", "0", "cpu", 1))), "what is no storage"),
        (lambda: archive(pickled(Storage("storage", torch.FloatStorage, "1", "cpu", 1))), "member data/1 is missing"),
        (lambda: tensor(count=5), "a storage has 16 bytes, not 5 elements"),
        (lambda: tensor(count=-1), "in the place of a size"),
        (lambda: tensor(size=(5,)), "not inside of its storage"),
        (lambda: tensor(offset=1), "not inside of its storage"),
        (lambda: tensor(offset=5, size=(0,)), "not inside of its storage"),
        (lambda: tensor(stride=(2,)), "not inside of its storage"),
        (lambda: tensor(stride=(-1,)), "in the place of a size"),
        (lambda: tensor(size=(-4,)), "in the place of a size"),
        (lambda: tensor(size=(1 << 40,), stride=(0,)), "not inside of its storage"),
        (lambda: tensor(size=(1 << 62, 1 << 62), stride=(0, 0)), "not inside of its storage"),
        (lambda: tensor(size=(2, 2)), "no plain data: ValueError|argument 2"),
        (lambda: tensor(size=4), "no plain data: TypeError"),
        (lambda: tensor(data=bytes(12)), "a storage has 12 bytes"),
        (lambda: archive(b"N.", order="big"), "another order of bytes"),
        (lambda: archive(b"N.", compression=zipfile.ZIP_DEFLATED), "compressed, as torch.save does not write it"),
        (lambda: b"", "no archive"),
        (lambda: b"PK\5\6" + bytes(18), "data.pkl is missing"),
        (lambda: b"x" * 100, "no archive"),
        (lambda: pickle.dumps(1), "no archive"),
    ],
)
def test_what_is_no_plain_data(data: Callable[[], bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data())


def test_every_beginning_is_damaged() -> None:
    data = saved({"a": [TENSOR, 1]})
    for end in range(len(data)):
        with pytest.raises(ValueError, match="it"):
            read(data[:end])


def test_damage_is_told_or_harmless() -> None:
    data = saved({"a": [TENSOR, 1, (2, "x")]})
    for place in range(len(data)):
        for bit in (1, 16, 128):
            changed = bytearray(data)
            changed[place] ^= bit
            try:
                read(bytes(changed))
            except ValueError:
                continue


def test_members_of_an_archive_that_lie_one_over_the_other() -> None:
    """A few bytes, said to be many storages, would be as many tensors."""
    tensors = [
        Call(
            torch._utils._rebuild_tensor_v2,
            Storage("storage", torch.ByteStorage, str(number), "cpu", 50_000),
            0,
            (50_000,),
            (1,),
            False,
            OrderedDict(),
        )
        for number in range(100)
    ]
    members = {str(number): bytes(50_000 if number == 0 else 0) for number in range(100)}
    data = bytearray(archive(pickled(tensors), members))
    first = data.index(b"archive/data/0") - 30
    place = data.index(b"PK\1\2")
    while place >= 0:
        if b"archive/data/" in data[place + 46 : place + 62]:
            data[place + 20 : place + 28] = struct.pack("<2L", 50_000, 50_000)
            data[place + 42 : place + 46] = struct.pack("<L", first)
        place = data.find(b"PK\1\2", place + 4)
    with pytest.raises(ValueError, match="its members lie one over the other"):
        read(bytes(data))


def test_a_member_outside_of_the_archive() -> None:
    """The file goes on behind the archive: what is there belongs to others."""
    data = saved(TENSOR)
    changed = data.replace(struct.pack("<2L", 48, 48), struct.pack("<2L", 4800, 4800))
    assert changed != data
    with pytest.raises(ValueError, match="its member data/0 ends outside of it"):
        find_tensor(io.BytesIO(changed + b"secret" * 1000), 0, len(changed))


def doubled(open_: bytes = b")", close: bytes = b"\x86") -> bytes:
    """A tuple that holds one tuple twice, which holds one twice, and so on."""
    return open_ + b"".join(b"q%ch%c" % (place, place) + close for place in range(DOUBLINGS))


HEAD = b"\x80\x02"
BOMBS: dict[str, Callable[[], bytes]] = {
    "a key that takes long to hash": lambda: archive(HEAD + b"}" + doubled() + b"Ns."),
    "keys in a row": lambda: archive(HEAD + b"}(" + doubled() + b"Nu."),
    "an element of a set": lambda: archive(HEAD + b"c__builtin__\nset\n]" + doubled() + b"a\x85R."),
    "a value that takes long to copy": lambda: archive(HEAD + doubled() + b"."),
    "an argument": lambda: archive(HEAD + b"ctorch\nSize\n" + doubled() + b"\x85R."),
    "keys with one hash": lambda: archive(
        HEAD
        + b"}("
        + b"".join(b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(200_000))
        + b"u."
    ),
    "a list in itself": lambda: archive(HEAD + b"]q\0h\0a."),
    "lists in lists": lambda: archive(HEAD + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
    "a large memo": lambda: archive(HEAD + b"Nr" + b"\xff" * 4),
    "a length that is not there": lambda: archive(HEAD + b"\x8d" + (1 << 40).to_bytes(8, "little") + b"x"),
    "a number that takes long to print": lambda: archive(
        HEAD + b"\x8b" + (10**7).to_bytes(4, "little") + b"\1" * 10**7
    ),
    "an expanded tensor": lambda: tensor(size=(1 << 36,), stride=(0,)),
    "zeros, deflated": lambda: archive(
        pickled(Call(torch._utils._rebuild_tensor_v2, Storage("storage", torch.ByteStorage, "0", "cpu", 1 << 30))),
        {"0": bytes(1 << 28)},
        zipfile.ZIP_DEFLATED,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_costs_little(name: str) -> None:
    """Within a minute of computing and a GiB of memory; without the limits some of these would never end."""
    data = BOMBS[name]()

    def refuse() -> None:
        with pytest.raises(ValueError, match=r"\w") as caught:
            read(data)
        assert len(str(caught.value)) < 2000

    assert costs_little(refuse)
