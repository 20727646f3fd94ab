"""The noise of ops/sample.py on a GPU: Philox4x32-10, key = seed, counter = (token id // 4, output index, 0, 0), lane =
token id % 4; u = ((x >> 9) + 0.5) * 2^-23 and -log(-log(u)), in float32 here: within 2e-6 of the float64, or 2e-6 of
itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log2(x, DEVICE: tl.constexpr):
    """log2 of normal numbers. On a GPU (DEVICE) one instruction: off by at most 2^-22 where x is in [1/2, 2], and by
    2^-22 of itself elsewhere (PTX, lg2.approx).
    """
    if DEVICE:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _gumbel_of(k, DEVICE: tl.constexpr):
    """-log(-log(u)) of u = (k + 1/2) * 2^-23, k from 0 to 2^23 - 1 (int32).

    The outer logarithm may be off by some 2^-22; the inner must not relative to itself. So near 1, where it is small,
    -log2(1 - w) is w times a polynomial (relative error below 7e-7), with w = 1 - u, which is exact as u is. Over all k
    and the worst that the instruction may be off, the error is below a quarter of 2e-6 * (1 + the noise's size).
    """
    x = k.to(tl.float32)
    u = x * 1.1920928955078125e-07 + 5.9604644775390625e-08
    w = 0.999999940395355224609375 - x * 1.1920928955078125e-07
    near = ((0.5137442946434021 * w + 0.3050384819507599) * w + 0.48617374897003174) * w
    near = ((near + 0.7211767435073853) * w + 1.4426958560943604) * w
    v = tl.where(w < 0.25, near, -_log2(u, DEVICE))
    return 0.36651292058166435 - 0.6931471805599453 * _log2(v, DEVICE)  # -log(log 2) - log(v)


@triton.jit
def _gumbel(seed, index, block, lane, DEVICE: tl.constexpr):
    """Noise of token ids 4 * block + lane: [len(block), 4] for *lane* = [0, 1, 2, 3]."""
    zero = block * 0
    x0, x1, x2, x3 = tl.philox(seed, block, zero + index, zero, zero)
    low = tl.where((lane == 0)[None, :], x0[:, None], x1[:, None])
    high = tl.where((lane == 2)[None, :], x2[:, None], x3[:, None])
    x = tl.where((lane < 2)[None, :], low, high)
    return _gumbel_of((x >> 9).to(tl.int32), DEVICE)
