"""Triton kernels of layers that encoders and language models share, with their launches. Imported only where tensors
are on a GPU.

All arithmetic is float32 whatever the tensors' type; what is stored is rounded once.
"""

import torch
import triton
import triton.language as tl

from preprocess.blocks.fusion import power_of_two


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    heads,
    cosines,
    sines,
    tokens,
    pairs,
    item_stride,
    token_stride,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program so many tokens of an item, and pairs of columns that turn into each other: those of one head follow
    those of another, so that none of a program's is left out where a head's half is no power of two.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    pair = (tl.program_id(1) * PAIRS + tl.arange(0, PAIRS))[None, :]
    inside = (token < tokens) & (pair < pairs)
    column = pair % HALF
    angle = token * (2 * HALF) + column
    low_cos = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    high_cos = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    low_sin = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    high_sin = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    place = heads + tl.program_id(2).to(tl.int64) * item_stride + token.to(tl.int64) * token_stride
    place += pair // HALF * (2 * HALF) + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (low * low_cos + high * low_sin).to(heads.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (high * high_cos + low * high_sin).to(heads.dtype.element_ty), mask=inside)


def rotate_heads_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `preprocess.blocks.rope.rotate_`: heads (items, tokens, heads, dim), its last two dimensions dense."""
    items, tokens, count, dim = heads.shape
    pairs = count * dim // 2
    together, columns = 2, 512
    _rotate[(-(-tokens // together), -(-pairs // columns), items)](
        heads,
        cos,
        sin,
        tokens,
        pairs,
        heads.stride(0),
        heads.stride(1),
        HALF=dim // 2,
        TOKENS=together,
        PAIRS=columns,
        num_warps=4,
    )


@triton.jit
def _added(x, into, total, inside, ADD: tl.constexpr):
    """What is normalised of pointers to a row, float32: x; where ADD `total`, which is x + into."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(into, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total, rounded, mask=inside)
        value = rounded.to(tl.float32)
    return value


def _norm_operands(
    x: torch.Tensor, into: torch.Tensor | None, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a norm: x, dense; what is added to it, their sum, and its norm. x stands for what there is none of."""
    assert out is None or into is not None
    x = x.contiguous()
    added = x if into is None else into
    total, normed = (added, torch.empty_like(x)) if out is None else out
    return x, added, total, normed


@triton.jit
def _layer_norm(x, into, total, weight, bias, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row. total = x + into where ADD, and what is normalised is `total`."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    # Asked for before the row is waited for.
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    value = _added(x + row + columns, into + row + columns, total + row + columns, inside, ADD)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(out + row + columns, (centred * scale * gain + shift).to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    into: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Norm of x (…, width), or of x + into, which `into` then is. With `into` and `out`, two dense tensors of x's
    shape, the first of those becomes the sum instead, the second its norm.
    """
    x, added, total, normed = _norm_operands(x, into, out)
    width = x.shape[-1]
    block = power_of_two(width)
    _layer_norm[(x.numel() // width,)](
        x,
        added,
        total,
        weight,
        bias,
        normed,
        width,
        eps,
        ADD=into is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 1024)),
    )
    return normed


@triton.jit
def _rms_norm(x, into, total, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row. total = x + into where ADD, and what is normalised is `total`."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    # Asked for before the row is waited for.
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    value = _added(x + row + columns, into + row + columns, total + row + columns, inside, ADD)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row + columns, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    into: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Norm of x (…, width), or of x + into, which `into` then is. With `into` and `out`, two dense tensors of x's
    shape, the first of those becomes the sum instead, the second its norm.
    """
    x, added, total, normed = _norm_operands(x, into, out)
    width = x.shape[-1]
    block = power_of_two(width)
    _rms_norm[(x.numel() // width,)](
        x,
        added,
        total,
        weight,
        normed,
        width,
        eps,
        ADD=into is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return normed


@triton.jit
def _silu_mul(gate_up, bias, out, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns; gate and up stand side by side in rows of 2 width."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of (…, 2 * inner), gates first, with a bias (2 * inner,) of theirs → (…, inner)."""
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(512, power_of_two(inner))
    _silu_mul[(out.numel() // inner, -(-inner // block))](
        gate_up,
        gate_up if bias is None else bias,
        out,
        inner,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=2,
    )
    return out
