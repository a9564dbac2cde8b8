"""What a disk may hold after a power cut, computed from the trace of a writer's calls.

Owns the model: a file system as hostile as POSIX allows. Every write to a file is lost unless the
file was synced after it; every name made, moved or exchanged is lost unless its directory was
synced after it (for a rename, the one it moves to); each on its own, in any combination. Sizes of
writes are kept whole: a write is there or not. Nothing else is lost, and what is synced stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shimmed import Call

MARKS = ("prepared", "returned")  # not calls: where in the trace the writer was


@dataclass(eq=False)
class Node:
    """A file or a directory, whatever its name is now."""

    content: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One call as the disk sees it: `node` is what has to be synced for it to last."""

    call: Call
    node: Node
    name: str = ""  # in the directory `node`, of what is made, moved or exchanged
    child: Node | None = None
    source: Node | None = None  # of a rename, the directory it moves from


class Disk:
    """The changes of one trace, and the trees that any part of them would leave."""

    def __init__(self, calls: Sequence[Call], data: bytes, root: Path) -> None:
        self._data = data
        self._root, self._top = root, Node()
        self.changes: list[Change] = []
        for call in calls:
            self._note(call)

    def volatile(self, until: int) -> list[int]:
        """Return the changes before `until` that no sync before `until` has made durable."""
        pending: list[int] = []
        for at, change in enumerate(self.changes[:until]):
            if change.call.op == "fsync":
                pending = [i for i in pending if self.changes[i].node is not change.node]
            elif change.call.op not in MARKS:
                pending.append(at)
        return pending

    def index(self, mark: str) -> int:
        """Return where a mark stands among the changes."""
        return next(at for at, change in enumerate(self.changes) if change.call.op == mark)

    def tree(self, until: int, lost: Collection[int]) -> dict[str, bytes]:
        """Return the files, by path from the root, after the changes before `until` less some."""
        for change in self.changes:
            for node in (change.node, change.child):
                if node is not None:
                    node.content, node.names = bytearray(), {}
        for at, change in enumerate(self.changes[:until]):
            if at not in lost:
                self._apply(change)
        return dict(_files(self._top, ""))

    def _note(self, call: Call) -> None:
        if call.op in ("rename", "exchange"):
            source, target = self._find(call.path.parent), self._find(call.to.parent)
            child = source.names[call.path.name]
            if call.op == "rename":
                self._add(Change(call, target, call.to.name, child, source))
            else:
                # Two names in two directories, and a hostile disk may keep either change alone.
                other = target.names[call.to.name]
                self._add(Change(call, target, call.to.name, child))
                self._add(Change(call, source, call.path.name, other))
        elif call.op in ("mkdir", "create"):
            self._add(Change(call, self._find(call.path.parent), call.path.name, Node()))
        elif call.op in MARKS:
            self._add(Change(call, self._top))
        else:
            self._add(Change(call, self._find(call.path)))

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        self._apply(change)

    def _apply(self, change: Change) -> None:
        call, node = change.call, change.node
        if call.op == "write":
            end = call.offset + call.bytes
            node.content.extend(bytes(max(0, end - len(node.content))))
            node.content[call.offset : end] = self._data[call.data_at : call.data_at + call.bytes]
        elif change.child is not None:
            if change.source is not None:
                change.source.names.pop(call.path.name, None)
            node.names[change.name] = change.child

    def _find(self, path: Path) -> Node:
        node = self._top
        for name in path.relative_to(self._root).parts:
            node = node.names[name]
        return node


def _files(node: Node, path: str) -> Iterator[tuple[str, bytes]]:
    for name, child in node.names.items():
        below = f"{path}/{name}" if path else name
        if child.content:
            yield below, bytes(child.content)
        yield from _files(child, below)
