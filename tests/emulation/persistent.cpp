// The persistent kernel as a function of the host.
#include <algorithm>

#include "emulate.hpp"
#include "step.cu"

static Params params;

extern "C" int num_boxes() { return AT_SUMS + SPLITS * HEADS; }
extern "C" int num_bytes() { return sizeof(Params); }
extern "C" const char* run(const Params* p, unsigned seed, unsigned long long most) {
  params = *p;
  return run_grid([] { decode_step(params); }, GRID, SHARED, seed, most);
}
