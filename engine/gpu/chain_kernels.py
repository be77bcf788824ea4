"""What a Triton kernel does at its beginning so that it may be launched before the last one has ended.

    last kernel   ───────────────────────┐
    this kernel       launched │ prefetch │ wait ends │ reads what the last one wrote ───

Programmatic dependent launch, see `engine.gpu.chain` for what is safe. Without it none of this does anything.
"""

import triton
import triton.language as tl


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """From here on the next kernel may be launched, once all programs have come here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Until the last kernel has ended and all that it wrote can be seen."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(addresses, NUM_BYTES: tl.constexpr):
    """So many bytes from each of the addresses (pointers, 16 bytes aligned) into the L2 cache. Changes no result."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses.to(tl.int64), NUM_BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
