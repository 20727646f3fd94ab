// One decode step of a dense decoder (Qwen2, Qwen3, Llama) for one row, from its token to its logits, in one kernel.
//
// One block a multiprocessor. Weights do not depend on activations, nor do the keys and values of earlier steps: so a
// producer warp streams all of them, in the order in which they are used, through a ring of slots in shared memory, by
// bulk copies, and never waits for another block. Eight consumer warps multiply what has come by the vector at hand.
//
// Blocks tell each other their results in packets of 64 bits: a payload of 32 (two bfloat16, or one float32) and the
// tag of the layer and step. A reader polls the packets that it needs, so between phases there is no fence, no atomic
// and no barrier of the grid. A packet is whole: PTX promises that of a scalar of 64 bits, and of each element of a
// vector of such (the only width that is stored or loaded here). What lies in a box is overwritten a layer later; its
// writer has by then read a vector that took results of every block, each of which was computed from what that block
// had read of the box. So nobody is overtaken, and nobody needs to say that it has read.
//
// A tag that never comes hangs nobody: past a deadline a reader takes NaN for what is missing. NaN spreads to all
// logits, so the step fails as one whose logits are not finite does, and `control` says where the first wait ended.
// The ring's barriers depend on their own block alone and need no deadline.
//
// Compiled for one model, whose sizes are macros: HIDDEN, INTER, HEADS, KV_HEADS, DIM (64 or 128), VOCAB, LAYERS, and
// how it is cut up: GRID blocks, SPLITS of the keys of a KV head, slots of SLOT bytes, PARTS numbers of partial sums,
// SHARED bytes of shared memory. FIRST: of a long vector the first piece is polled alone until it is there. TICKS: the
// time of each phase is written down.
// With EMULATED the includer brings threads and what hardware.cuh has; see tests/emulation.

#include "attention.cuh"

struct Rows {  // this block's rows of each weight; pairs, so that a packet has one writer
  int qkv, qkv_end, out, out_end, ffn, ffn_end, head, head_end;
};
DEVICE Rows rows_of(int b) {
  return {2 * first_of(QKV / 2, b), 2 * first_of(QKV / 2, b + 1), 2 * first_of(HIDDEN / 2, b),
          2 * first_of(HIDDEN / 2, b + 1), 2 * first_of(INTER / 2, b), 2 * first_of(INTER / 2, b + 1),
          first_of(VOCAB, b), first_of(VOCAB, b + 1)};
}
constexpr int AT_ONCE = (PARTS / Cut<HIDDEN>::SHARE < THREADS ? PARTS / Cut<HIDDEN>::SHARE : THREADS) /
                        Cut<HIDDEN>::ROWS * Cut<HIDDEN>::ROWS;  // rows of the head between two syncs
static_assert(AT_ONCE > 0, "PARTS is too small");

struct Keys {  // this block's share of the keys of earlier steps
  int head, from, to;
  bool some, newest;
};
DEVICE Keys keys_of(int b, int position) {
  const int share = ((position + SPLITS - 1) / SPLITS + UNIT - 1) / UNIT * UNIT;
  const int split = b % SPLITS, from = min(split * share, position);
  const bool some = b < KV_HEADS * SPLITS;
  return {b / SPLITS, from, some ? min(from + share, position) : from, some, some && split == SPLITS - 1};
}

DEVICE void produce(const Params& P, Ring& r, const Rows& n, const Keys& keys) {
  const u64 once = read_once_policy();
  const int* table = P.table + P.rows[0] * P.columns;
  for (int l = 0; l < LAYERS; l++) {
    const Layer& w = P.layers[l];
    feed_rows<HIDDEN>(r, w.qkv, n.qkv, n.qkv_end, once);
    feed_keys(r, P, w, table, keys.head, keys.from, keys.to);
    feed_rows<HEADS * DIM>(r, w.o, n.out, n.out_end, once);
    feed_rows<HIDDEN>(r, w.gate_up, n.ffn, n.ffn_end, once);
    feed_rows<HIDDEN>(r, w.gate_up, INTER + n.ffn, INTER + n.ffn_end, once);
    feed_rows<INTER>(r, w.down, n.out, n.out_end, once);
  }
  for (int row = n.head; row < n.head_end; row += AT_ONCE) {
    feed_rows<HIDDEN>(r, P.head, row, min(n.head_end, row + AT_ONCE), once);
  }
}

// The small weights of a layer, into the cache while the layer before it goes on: when they are needed, the memory has
// megabytes of others to bring first. Each line of a norm is fetched by one block; lanes do one thing each.
DEVICE void prefetch_layer(const Params& P, int l, const Rows& n) {
  const Layer& w = P.layers[l];
  const int lane = threadIdx.x % 32;
  if (lane < 2) {
    const u16* norm = lane ? w.ffn_norm : w.attn_norm;
    for (int at = blockIdx.x * 64; at < HIDDEN; at += GRID * 64) prefetch(norm + at);
  } else if (lane < 6) {
    const u16* norm = lane < 4 ? w.q_norm : w.k_norm;
    if (norm && lane % 2 * 64 < DIM) prefetch(norm + lane % 2 * 64);
  } else if (lane < 16) {
    const int i = (lane - 6) / 2;
    const u16* bias[5] = {w.qkv_bias, w.o_bias, w.gate_up_bias, w.gate_up_bias, w.down_bias};
    const int from[5] = {n.qkv, n.out, n.ffn, INTER + n.ffn, n.out};
    const int to[5] = {n.qkv_end, n.out_end, n.ffn_end, INTER + n.ffn_end, n.out_end};
#pragma unroll
    for (int k = 0; k < 5; k++) {
      if (k == i && bias[k] && from[k] < to[k]) prefetch(bias[k] + (lane % 2 ? to[k] - 1 : from[k]));
    }
  }
}

DEVICE float bias_of(const u16* bias, int row) { return bias ? wide(bias[row]) : 0.f; }

// y and y + 1 of a product that the residual takes: thread t keeps numbers 2 t and 2 t + 1 of this block's residual.
template <int K> DEVICE void add_rows(const float* sums, const u16* bias, int row, float* residual) {
  const int t = threadIdx.x;
  residual[0] += total<K>(sums, 2 * t) + bias_of(bias, row + 2 * t);
  residual[1] += total<K>(sums, 2 * t + 1) + bias_of(bias, row + 2 * t + 1);
}

DEVICE float gated(float gate, float up) { return gate / (1.f + __expf(-gate)) * up; }

DEVICE void layer(const Params& P, int l, u32 tag, Ring& r, Shared& s, const Rows& n, const Keys& keys, int position,
                  const u16* embedded, float* residual, Wait& wt) {
  const Layer& w = P.layers[l];
  const int t = threadIdx.x, own = (n.out_end - n.out) / 2, ffn = n.ffn_end - n.ffn;
  const bool mute = P.lose && l == 0 && blockIdx.x == GRID - 1 && t == 0;
  tick(P, l, 0);
  {
    float x[Cut<HIDDEN>::NUMBERS], weight[Cut<HIDDEN>::NUMBERS];
    load_still<HIDDEN>(w.attn_norm, weight);
    if (l) {
      load_sent<HIDDEN>(P.boxes + AT_DOWN, tag - 1, DOWN_PHASE, wt, s.vector, x);
      wt.layer = l;
    } else {
      load_still<HIDDEN>(embedded, x);
    }
    tick(P, l, 1);
    scale_in<HIDDEN>(x, weight, s.squares);
    multiply<HIDDEN>(r, x, n.qkv_end - n.qkv, s.sums[0]);
  }
  consumers_sync();
  if (t < (n.qkv_end - n.qkv) / 2) {
    const float root = reciprocal_root<HIDDEN>(s.squares, P.eps);
    const int row = n.qkv + 2 * t;
    const float a = total<HIDDEN>(s.sums[0], 2 * t) * root + bias_of(w.qkv_bias, row);
    const float b = total<HIDDEN>(s.sums[0], 2 * t + 1) * root + bias_of(w.qkv_bias, row + 1);
    send(P.boxes + AT_QKV + row / 2, pair(a, b), tag, mute && P.lose == QKV_PHASE);
  }
  tick(P, l, 2);
  if (keys.some) {
    const bool lost = P.lose == PART_PHASE && l == 0 && blockIdx.x == 0 && t == 0;
    attend(P, l, w, r, s.attention, keys.head, keys.to - keys.from, keys.newest, position, tag, lost, wt);
  }
  tick(P, l, 4);
  gather(P, s.attention, first_of(HEADS * DIM / 2, blockIdx.x), first_of(HEADS * DIM / 2, blockIdx.x + 1), tag,
         mute && P.lose == HEADS_PHASE, wt);
  tick(P, l, 5);
  {
    float x[Cut<HEADS * DIM>::NUMBERS];
    load_sent<HEADS * DIM>(P.boxes + AT_HEADS, tag, HEADS_PHASE, wt, s.vector, x);
    tick(P, l, 6);
    multiply<HEADS * DIM>(r, x, 2 * own, s.sums[1]);
  }
  consumers_sync();
  tick(P, l, 7);
  if (t < own) {
    add_rows<HEADS * DIM>(s.sums[1], w.o_bias, n.out, residual);
    send(P.boxes + AT_OUT + place<HIDDEN>(n.out / 2 + t), pair(residual[0], residual[1]), tag,
         mute && P.lose == OUT_PHASE);
  }
  {
    float x[Cut<HIDDEN>::NUMBERS], weight[Cut<HIDDEN>::NUMBERS];
    load_still<HIDDEN>(w.ffn_norm, weight);
    load_sent<HIDDEN>(P.boxes + AT_OUT, tag, OUT_PHASE, wt, s.vector, x);
    tick(P, l, 8);
    scale_in<HIDDEN>(x, weight, s.squares);
    multiply<HIDDEN>(r, x, ffn, s.sums[0]);
    multiply<HIDDEN>(r, x, ffn, s.sums[0] + ffn * Cut<HIDDEN>::SHARE);
  }
  consumers_sync();
  tick(P, l, 9);
  if (t < ffn / 2) {
    const float root = reciprocal_root<HIDDEN>(s.squares, P.eps);
    float y[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int row = 2 * t + k;
      const float gate = total<HIDDEN>(s.sums[0], row) * root + bias_of(w.gate_up_bias, n.ffn + row);
      const float up = total<HIDDEN>(s.sums[0], ffn + row) * root + bias_of(w.gate_up_bias, INTER + n.ffn + row);
      y[k] = gated(gate, up);
    }
    send(P.boxes + AT_ACT + place<INTER>(n.ffn / 2 + t), pair(y[0], y[1]), tag, mute && P.lose == ACT_PHASE);
  }
  {
    float x[Cut<INTER>::NUMBERS];
    load_sent<INTER>(P.boxes + AT_ACT, tag, ACT_PHASE, wt, s.vector, x);
    tick(P, l, 10);
    multiply<INTER>(r, x, 2 * own, s.sums[1]);
  }
  consumers_sync();
  tick(P, l, 11);
  if (t < own) {
    add_rows<INTER>(s.sums[1], w.down_bias, n.out, residual);
    send(P.boxes + AT_DOWN + place<HIDDEN>(n.out / 2 + t), pair(residual[0], residual[1]), tag,
         mute && P.lose == DOWN_PHASE);
  }
}

DEVICE void logits(const Params& P, u32 tag, Ring& r, Shared& s, const Rows& n, Wait& wt) {
  const int t = threadIdx.x;
  float x[Cut<HIDDEN>::NUMBERS], weight[Cut<HIDDEN>::NUMBERS];
  load_still<HIDDEN>(P.norm, weight);
  load_sent<HIDDEN>(P.boxes + AT_DOWN, tag, DOWN_PHASE, wt, s.vector, x);
  scale_in<HIDDEN>(x, weight, s.squares);
  int buffer = 0;
  for (int row = n.head; row < n.head_end; row += AT_ONCE, buffer ^= 1) {
    const int rows = min(AT_ONCE, n.head_end - row);
    multiply<HIDDEN>(r, x, rows, s.sums[buffer]);
    consumers_sync();
    if (t < rows) {
      const float y = total<HIDDEN>(s.sums[buffer], t) * reciprocal_root<HIDDEN>(s.squares, P.eps);
      P.logits[row + t] = s.failed ? __uint_as_float(NANS) : y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const __grid_constant__ Params P) {
  SHARED_MEMORY(memory);
  Shared& s = *(Shared*)(memory + SLOTS * SLOT);
  u64* barriers = (u64*)(&s + 1);
  const int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(barriers + i, 1), barrier_init(barriers + SLOTS + i, WARPS);
    s.failed = 0;
    barriers_are_ready();
  }
  __syncthreads();
  Ring r = {barriers, barriers + SLOTS, memory, 0, 0};
  const Rows n = rows_of(blockIdx.x);
  const int position = max(P.context[0] - 1, 0);
  const Keys keys = keys_of(blockIdx.x, position);
  if (t >= THREADS) {
    produce(P, r, n, keys);
    return;
  }
  const u32 step = P.control[0];
  const u16* embedded = P.embed + P.ids[0] * HIDDEN;
  Wait wt = {nanoseconds() + P.limit_ns, 0, 0, false, &s.failed, P.control};
  float residual[2] = {0.f, 0.f};  // never rounded; it stays with its rows
  if (t < (n.out_end - n.out) / 2) {
    residual[0] = wide(embedded[n.out + 2 * t]), residual[1] = wide(embedded[n.out + 2 * t + 1]);
  }
  if (t / 32 == WARPS - 1) {
    prefetch_layer(P, 0, n);
    for (int at = (blockIdx.x * 32 + t % 32) * 64; at < HIDDEN; at += GRID * 2048) prefetch(P.norm + at);
  }
  for (int l = 0; l < LAYERS; l++) {
    if (l + 1 < LAYERS && t / 32 == WARPS - 1) prefetch_layer(P, l + 1, n);
    layer(P, l, step * LAYERS + l + 1, r, s, n, keys, position, embedded, residual, wt);
  }
  logits(P, step * LAYERS + LAYERS, r, s, n, wt);
  consumers_sync();
  if (t == 0 && count_release(P.control + 1) == GRID - 1) {  // all have read the number of this step
    P.control[1] = 0;
    P.control[0] = step + 1;
  }
}
