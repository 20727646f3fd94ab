// What comes to a block: weights and keys through the ring, and packets of other blocks.
#pragma once

#include "sizes.cuh"

// --- the ring --------------------------------------------------------------------------------------------------------
struct Ring {
  u64 *full, *empty;  // barriers of each slot
  unsigned char* slots;
  int slot;
  u32 parity;
  DEVICE void next() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
  DEVICE unsigned char* here() { return slots + slot * SLOT; }
};

template <int K> DEVICE void feed_rows(Ring& r, const u16* weight, int from, int to, u64 policy) {
  for (int row = from; row < to; row += Cut<K>::ROWS) {
    if (threadIdx.x % 32 == 0) {
      const u32 bytes = min(Cut<K>::ROWS, to - row) * K * 2;
      wait(r.empty + r.slot, r.parity ^ 1);
      expect(r.full + r.slot, bytes);
      bulk_copy(r.here(), weight + (i64)row * K, bytes, r.full + r.slot, policy);
    }
    r.next();
  }
}

// Keys and values lie in rows of DIM numbers. Short bulk copies take 50 cycles each, so lanes copy 16 bytes each. UNIT
// keys that begin at a multiple of it lie in one block of the cache.
DEVICE void feed_keys(Ring& r, const Params& P, const Layer& w, const int* table, int head, int from, int to) {
  constexpr int LANES = DIM / 8, AT_ONCE = 32 / LANES, APART = KV_HEADS * DIM;  // a row is LANES copies
  const int lane = threadIdx.x % 32, block = (int)P.block, part = lane % LANES * 8;
  for (int key = from; key < to; key += TILE) {
    const int n = min(TILE, to - key);
    if (lane == 0) wait(r.empty + r.slot, r.parity ^ 1);
    __syncwarp();
    u16* there = (u16*)r.here() + part;
    for (int unit = 0; unit < n; unit += UNIT) {
      const int token = key + unit;
      const i64 at = ((i64)table[token / block] * block + token % block) * APART + head * DIM + part;
#pragma unroll
      for (int j = 0; j < UNIT / AT_ONCE; j++) {
        const int i = j * AT_ONCE + lane / LANES;
        if (unit + i >= n) continue;
        copy_16(there + (unit + i) * DIM, w.k + at + i * APART);
        copy_16(there + (TILE + unit + i) * DIM, w.v + at + i * APART);
      }
    }
    await_copies(r.full + r.slot);
    __syncwarp();
    if (lane == 0) arrive(r.full + r.slot);
    r.next();
  }
}

// Rows of a weight times the vector in registers: sums[row * SHARE + which of the warps that share it].
template <int K> DEVICE void multiply(Ring& r, const float* x, int rows, float* sums) {
  typedef Cut<K> C;
  constexpr int EACH = (C::ROWS + C::TEAMS - 1) / C::TEAMS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % C::SHARE, team = warp / C::SHARE;
  for (int first = 0; first < rows; first += C::ROWS) {
    const int n = min(C::ROWS, rows - first);
    wait(r.full + r.slot, r.parity);
    float sum[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int row = i * C::TEAMS + team;
      sum[i] = 0.f;
      if (row >= n) continue;
      const uint4* p = (const uint4*)(r.here() + row * (K * 2) + (part * 256 + lane * 8) * 2);
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int j = 0; j < C::OWN; j++) {
        if (!C::FULL && (j * C::SHARE + part) * 256 + lane * 8 >= K) break;
        const uint4 v = p[j * 32 * C::SHARE];
        const float* y = x + j * 8;
        even += low(v.x) * y[0] + low(v.y) * y[2] + low(v.z) * y[4] + low(v.w) * y[6];
        odd += high(v.x) * y[1] + high(v.y) * y[3] + high(v.z) * y[5] + high(v.w) * y[7];
      }
      sum[i] = even + odd;
    }
    __syncwarp();
    if (lane == 0) arrive(r.empty + r.slot);
    r.next();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int row = i * C::TEAMS + team;
      const float v = warp_sum(sum[i]);
      if (lane == 0 && row < n) sums[(first + row) * C::SHARE + part] = v;
    }
  }
}
template <int K> DEVICE float total(const float* sums, int row) {
  float v = 0.f;
#pragma unroll
  for (int i = 0; i < Cut<K>::SHARE; i++) v += sums[row * Cut<K>::SHARE + i];
  return v;
}

// --- packets ---------------------------------------------------------------------------------------------------------
struct Wait {  // of one warp, equal in its lanes
  u64 end;
  u32 tries, layer;
  bool late;
  u32* failed;   // in shared memory: this block has missed something
  u32* control;
};

DEVICE bool is(u64 packet, u32 tag) { return (u32)(packet >> 32) == tag; }
DEVICE u32 payload(u64 packet, u32 tag) { return is(packet, tag) ? (u32)packet : NANS; }
DEVICE void send(u64* p, u32 value, u32 tag, bool lost) {
  if (!lost) store_packet(p, (u64)tag << 32 | value);
}

// Until *read* says that all it read was new; past the deadline no longer, and never again.
template <class Read> DEVICE void poll(Wait& w, int phase, Read read) {
  while (__any_sync(ALL, !read())) {
    if (w.late) return;
    if (++w.tries % 256 == 0 && __any_sync(ALL, nanoseconds() > w.end)) {
      w.late = true;
      *w.failed = 1;
      if (threadIdx.x % 32 == 0) raise_to(w.control + 2, LAST - (w.layer << 8 | phase));  // the earliest wins
    }
  }
}

// Where packet i of a vector lies: eight numbers of a lane are two loads of two packets, each of which takes the 32
// lanes to 512 bytes together. Vectors that the block shares by way of shared memory stay in order.
template <int K> DEVICE int place(int i) {
  return Cut<K>::SHARE == 8 ? (i & ~127) | (i & 2) << 5 | (i >> 1 & 62) | (i & 1) : i;
}

DEVICE void unpack(uint4 v, float* x) {
  x[0] = low(v.x), x[1] = high(v.x), x[2] = low(v.y), x[3] = high(v.y);
  x[4] = low(v.z), x[5] = high(v.z), x[6] = low(v.w), x[7] = high(v.w);
}

// This lane's numbers of a vector in memory that nobody writes in this step.
template <int K> DEVICE void load_still(const u16* from, float* x) {
  typedef Cut<K> C;
  const int at = threadIdx.x / 32 % C::SHARE * 256 + threadIdx.x % 32 * 8;
#pragma unroll
  for (int j = 0; j < C::OWN; j++) {
    const int k = j * C::SHARE * 256 + at;
    unpack(C::FULL || k < K ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0), x + j * 8);
  }
}

// The same of packets. If all eight warps share a row, each polls what it needs; else each packet is polled once a
// block and handed on in *shared*: the same lines polled by every warp of every block would be a hot spot.
template <int K> DEVICE void load_sent(const u64* box, u32 tag, int phase, Wait& w, u32* shared, float* x) {
  typedef Cut<K> C;
  const int tid = threadIdx.x, lane = tid % 32, at = tid / 32 % C::SHARE * 256 + lane * 8;
  if constexpr (C::SHARE == 8) {
    ulonglong2 v[C::OWN * 2] = {};
    const u64* p = box + tid / 32 * 128 + lane * 2;
    if (FIRST) {
      poll(w, phase, [&] {
        v[0] = load_packets(p);
        return is(v[0].x, tag);
      });
    }
    u32 missing = 0;  // a bit a piece
#pragma unroll
    for (int j = 0; j < C::OWN * 2; j++) {
      if (C::FULL || j / 2 * C::SHARE * 256 + at < K) missing |= 1u << j;
    }
    poll(w, phase, [&] {
#pragma unroll
      for (int j = 0; j < C::OWN * 2; j++) {
        if (missing >> j & 1) v[j] = load_packets(p + j / 2 * (128 * C::SHARE) + j % 2 * 64);
      }
#pragma unroll
      for (int j = 0; j < C::OWN * 2; j++) {
        if (is(v[j].x, tag) && is(v[j].y, tag)) missing &= ~(1u << j);
      }
      return missing == 0;
    });
#pragma unroll
    for (int j = 0; j < C::OWN * 2; j++) {
      const bool there = C::FULL || j / 2 * C::SHARE * 256 + at < K;
      const u32 a = there ? payload(v[j].x, tag) : 0, b = there ? payload(v[j].y, tag) : 0;
      x[j * 4] = low(a), x[j * 4 + 1] = high(a), x[j * 4 + 2] = low(b), x[j * 4 + 3] = high(b);
    }
  } else {
    constexpr int PAIRS = K / 4, EACH = (PAIRS + THREADS - 1) / THREADS;
    ulonglong2 v[EACH] = {};
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (PAIRS % THREADS == 0 || tid + i * THREADS < PAIRS) missing |= 1u << i;
    }
    if (FIRST && EACH > 1) {
      poll(w, phase, [&] {
        v[0] = load_packets(box + tid * 2);
        return is(v[0].x, tag);
      });
    }
    poll(w, phase, [&] {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (missing >> i & 1) v[i] = load_packets(box + (tid + i * THREADS) * 2);
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (is(v[i].x, tag) && is(v[i].y, tag)) missing &= ~(1u << i);
      }
      return missing == 0;
    });
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (PAIRS % THREADS && tid + i * THREADS >= PAIRS) break;
      ((uint2*)shared)[tid + i * THREADS] = make_uint2(payload(v[i].x, tag), payload(v[i].y, tag));
    }
    consumers_sync();
#pragma unroll
    for (int j = 0; j < C::OWN; j++) {
      const int k = j * C::SHARE * 256 + at;
      unpack(C::FULL || k < K ? *(const uint4*)(shared + k / 2) : make_uint4(0, 0, 0, 0), x + j * 8);
    }
  }
}

// x times the weights of a norm; what it is to be divided by follows from the sums of squares, at the end.
template <int K> DEVICE void scale_in(float* x, const float* weight, float* squares) {
  float s = 0.f;
#pragma unroll
  for (int j = 0; j < Cut<K>::NUMBERS; j++) s += x[j] * x[j], x[j] *= weight[j];
  s = warp_sum(s);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = s;
}
template <int K> DEVICE float reciprocal_root(const float* squares, float eps) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < Cut<K>::SHARE; i++) s += squares[i];
  return rsqrtf(s / K + eps);
}
