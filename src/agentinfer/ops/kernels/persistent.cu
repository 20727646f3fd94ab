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
// With EMULATED the includer brings threads and everything between the two marks below; see tests/emulation.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#ifndef EMULATED  // ------------------------------------------------------------------ what the hardware has to offer
#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}
DEVICE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void expect(u64* b, u32 bytes) {  // arrive, and await the bytes of bulk copies besides
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
DEVICE void wait(u64* b, u32 parity) {  // for the end of the phase of that parity
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
  } while (!done);
}
DEVICE u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
DEVICE void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEVICE void store_packet(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE u64 load_packet(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE ulonglong2 load_packets(const u64* p) {  // two, at a multiple of 16 bytes
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE u32 count_release(u32* p) {  // what was there before this one was added
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}
DEVICE void raise_to(u32* p, u32 v) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u64 cycles() { return clock64(); }
DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
#endif  // ------------------------------------------------------------------------------------------------------------

constexpr int WARPS = 8, THREADS = WARPS * 32, GROUP = HEADS / KV_HEADS, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int TILE = SLOT / (4 * DIM);     // keys and values of a slot
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

DEVICE void feed_keys(Ring& r, const Params& P, const Layer& w, const int* table, int head, int from, int to) {
  const int lane = threadIdx.x % 32;
  for (int key = from; key < to; key += TILE) {
    const int n = min(TILE, to - key);
    if (lane == 0) {
      wait(r.empty + r.slot, r.parity ^ 1);
      expect(r.full + r.slot, n * DIM * 4);
    }
    __syncwarp();
    u16* there = (u16*)r.here();
    for (int i = lane; i < n; i += 32) {
      const int token = key + i, block = (int)P.block;
      const i64 at = ((i64)table[token / block] * block + token % block) * (KV_HEADS * DIM) + head * DIM;
      bulk_copy(there + i * DIM, w.k + at, DIM * 2, r.full + r.slot);
      bulk_copy(there + (TILE + i) * DIM, w.v + at, DIM * 2, r.full + r.slot);
    }
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

// --- attention -------------------------------------------------------------------------------------------------------
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

// --- the step --------------------------------------------------------------------------------------------------------
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
  const int share = (position + SPLITS - 1) / SPLITS, split = b % SPLITS, from = min(split * share, position);
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
  for (int l = 0; l < LAYERS; l++) {
    layer(P, l, step * LAYERS + l + 1, r, s, n, keys, position, embedded, residual, wt);
  }
  logits(P, step * LAYERS + LAYERS, r, s, n, wt);
  consumers_sync();
  if (t == 0 && count_release(P.control + 1) == GRID - 1) {  // all have read the number of this step
    P.control[1] = 0;
    P.control[0] = step + 1;
  }
}
