"""Shared memory for pixels. One anonymous file, mapped by the server, the preprocess workers and the engine.

`Arena` is the memory; `LeaseTable` says who may use which bytes, and lives in the server alone. Nothing here outlives
the processes: the file has no name, and its descriptor is inherited.

     0            offset        offset + size                      size
     ├── leased ───┼── leased ───┼────── free ──────┼── leased ─────┤
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_left, insort
from typing import Final

from preprocess.wire import Lease

ALIGNMENT: Final = 64
"""Leases start at multiples of it, so that arrays over them are aligned for any vector unit."""

NO_LEASE: Final = Lease(0, 0)


class Arena:
    """A mapped block of shared memory. Close it, or use it in a ``with``."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena, every page of it reserved now: running out later would kill a process with SIGBUS.

        Raises `OSError` when there is not that much memory. The kernel would not say so: an anonymous file has no
        limit of its own, and reserving too much makes it kill processes, first or last this one.
        """
        if size < 1:
            raise ValueError(f"an arena needs at least one byte, not {size}")
        available = available_memory()
        if size > available:
            raise OSError(errno.ENOMEM, f"an arena of {size:,} bytes was asked for, {available:,} bytes are available")
        fd = os.memfd_create("beholder-arena", 0)  # flags 0: children inherit it where the launcher says so
        try:
            os.posix_fallocate(fd, 0, size)
            os.set_inheritable(fd, True)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """Map an arena that a parent created, by its inherited descriptor."""
        return cls(fd, size)

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes [offset, offset + size), writable. Release it before the arena is closed."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} … {offset + size} are outside of the arena of {self.size} bytes")
        return self._view[offset : offset + size]

    def close(self) -> None:
        """Unmap and close. Safe to call twice."""
        if self.fd < 0:
            return
        self._view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def available_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates them. Raises OSError where it does not tell."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise OSError(errno.ENOTSUP, "/proc/meminfo does not say how much memory is available")


class LeaseTable:
    """Which bytes of an arena are leased. First fit, in multiples of `ALIGNMENT`.

    Invariant: leased blocks lie inside the arena, start aligned, do not overlap, and `used` is the sum of their room.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._offsets: list[int] = []  # sorted
        self._leases: dict[int, Lease] = {}
        self.used = 0

    def lease(self, size: int) -> Lease:
        """A block of `size` bytes, or `NO_LEASE` when none is free (or `size` is 0): send pixels inline then."""
        if size < 0:
            raise ValueError(f"cannot lease {size} bytes")
        if size == 0:
            return NO_LEASE
        start = 0
        for offset in self._offsets:
            if offset - start >= size:
                break
            start = offset + _room(self._leases[offset])
        if start + size > self._size:
            return NO_LEASE
        lease = Lease(start, size)
        insort(self._offsets, start)
        self._leases[start] = lease
        self.used += _room(lease)
        return lease

    def shrink(self, lease: Lease, used: int) -> Lease:
        """Keep the first `used` bytes of a lease and give the rest back. With 0 the whole lease is released."""
        if not 0 <= used <= lease.size:
            raise ValueError(f"cannot shrink a lease of {lease.size} bytes to {used}")
        if used == 0 or lease.size == 0:
            self.release(lease)
            return NO_LEASE
        self._expect(lease)
        smaller = Lease(lease.offset, used)
        self._leases[lease.offset] = smaller
        self.used += _room(smaller) - _room(lease)
        return smaller

    def release(self, lease: Lease) -> None:
        """Give a lease back. `NO_LEASE` is ignored; anything else must be held."""
        if lease.size == 0:
            return
        self._expect(lease)
        del self._leases[lease.offset]
        del self._offsets[bisect_left(self._offsets, lease.offset)]
        self.used -= _room(lease)

    def check(self) -> None:
        """Proves the invariant; raises `AssertionError`."""
        end = used = 0
        for offset in self._offsets:
            lease = self._leases[offset]
            assert lease.offset == offset >= end, (lease, end)
            assert lease.size > 0, lease
            assert offset % ALIGNMENT == 0, lease
            end = offset + lease.size
            assert end <= self._size, (lease, self._size)
            used += _room(lease)
        assert len(self._leases) == len(self._offsets)
        assert used == self.used, (used, self.used)

    def _expect(self, lease: Lease) -> None:
        held = self._leases.get(lease.offset)
        if held != lease:
            raise ValueError(f"{lease} is not held; at this offset the table has {held}")


def _room(lease: Lease) -> int:
    """Bytes that a lease takes away from others."""
    return -(-lease.size // ALIGNMENT) * ALIGNMENT
