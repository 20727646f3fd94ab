// Sizes that follow from the model's, the kernel's parameters, and what lies where.
#pragma once

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#ifndef EMULATED
#include "hardware.cuh"
#endif

constexpr int WARPS = 8, THREADS = WARPS * 32, GROUP = HEADS / KV_HEADS, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int UNIT = 16, TILE = SLOT / (4 * DIM) / UNIT * UNIT;  // keys and values of a slot, in whole units
constexpr int NOTHING = -1000000000;       // the maximum of no scores
constexpr u32 ALL = 0xffffffffu, LAST = 0x7fffffffu;
constexpr u32 NANS = 0x7fc07fc0u;          // two bfloat16 that are no numbers, and one float32

struct Layer {
  const u16 *attn_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *ffn_norm, *gate_up, *gate_up_bias, *down,
      *down_bias;  // biases and norms of heads: or null
  u16 *k, *v;      // the cache: [blocks, tokens, KV_HEADS, DIM]
};
struct Params {
  const u16 *embed, *norm, *head;
  const float* cos_sin;            // [positions, DIM]
  const i64 *ids, *slots, *rows;   // [1] each
  const int *context, *table;      // [1]; block tables, `columns` apart
  float* logits;                   // [VOCAB]
  u64* boxes;                      // AT_SUMS + SPLITS * HEADS packets
  u32* control;                    // step, blocks that are done, LAST less where the first wait ended (0: none)
  u64* ticks;                      // with TICKS: when each phase of a layer began, [GRID, LAYERS, 12]
  u64 limit_ns;                    // how long a step waits for tags
  i64 columns, block;              // tokens a block of the cache
  float eps, scale;
  u32 lose, unused;                // a test withholds one packet of this phase
  Layer layers[LAYERS];
};

// Phases, and where the packets of each lie. A vector that all eight warps share takes whole chunks of 256 numbers.
enum { NONE, QKV_PHASE, PART_PHASE, HEADS_PHASE, OUT_PHASE, ACT_PHASE, DOWN_PHASE };
template <int N> constexpr int WHOLE = (N + 255) / 256 * 128;
constexpr int AT_QKV = 0, AT_HEADS = AT_QKV + QKV / 2, AT_OUT = AT_HEADS + WHOLE<HEADS * DIM>;
constexpr int AT_ACT = AT_OUT + WHOLE<HIDDEN>, AT_DOWN = AT_ACT + WHOLE<INTER>, AT_PART = AT_DOWN + WHOLE<HIDDEN>;
constexpr int AT_SUMS = AT_PART + SPLITS * HEADS * DIM;

// How a row of K numbers is shared: SHARE warps a row, 8 numbers a lane and chunk of 256, OWN chunks a warp.
template <int K> struct Cut {
  static constexpr int CHUNKS = (K + 255) / 256, SHARE = CHUNKS >= 16 ? 8 : CHUNKS > 12 ? 4 : CHUNKS >= 8 ? 2 : 1;
  static constexpr int OWN = (CHUNKS + SHARE - 1) / SHARE, NUMBERS = OWN * 8, TEAMS = WARPS / SHARE;
  static constexpr int FIT = SLOT / (K * 2), ROWS = FIT > TEAMS ? FIT / TEAMS * TEAMS : FIT;  // rows of a slot
  static constexpr bool FULL = K % 256 == 0 && CHUNKS % SHARE == 0;
  static_assert(K % 8 == 0 && ROWS > 0, "a row does not fit a slot");
};

DEVICE float low(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE float wide(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u32 narrow(float v) {  // to bfloat16, to nearest even; NaN stays NaN
  u32 u = __float_as_uint(v);
  return v == v ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : 0x7fc0;
}
DEVICE u32 pair(float a, float b) { return narrow(a) | narrow(b) << 16; }
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(ALL, v, o);
  return v;
}
DEVICE void tick(const Params& P, int l, int i) {
  if (TICKS && threadIdx.x == 0) P.ticks[(blockIdx.x * LAYERS + l) * 12 + i] = cycles();
}
DEVICE int first_of(int n, int block) { return (int)((i64)n * block / GRID); }

// --- shared memory ---------------------------------------------------------------------------------------------------
// Of attention: see there.
constexpr int OCTETS = DIM / 64, TEAMS = GROUP <= 2 ? 1 : GROUP <= 4 ? 2 : GROUP <= 8 ? 4 : 8;
constexpr int HEADS_A_WARP = (GROUP + TEAMS - 1) / TEAMS, KEY_WARPS = WARPS / TEAMS, MINE = OCTETS * 8;
static_assert(TILE > 0, "a unit of keys does not fit a slot");
static_assert(GROUP <= 16 && (DIM == 64 || DIM == 128), "no program for these heads");

struct Attention {  // in shared memory
  float queries[GROUP * DIM];       // normed, turned, times the scale and log2(e)
  u16 newest[2 * DIM];              // this step's key and value
  float outputs[KEY_WARPS * GROUP * DIM];
  float tops[KEY_WARPS * GROUP], sums[KEY_WARPS * GROUP];
  float4 gathered[WARPS * 32];
};
template <int A, int B> constexpr int MORE = A > B ? A : B;
template <int K> constexpr int HANDED = Cut<K>::SHARE < 8 ? K : 8;  // numbers that load_sent hands on in shared memory
constexpr int VECTOR = MORE<MORE<HANDED<HIDDEN>, HANDED<HEADS * DIM>>, HANDED<INTER>>;
struct Shared {
  Attention attention;
  alignas(16) u32 vector[VECTOR / 2];
  alignas(16) float sums[2][PARTS];
  float squares[WARPS];
  u32 failed, unused;
};
// The ring takes all that is left: SLOTS slots, and two barriers each.
constexpr int LEFT = (SHARED - (int)sizeof(Shared)) / (SLOT + 16), SLOTS = LEFT < 16 ? LEFT : 16;
static_assert(SLOTS >= 2, "the block needs more shared memory than there is");
