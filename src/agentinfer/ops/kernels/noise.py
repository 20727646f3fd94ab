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
    -log2(1 - w) is w times a polynomial (relative error below 5e-7), with w = 1 - u. u and w are exact. Over all k and
    the worst that the instruction may be off, the error is below a quarter of 2e-6 * (1 + the noise's size).
    """
    u = (k | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375  # k as a fraction, 1 added
    w = 1.0 - u
    near = ((0.44488945603370667 * w + 0.4739876687526703) * w + 0.7215244174003601) * w + 1.4426943063735962
    v = tl.where(w < 0.125, near * w, -_log2(u, DEVICE))
    return 0.36651292058166435 - 0.6931471805599453 * _log2(v, DEVICE)  # -log(log 2) - log(v)


@triton.jit
def _philox(low, high, block, index, ROUNDS: tl.constexpr = 10):
    """Philox4x32 of counters (block, index, 0, 0), all uint32: four words each. A product of 64 bits is one instruction
    and gives both halves (`tl.philox` multiplies twice); what is alike for all blocks stays a scalar while it is.
    """
    c0, c1 = block, index
    c2, c3 = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ low
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ high
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        low += 0x9E3779B9
        high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(low, high, index, block, lane, DEVICE: tl.constexpr):
    """Noise of token ids 4 * block + lane: [len(block), 4] for *lane* = [0, 1, 2, 3]. *low*, *high*: the halves of the
    seed; these and *index* are int32.
    """
    x0, x1, x2, x3 = _philox(low.to(tl.uint32), high.to(tl.uint32), block.to(tl.uint32), index.to(tl.uint32))
    first = tl.where((lane == 0)[None, :], x0[:, None], x1[:, None])
    second = tl.where((lane == 2)[None, :], x2[:, None], x3[:, None])
    x = tl.where((lane < 2)[None, :], first, second)
    return _gumbel_of((x >> 9).to(tl.int32), DEVICE)
