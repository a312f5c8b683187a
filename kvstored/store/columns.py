"""Columns of equal length in memory maps, for tables of a million rows. No I/O.

A column is an anonymous mapping that grows by ``mremap``: adding rows copies nothing and leaves no
hole in the heap, only pages that were written take memory, and a row costs what its columns are
wide. An ``array.array`` of some megabytes lies in the heap, where growing it copies it.
"""

from __future__ import annotations

import mmap
from array import array

import numpy as np
from numpy.typing import NDArray

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MIN_STEP_ROWS = 1024


def private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone."""
    return mmap.mmap(-1, nbytes, flags=_FLAGS)


class Column:
    """One column. `view` reads and writes scalars, ``view[row]``, and is `width` items per row.

    A numpy array made from `view` must be gone before the column grows: growing raises BufferError
    while one lives.
    """

    def __init__(self, code: str, width: int = 1) -> None:
        """`code`: of the item, as in `array`."""
        self._code = code
        self._row_bytes = array(code).itemsize * width
        self.memory = private_memory(_MIN_STEP_ROWS * self._row_bytes)
        self.view: memoryview[int] = memoryview(self.memory).cast(code)  # type: ignore[call-overload]

    @property
    def rows(self) -> int:
        """Rows there is room for."""
        return len(self.memory) // self._row_bytes

    def grow(self, rows: int) -> None:
        """Make room for so many rows. New ones are zero. `view` is another object afterwards."""
        try:
            self.view.release()
            self.memory.resize(rows * self._row_bytes)
        finally:
            self.view = memoryview(self.memory).cast(self._code)  # type: ignore[call-overload]


def next_capacity(rows: int) -> int:
    """Rows to make room for when `rows` are full: a sixteenth more, as unused room is address
    space only, but counts where the kernel hands out huge pages.
    """
    return rows + max(_MIN_STEP_ROWS, rows // 16)


class Table:
    """Columns of equal length with a free list. Scalars are read and written by ``column[row]``."""

    def __init__(self, columns: dict[str, tuple[str, int | None]], link: str) -> None:
        """`columns`: name -> (item code, value in a new row; None: a reused row keeps its value).
        `link`: the column that chains free rows, so that a million of them cost nothing more.
        """
        self._columns = {name: Column(code) for name, (code, _) in columns.items()}
        self._defaults = {
            name: default for name, (_, default) in columns.items() if default is not None
        }
        self._link = link
        self._free = -1
        self.capacity = min(column.rows for column in self._columns.values())
        self.rows = 0
        self.used = 0

    def column(self, name: str) -> memoryview[int]:
        """A column as it is until the table grows."""
        return self._columns[name].view

    @property
    def full(self) -> bool:
        """Whether the next `new` needs `grow` before."""
        return self._free < 0 and self.rows == self.capacity

    def grow(self, count: int = 1) -> None:
        """Make room for at least so many more rows; every column is another object afterwards.

        Raises BufferError, with nothing lost, while somebody holds an array over a column.
        """
        capacity = max(next_capacity(self.capacity), self.used + count)
        for column in self._columns.values():
            column.grow(capacity)
        self.capacity = capacity

    def new(self) -> int:
        """A row with every column at its default."""
        self.used += 1
        row = self._free
        if row >= 0:
            self._free = self._columns[self._link].view[row]
            for name, default in self._defaults.items():
                self._columns[name].view[row] = default
            return row
        row = self.rows
        self.rows += 1
        for name, default in self._defaults.items():
            if default:
                self._columns[name].view[row] = default
        return row

    def new_many(self, count: int) -> NDArray[np.int32]:
        """Rows with every column at its default; shape [count]. There must be room: see `has_room`.

        New rows come behind those that are used again, in order.
        """
        again: list[int] = []
        links = self._columns[self._link].view
        while self._free >= 0 and len(again) < count:
            again.append(self._free)
            self._free = links[self._free]
        fresh = count - len(again)
        rows = np.arange(self.rows - len(again), self.rows + fresh, dtype=np.int32)
        rows[: len(again)] = again
        self.rows += fresh
        self.used += count
        for name, default in self._defaults.items():
            if default:
                np.asarray(self._columns[name].view)[self.rows - fresh : self.rows] = default
            if again:
                np.asarray(self._columns[name].view)[rows[: len(again)]] = default
        return rows

    def has_room(self, count: int) -> bool:
        """Whether so many rows can be had without `grow`."""
        return self.capacity - self.used >= count

    def free(self, row: int) -> None:
        """Give a row back for reuse."""
        self.used -= 1
        self._columns[self._link].view[row] = self._free
        self._free = row

    def free_many(self, rows: NDArray[np.int32]) -> None:
        """`free` of many."""
        if len(rows):
            self.used -= len(rows)
            links = np.asarray(self._columns[self._link].view)
            links[rows[0]] = self._free
            links[rows[1:]] = rows[:-1]
            self._free = int(rows[-1])
