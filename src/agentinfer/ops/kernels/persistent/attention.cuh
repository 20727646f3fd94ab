// Attention of one row: from the packets of its qkv product to those of the heads' outputs.
#pragma once

#include "stream.cuh"

// A block attends to one of SPLITS shares of the keys of one KV head. Eight lanes see a key: lane j of them has its
// numbers 8 j and on, and 64 + 8 j and on if there are 128. So a warp sees four keys at once, with HEADS_A_WARP heads.
// One head of the qkv product in a warp: packet i holds the numbers 2 i and 2 i + 1, lane i has packets i and i + 32.
// Norm and neox rope: the partner of number d is d + DIM / 2.
DEVICE void turn(float* x, bool normed, const float* weight, const float* cos, const float* sin, float eps) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 2 * OCTETS; i++) s += x[i] * x[i];
  if (normed) {
    const float r = rsqrtf(warp_sum(s) / DIM + eps);
#pragma unroll
    for (int i = 0; i < 2 * OCTETS; i++) x[i] *= r * weight[i];
  }
  if constexpr (OCTETS == 2) {
    const float a = x[0], b = x[1];
    x[0] = a * cos[0] - x[2] * sin[0], x[1] = b * cos[1] - x[3] * sin[1];
    x[2] = x[2] * cos[0] + a * sin[0], x[3] = x[3] * cos[1] + b * sin[1];
  } else {
    const float sign = threadIdx.x % 32 < 16 ? -1.f : 1.f;
    const float a = __shfl_xor_sync(ALL, x[0], 16), b = __shfl_xor_sync(ALL, x[1], 16);
    x[0] = x[0] * cos[0] + sign * a * sin[0], x[1] = x[1] * cos[1] + sign * b * sin[1];
  }
}

// The queries of this block's heads and, in the block that has the newest key, that key and value: from packets to
// shared memory, and to the cache.
DEVICE void prepare(const Params& P, const Layer& w, Attention& a, int head, bool newest, int position, u32 tag,
                    Wait& wt) {
  const int lane = threadIdx.x % 32, half = lane * 2 % (DIM / 2);
  const float* angle = P.cos_sin + (i64)position * DIM;
  const float cos[2] = {angle[half], angle[half + 1]}, sin[2] = {angle[DIM / 2 + half], angle[DIM / 2 + half + 1]};
  for (int i = threadIdx.x / 32; i < (newest ? GROUP + 2 : GROUP); i += WARPS) {
    const bool query = i < GROUP, key = i == GROUP;
    const u16* norm = query ? w.q_norm : key ? w.k_norm : nullptr;
    float weight[4];
    if (norm) {
#pragma unroll
      for (int k = 0; k < 2 * OCTETS; k++) weight[k] = wide(norm[k / 2 * 64 + lane * 2 + k % 2]);
    }
    const int at = query ? head * GROUP + i : key ? HEADS + head : HEADS + KV_HEADS + head;
    const u64* box = P.boxes + AT_QKV + at * (DIM / 2) + lane;
    u64 v[OCTETS];
    poll(wt, QKV_PHASE, [&] {
      bool good = true;
#pragma unroll
      for (int k = 0; k < OCTETS; k++) v[k] = load_packet(box + k * 32), good = good && is(v[k], tag);
      return good;
    });
    float x[4];
#pragma unroll
    for (int k = 0; k < OCTETS; k++) {
      x[2 * k] = low(payload(v[k], tag)), x[2 * k + 1] = high(payload(v[k], tag));
    }
    if (query || key) turn(x, norm != nullptr, weight, cos, sin, P.eps);
    const float scale = P.scale * 1.4426950408889634f;
    u16* cache = (key ? w.k : w.v) + P.slots[0] * (KV_HEADS * DIM) + head * DIM;
#pragma unroll
    for (int k = 0; k < OCTETS; k++) {
      const int d = k * 64 + lane * 2;
      if (query) {
        *(float2*)(a.queries + i * DIM + d) = make_float2(x[2 * k] * scale, x[2 * k + 1] * scale);
      } else {
        const u32 both = pair(x[2 * k], x[2 * k + 1]);
        *(u32*)(a.newest + (i - GROUP) * DIM + d) = both;
        *(u32*)(cache + d) = both;
      }
    }
  }
}

struct Seen {  // of the keys that eight lanes saw, a head: the largest score (base 2), sum and output over it
  float top[HEADS_A_WARP], sum[HEADS_A_WARP], out[HEADS_A_WARP][MINE];
};

DEVICE void see(Seen& s, const float (*q)[MINE], const u16* key, const u16* value, bool there) {
  const int at = threadIdx.x % 8 * 8;
  float k[MINE], v[MINE];
#pragma unroll
  for (int c = 0; c < OCTETS; c++) {
    unpack(*(const uint4*)(key + c * 64 + at), k + c * 8);
    unpack(*(const uint4*)(value + c * 64 + at), v + c * 8);
  }
#pragma unroll
  for (int g = 0; g < HEADS_A_WARP; g++) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < MINE; i++) x += q[g][i] * k[i];
#pragma unroll
    for (int o = 4; o; o >>= 1) x += __shfl_xor_sync(ALL, x, o);
    const float top = there ? fmaxf(s.top[g], x) : s.top[g];
    if (__any_sync(ALL, top != s.top[g])) {
      const float keep = exp2f(s.top[g] - top);
      s.top[g] = top, s.sum[g] *= keep;
#pragma unroll
      for (int i = 0; i < MINE; i++) s.out[g][i] *= keep;
    }
    const float e = there ? exp2f(x - top) : 0.f;
    s.sum[g] += e;
#pragma unroll
    for (int i = 0; i < MINE; i++) s.out[g][i] += e * v[i];
  }
}

// What the four octets of lanes of a warp saw, as one, to shared memory.
DEVICE void join_lanes(Seen& s, Attention& a, int first_head, int key_warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < HEADS_A_WARP; g++) {
    float top = fmaxf(s.top[g], __shfl_xor_sync(ALL, s.top[g], 8));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 16));
    const float keep = exp2f(s.top[g] - top);
    float sum = s.sum[g] * keep;
    sum += __shfl_xor_sync(ALL, sum, 8);
    sum += __shfl_xor_sync(ALL, sum, 16);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      float v = s.out[g][i] * keep;
      v += __shfl_xor_sync(ALL, v, 8);
      s.out[g][i] = v + __shfl_xor_sync(ALL, v, 16);
    }
    const int head = key_warp * GROUP + first_head + g;
    if (first_head + g >= GROUP) continue;
    if (lane == 0) a.tops[head] = top, a.sums[head] = sum;
#pragma unroll
    for (int i = 0; i < MINE / 4; i++) {  // an octet of lanes stores a quarter, or half of them a half
      if (lane / 8 != i) continue;
      const float* v = s.out[g] + i * 4;
      *(float4*)(a.outputs + head * DIM + i / 2 * 64 + lane % 8 * 8 + i % 2 * 4) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

// What the warps saw, as one, to the blocks that gather the splits: the output, and the logarithm of its weight.
DEVICE void send_part(const Params& P, const Attention& a, u32 tag, bool lost) {
  for (int i = threadIdx.x; i < GROUP * DIM; i += THREADS) {
    const int g = i / DIM;
    float top = NOTHING, sum = 0.f, out = 0.f;
#pragma unroll
    for (int k = 0; k < KEY_WARPS; k++) top = fmaxf(top, a.tops[k * GROUP + g]);
#pragma unroll
    for (int k = 0; k < KEY_WARPS; k++) {
      const float keep = exp2f(a.tops[k * GROUP + g] - top);
      sum += keep * a.sums[k * GROUP + g], out += keep * a.outputs[k * GROUP * DIM + i];
    }
    const bool some = sum != 0.f;
    const float weight = some ? top + log2f(sum) : (float)NOTHING;
    send(P.boxes + AT_PART + blockIdx.x * (GROUP * DIM) + i, __float_as_uint(some ? out / sum : 0.f), tag, lost);
    if (i % DIM == 0) send(P.boxes + AT_SUMS + blockIdx.x * GROUP + g, __float_as_uint(weight), tag, lost);
  }
}

template <int N> DEVICE float weigh(const float (&weight)[N], float* keep) {  // the largest, and powers of two below it
  float top = NOTHING;
#pragma unroll
  for (int k = 0; k < N; k++) top = fmaxf(top, weight[k]);
#pragma unroll
  for (int k = 0; k < N; k++) keep[k] = exp2f(weight[k] - top);
  return top;
}

// This block's share of the heads' outputs, pairs from .. to - 1 (32 at most), of all splits, every eighth of a warp.
DEVICE void gather(const Params& P, Attention& a, int from, int to, u32 tag, bool lost, Wait& wt) {
  constexpr int EACH = (SPLITS + WARPS - 1) / WARPS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = from + lane, e = 2 * min(mine, to - 1);
  const int head = e / DIM, first = head / GROUP * SPLITS, g = head % GROUP, d = e % DIM;
  if (from < to) {
    ulonglong2 v[EACH];
    u64 s[EACH];
    poll(wt, PART_PHASE, [&] {
      bool good = true;
#pragma unroll
      for (int k = 0; k < EACH; k++) {
        if (SPLITS % WARPS && warp + k * WARPS >= SPLITS) break;
        const int at = (first + warp + k * WARPS) * GROUP + g;
        v[k] = load_packets(P.boxes + AT_PART + at * DIM + d), s[k] = load_packet(P.boxes + AT_SUMS + at);
        good = good && is(v[k].x, tag) && is(v[k].y, tag) && is(s[k], tag);
      }
      return good;
    });
    float weight[EACH], keep[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const bool there = SPLITS % WARPS == 0 || warp + k * WARPS < SPLITS;
      weight[k] = there ? __uint_as_float(payload(s[k], tag)) : (float)NOTHING;
    }
    float4 sum = make_float4(weigh(weight, keep), 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      if (SPLITS % WARPS && warp + k * WARPS >= SPLITS) break;
      sum.y += keep[k];
      sum.z += keep[k] * __uint_as_float(payload(v[k].x, tag));
      sum.w += keep[k] * __uint_as_float(payload(v[k].y, tag));
    }
    a.gathered[threadIdx.x] = sum;
  }
  consumers_sync();
  if (warp == 0 && mine < to) {
    float weight[WARPS], keep[WARPS], sum = 0.f, x = 0.f, y = 0.f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) weight[k] = a.gathered[k * 32 + lane].x;
    weigh(weight, keep);
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      const float4 v = a.gathered[k * 32 + lane];
      sum += keep[k] * v.y, x += keep[k] * v.z, y += keep[k] * v.w;
    }
    send(P.boxes + AT_HEADS + place<HEADS * DIM>(mine), pair(x / sum, y / sum), tag, lost);
  }
}

// Attention of this block's KV head over its share of the keys: old ones from the ring, the newest from this step.
DEVICE void attend(const Params& P, int l, const Layer& w, Ring& r, Attention& a, int head, int keys, bool newest,
                   int position, u32 tag, bool lost, Wait& wt) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, octet = lane / 8, first = warp % TEAMS * HEADS_A_WARP;
  const int key_warp = warp / TEAMS;
  prepare(P, w, a, head, newest, position, tag, wt);
  consumers_sync();
  tick(P, l, 3);
  float q[HEADS_A_WARP][MINE];
  Seen s;
#pragma unroll
  for (int g = 0; g < HEADS_A_WARP; g++) {
    const float* from = a.queries + min(first + g, GROUP - 1) * DIM + lane % 8 * 8;
    s.top[g] = NOTHING, s.sum[g] = 0.f;
#pragma unroll
    for (int i = 0; i < MINE; i++) q[g][i] = from[i / 8 * 64 + i % 8], s.out[g][i] = 0.f;
  }
  for (int begin = 0; begin < keys; begin += TILE) {
    const int n = min(TILE, keys - begin);
    wait(r.full + r.slot, r.parity);
    const u16* tile = (const u16*)r.here();
    for (int i = key_warp * 4; i < n; i += KEY_WARPS * 4) {
      const int key = min(i + octet, n - 1);
      see(s, q, tile + key * DIM, tile + (TILE + key) * DIM, i + octet < n);
    }
    __syncwarp();
    if (lane == 0) arrive(r.empty + r.slot);
    r.next();
  }
  if (newest && key_warp == KEY_WARPS - 1) see(s, q, a.newest, a.newest + DIM, octet == 0);
  join_lanes(s, a, first, key_warp);
  consumers_sync();
  send_part(P, a, tag, lost);
}
