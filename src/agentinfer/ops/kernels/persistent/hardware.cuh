// What the persistent kernel needs of the hardware: barriers in shared memory, copies, packets, clocks. An emulation
// brings the same functions (tests/emulation).
#pragma once

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
DEVICE void copy_16(void* to, const void* from) {  // 16 bytes, by this thread, not awaited
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void await_copies(u64* b) {  // the barrier also waits for this thread's copies so far, from now on
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void prefetch(const void* p) {  // the line of p into the cache of all multiprocessors
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
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
