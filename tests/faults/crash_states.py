"""What may be on a disk after a power cut, from a log of the calls of shim.c.

The model of a file system is that of POSIX with a journal of directories:

- What was written into a file is on disk for certain after an fsync of that file. Before, any of these may be found: as
  at the last fsync, a part of what came after it, zeros in its place, all of it.
- A change of a directory (an entry made, renamed, exchanged, removed) is on disk for certain after an fsync of that
  directory. Changes that are not may be missing, but in order: with one of them go all later ones.
- Neither does an fsync of a file keep its entry, nor that of a directory the content of its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

DATA = ("synced", "part", "zeros", "all")
"""What is found of data that was not synced."""


@dataclass
class Call:
    """One line of the log; inodes in place of paths."""

    kind: str
    parents: tuple[int, ...] = ()
    """Directories that it changes."""
    names: tuple[str, ...] = ()
    inode: int = -1
    """The file or folder that it makes, writes or syncs."""
    at: int = 0
    data: bytes = b""

    @property
    def changes_folders(self) -> bool:
        return bool(self.parents)


@dataclass
class Recording:
    """A log of calls, and how many of them there were when each step was acknowledged."""

    calls: list[Call] = field(default_factory=list)
    acked: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def read(root: Path, log: Path, data: Path) -> Recording:
        """Follow the paths of a log, so that calls name what they mean however it is renamed."""
        found, blob, taken = Recording(), data.read_bytes(), 0
        folders: dict[int, dict[str, int]] = {0: {}}
        made = 0

        def place(path: str) -> tuple[int, str]:
            parts = PurePosixPath(path).relative_to(root).parts
            inode = 0
            for part in parts[:-1]:
                inode = folders[inode][part]
            return inode, parts[-1] if parts else ""

        for line in log.read_text().splitlines():
            kind, path, *more = line.split("\t")
            parent, name = place(path)
            inode = folders[parent].get(name, -1) if name else 0
            if name.startswith("acked-"):
                found.acked[int(name.removeprefix("acked-"))] = len(found.calls)
            elif kind in ("mkdir", "create"):
                made += 1
                folders[parent][name] = made
                if kind == "mkdir":
                    folders[made] = {}
                found.calls.append(Call(kind, (parent,), (name,), made))
            elif kind in ("unlink", "rmdir"):
                del folders[parent][name]
                found.calls.append(Call(kind, (parent,), (name,), inode))
            elif kind in ("rename", "exchange"):
                other, new = place(more[0])
                there = folders[other].get(new, -1)
                folders[other][new] = folders[parent].pop(name)
                if kind == "exchange":
                    folders[parent][name] = there
                found.calls.append(Call(kind, (parent, other), (name, new), inode))
            elif kind == "write":
                at, size = map(int, more)
                found.calls.append(Call(kind, inode=inode, at=at, data=blob[taken : taken + size]))
                taken += size
            elif kind == "fsync":
                found.calls.append(Call(kind, inode=inode))
            else:
                raise ValueError(f"a call {kind} in the log")
        return found

    def states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each different state, with the last step that was acknowledged before the power cut, -1 if none.

        A state is a tree of dicts (folders) and bytes (files).
        """
        seen = set()
        for end in range(len(self.calls) + 1):
            acked = max((step for step, calls in self.acked.items() if calls <= end), default=-1)
            changes = [number for number, call in enumerate(self.calls[:end]) if call.changes_folders]
            certain = [number for number in changes if self._is_synced(number, end)]
            first = certain[-1] if certain else -1
            for last in (first, *(number for number in changes if number > first)):
                for kind in DATA:
                    tree = self._tree(end, last, kind)
                    known = (acked, repr(tree))
                    if known not in seen:
                        seen.add(known)
                        yield acked, tree

    def _is_synced(self, number: int, end: int) -> bool:
        later = {call.inode for call in self.calls[number + 1 : end] if call.kind == "fsync"}
        return later.issuperset(self.calls[number].parents)

    def _tree(self, end: int, last: int, kind: str) -> dict[str, Any]:
        folders: dict[int, dict[str, int]] = {0: {}}
        for call in self.calls[: last + 1]:
            match call.kind:
                case "mkdir" | "create":
                    folders[call.parents[0]][call.names[0]] = call.inode
                    if call.kind == "mkdir":
                        folders[call.inode] = {}
                case "unlink" | "rmdir":
                    del folders[call.parents[0]][call.names[0]]
                case "rename" | "exchange":
                    (one, other), (name, new) = call.parents, call.names
                    there = folders[other].get(new)
                    folders[other][new] = folders[one].pop(name)
                    if call.kind == "exchange" and there is not None:
                        folders[one][name] = there
        contents = {inode: self._content(inode, end, kind) for inode in self._files()}

        def built(inode: int) -> Any:
            if inode in folders:
                return {name: built(each) for name, each in sorted(folders[inode].items())}
            return contents[inode]

        tree: dict[str, Any] = built(0)
        return tree

    def _files(self) -> set[int]:
        return {call.inode for call in self.calls if call.kind == "create"}

    def _content(self, inode: int, end: int, kind: str) -> bytes:
        synced = b""
        content = bytearray()
        for call in self.calls[:end]:
            if call.inode != inode:
                continue
            if call.kind == "write":
                content[len(content) :] = bytes(max(call.at - len(content), 0))
                content[call.at : call.at + len(call.data)] = call.data
            elif call.kind == "fsync":
                synced = bytes(content)
        whole = bytes(content)
        if kind == "all" or whole == synced:
            return whole
        if kind == "part":
            return whole[: (len(synced) + len(whole)) // 2]
        return synced if kind == "synced" else synced + bytes(len(whole) - len(synced))


def write(tree: dict[str, Any], folder: Path) -> None:
    """Make a state's files in a folder."""
    folder.mkdir()
    for name, each in tree.items():
        if isinstance(each, dict):
            write(each, folder / name)
        else:
            (folder / name).write_bytes(each)
