"""Whether kernels of a step may be launched before the kernel in front of them has ended (programmatic dependent
launch), so that what they read of weights and older keys is on its way when it does.

Why that is right, whatever stands between two such kernels:

- Each kernel waits (`chain_kernels.wait_for_last`) before it reads what is computed in a step and before it writes
  anything. Before that it reads only what no kernel of a step writes (weights, the slot table, a step's inputs), and
  prefetches, which changes no value: the L2 cache is what all multiprocessors share.
- The wait is for the end of the kernel just in front. That one has waited for its own, so all those before have ended
  too. Programs with nothing to do may leave without waiting as long as one program of the kernel waits.
- A kernel that knows nothing of this (a library's) begins when the one in front has ended, and the kernel behind it
  begins when it has ended: it never says that the next may be launched.
"""

from __future__ import annotations

from typing import Final

EARLY: Final = False
"""Not measured yet."""


def launch_options() -> dict[str, bool]:
    """Of every kernel that waits."""
    return {"EARLY": EARLY, "launch_pdl": EARLY}
