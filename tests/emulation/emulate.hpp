// Just enough of a GPU to run the persistent kernel on a CPU: every thread of the grid is a fiber of one thread of the
// system, and a scheduler drawn from a seed decides who goes on, which copies have arrived and which stores are seen.
//
// Stricter than the hardware where that finds faults: a slot is spoiled when a copy into it begins; lanes that do not
// meet at a collective of their warp never go on; what a block leaves behind (copies under way) is an error.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define EMULATED
#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* name = self->block->memory
#define threadIdx (self->thread)
#define blockIdx (self->block->index)

struct Index { int x; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }

// --- threads ---------------------------------------------------------------------------------------------------------
struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  bool polled = false;
  float values[2][32];
  bool flags[2][32];
};
struct Barrier { int arrived = 0; unsigned generation = 0; };
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes;
  uint64_t* barrier;  // of copies that a thread has not tied to one yet: null
  const void* owner;
};
struct Block {
  Index index;
  std::vector<unsigned char> bytes;
  unsigned char* memory;
  std::vector<Warp> warps;
  Barrier all, consumers;
  std::vector<Copy> copies;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  Block* block;
  bool done = false;
};

inline Fiber* self;
inline ucontext_t scheduler;
inline std::mt19937 dice;
inline uint64_t passes;
inline std::map<uint64_t*, uint64_t> unseen;  // stores of packets that no other thread sees yet
inline const char* fault;

inline void give_way() { swapcontext(&self->context, &scheduler); }
inline void meet(int& arrived, unsigned& generation, int count) {
  const unsigned mine = generation;
  if (++arrived == count) {
    arrived = 0, generation++;
    return;
  }
  while (generation == mine) give_way();
}
inline void __syncthreads() { meet(self->block->all.arrived, self->block->all.generation, 288); }
inline void consumers_sync() { meet(self->block->consumers.arrived, self->block->consumers.generation, 256); }
inline Warp& own_warp() { return self->block->warps[self->thread.x / 32]; }
inline void __syncwarp() { meet(own_warp().arrived, own_warp().generation, 32); }
inline float __shfl_xor_sync(unsigned, float v, int o) {
  Warp& w = own_warp();
  float* values = w.values[w.generation & 1];
  values[self->thread.x % 32] = v;
  __syncwarp();
  return values[self->thread.x % 32 ^ o];
}
inline bool __any_sync(unsigned, bool v) {
  Warp& w = own_warp();
  bool* flags = w.flags[w.generation & 1];
  flags[self->thread.x % 32] = v;
  __syncwarp();
  for (int i = 0; i < 32; i++) if (flags[i]) return true;
  return false;
}

// --- barriers of memory and copies -----------------------------------------------------------------------------------
struct Word { uint8_t parity, count, pending, unused; int32_t bytes; };
inline void settle(Word* w) {
  if (w->pending == 0 && w->bytes == 0) w->pending = w->count, w->parity ^= 1;
}
inline void barrier_init(uint64_t* b, int arrivals) {
  *(Word*)b = {0, (uint8_t)arrivals, (uint8_t)arrivals, 0, 0};
}
inline void barrier_init(unsigned long long* b, int arrivals) { barrier_init((uint64_t*)b, arrivals); }
inline void barriers_are_ready() {}
inline void arrive(unsigned long long* b) {
  Word* w = (Word*)b;
  if (w->pending == 0) fault = "more arrivals than a barrier takes";
  w->pending--;
  settle(w);
  if (dice() % 2) give_way();  // whoever reads a slot that it has given back reads what came after
}
inline void expect(unsigned long long* b, unsigned bytes) {
  ((Word*)b)->bytes += bytes;
  arrive(b);
}
inline void wait(unsigned long long* b, unsigned parity) {
  while (((Word*)b)->parity == parity) give_way();
}
inline unsigned long long read_once_policy() { return 0; }
inline void bulk_copy(void* to, const void* from, unsigned bytes, unsigned long long* b, unsigned long long = 0) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fault = "a bulk copy is not of multiples of 16 bytes";
  std::memset(to, 0xff, bytes);
  self->block->copies.push_back({(unsigned char*)to, (const unsigned char*)from, bytes, (uint64_t*)b, self});
}
inline void copy_16(void* to, const void* from) { bulk_copy(to, from, 16, nullptr); }
inline void await_copies(unsigned long long* b) {
  for (Copy& c : self->block->copies) {
    if (c.owner != self || c.barrier) continue;
    c.barrier = (uint64_t*)b;
    ((Word*)b)->bytes += c.bytes;
  }
}
inline void prefetch(const void* p) { (void)*(volatile const char*)p; }
inline void arrive_some(Block& block) {
  for (size_t i = 0; i < block.copies.size();) {
    if (dice() % 4 || !block.copies[i].barrier) { i++; continue; }
    const Copy c = block.copies[i];
    block.copies.erase(block.copies.begin() + i);
    std::memcpy(c.to, c.from, c.bytes);
    ((Word*)c.barrier)->bytes -= c.bytes;
    settle((Word*)c.barrier);
  }
}

// --- packets ---------------------------------------------------------------------------------------------------------
inline void store_packet(unsigned long long* p, unsigned long long v) {
  const auto old = unseen.find((uint64_t*)p);
  if (old != unseen.end()) *p = old->second;
  unseen[(uint64_t*)p] = v;
}
inline void see_some() {
  for (auto i = unseen.begin(); i != unseen.end();) {
    if (dice() % 3) *i->first = i->second, i = unseen.erase(i);
    else ++i;
  }
}
inline unsigned long long load_packet(const unsigned long long* p) {
  own_warp().polled = true;
  return *p;
}
inline ulonglong2 load_packets(const unsigned long long* p) {
  if ((uintptr_t)p % 16) fault = "a load of two packets is not at a multiple of 16 bytes";
  own_warp().polled = true;
  return {p[0], p[1]};
}
inline unsigned count_release(unsigned* p) { return (*p)++; }
inline void raise_to(unsigned* p, unsigned v) { *p = *p < v ? v : *p; }
inline unsigned long long cycles() { return passes; }
inline unsigned long long nanoseconds() { return passes; }

// --- the grid --------------------------------------------------------------------------------------------------------
inline void (*entry)();
inline void run_fiber() {
  entry();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

// Runs *body* in 288 threads of each of *grid* blocks. What went wrong; null: nothing.
inline const char* run_grid(void (*body)(), int grid, size_t memory, unsigned seed, uint64_t most) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<int> order;
  dice.seed(seed);
  entry = body, passes = 0, fault = nullptr;
  unseen.clear();
  for (int b = 0; b < grid; b++) {
    auto block = std::make_unique<Block>();
    block->index = {b};
    block->bytes.assign(memory + 128, 0xff);
    block->memory = block->bytes.data() + (128 - (uintptr_t)block->bytes.data() % 128);
    block->warps.resize(9);
    for (int t = 0; t < 288; t++) {
      auto f = std::make_unique<Fiber>();
      f->thread = {t}, f->block = block.get();
      constexpr size_t STACK = 32 << 10;
      f->stack.reset(new char[STACK]);
      getcontext(&f->context);
      f->context.uc_stack = {f->stack.get(), 0, STACK};
      f->context.uc_link = nullptr;
      makecontext(&f->context, run_fiber, 0);
      fibers.push_back(std::move(f));
    }
    for (int w = 0; w < 9; w++) order.push_back(b * 9 + w);
    blocks.push_back(std::move(block));
  }
  bool any = true;
  while (any && !fault && passes++ < most) {
    any = false;
    std::shuffle(order.begin(), order.end(), dice);
    for (int warp : order) {
      if (dice() % 4 == 0) {
        any = any || !fibers[warp * 32]->done;
        continue;
      }
      for (bool again = true; again && !fault;) {  // until the lanes wait for others, or poll
        int met = 0;
        blocks[warp / 9]->warps[warp % 9].polled = false;
        for (int lane = 0; lane < 32; lane++) {
          self = fibers[warp * 32 + lane].get();
          if (self->done) continue;
          const unsigned before = own_warp().generation;
          swapcontext(&scheduler, &self->context);
          met += own_warp().generation != before;
          any = any || !self->done;
        }
        again = met > 0 && !blocks[warp / 9]->warps[warp % 9].polled;
      }
    }
    for (auto& block : blocks) arrive_some(*block);
    see_some();
  }
  for (auto& block : blocks) if (!fault && !any && !block->copies.empty()) fault = "a block ended before its copies";
  for (auto& i : unseen) *i.first = i.second;
  return fault ? fault : any ? "the grid does not end" : nullptr;
}
