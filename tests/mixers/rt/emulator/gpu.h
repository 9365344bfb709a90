// A GPU for the chunk kernels on a CPU, x86-64: g++ compiles this file, a kernel's source and run.h as one file.
//
// It models threads, barriers, the memory that a program may touch, and copies that are complete at copies_end alone. It
// does not model the order of memory, what wgmma sees of it, or how wgmma's descriptors encode a matrix.
//
// Each thread of a cluster is a fiber. A fiber runs until it waits: for the lanes of its warp (mma, shuffles,
// __syncwarp), for its program (__syncthreads), or for its cluster (wait). Which ready fiber runs next is chosen by
// ``order``: 0 the first, 1 the last, 2 at random, 3 that of the warp that comes first in a random order of warps. With
// the last, some warps are far ahead of others, so that a missing barrier shows as a difference of results. Accesses of
// global memory outside the registered ranges end the run with a message, those past the shared memory with a fault.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>
#include <sys/mman.h>

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned v) { float y; memcpy(&y, &v, 4); return y; }
inline unsigned __float_as_uint(float v) { unsigned y; memcpy(&y, &v, 4); return y; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float exp2_(float x) { return exp2f(x); }

namespace gpu {

struct Index { unsigned x, y, z; };
struct Gate { int arrived = 0; std::vector<int> waiting; };  // a barrier
constexpr int WIDEST = 32;  // products of a wgmma that a warp exchanges the operands of at once
struct Warp { Gate gate; unsigned slot[2][32][4 + 2 * WIDEST]; float* sums[32]; };
struct Program { Gate gate; char* shared; std::vector<Warp> warps; };
struct Fiber {
  void* stack;
  Index thread, block;
  Program* program;
  Warp* warp;
  int lane, parity, number, phase;
  std::vector<std::pair<uint4*, uint4>> copies;  // under way
};

constexpr size_t STACK = 16 << 10;
inline std::vector<Fiber> fibers;
inline std::vector<Program> programs;
inline std::deque<int> ready;
inline std::vector<std::vector<int>> of_warps;  // ready fibers by the rank of their warp, for order 3
inline size_t first_rank;                       // none of a warp before it is ready
inline std::vector<int> ranks;
inline Gate cluster;
inline int phase;  // barriers of the cluster that are complete
inline Fiber* self;
inline Index grid;
inline void* scheduler;
inline int order, left, threads_of_program;
inline uint64_t seed;
inline std::map<const char*, const char*> ranges;  // where one starts, and ends

extern "C" void gpu_switch(void** from, void* to);
asm(R"(
.text
.globl gpu_switch
gpu_switch:
  pushq %rbx; pushq %rbp; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbp; popq %rbx
  ret
)");

inline void fail(const char* text) { fprintf(stderr, "emulator: %s\n", text); abort(); }
inline void check(const void* p, size_t bytes) {
  if ((uintptr_t)p % bytes) fail("address is not aligned");
  auto range = ranges.upper_bound((const char*)p);  // the first that starts later
  if (range == ranges.begin() || (const char*)p + bytes > (--range)->second)
    fail("access outside of global memory");
}

inline int random_below(int n) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (seed >> 33) % n;
}
inline void make_ready(int fiber) {
  if (order != 3) return ready.push_back(fiber);
  const size_t rank = ranks[fiber / 32];
  of_warps[rank].push_back(fiber);
  if (rank < first_rank) first_rank = rank;
}
inline void release(Gate& gate) {
  for (int fiber : gate.waiting) make_ready(fiber);
  gate.waiting.clear();
  gate.arrived = 0;
}
inline int next() {  // -1: none is ready
  if (order == 3) {
    while (first_rank < of_warps.size() && of_warps[first_rank].empty()) first_rank++;
    if (first_rank == of_warps.size()) return -1;
    const int fiber = of_warps[first_rank].back();
    of_warps[first_rank].pop_back();
    return fiber;
  }
  if (ready.empty()) return -1;
  const size_t at = order == 0 ? 0 : order == 1 ? ready.size() - 1 : random_below(ready.size());
  const int fiber = ready[at];
  if (order == 0) ready.pop_front();
  else ready[at] = ready.back(), ready.pop_back();
  return fiber;
}
inline void pause() {  // until this fiber is the next one
  const int fiber = next();
  if (fiber < 0) fail("all threads wait");
  Fiber* const from = self;
  self = &fibers[fiber];
  if (self != from) gpu_switch(&from->stack, self->stack);
}
inline void pass(Gate& gate, int count) {
  if (++gate.arrived == count) return release(gate);
  gate.waiting.push_back(self->number);
  pause();
}
inline unsigned* mine() { return self->warp->slot[self->parity][self->lane]; }
// All lanes have written their slots; the next operation uses the other ones.
inline unsigned (*exchanged())[4 + 2 * WIDEST] {
  auto slots = self->warp->slot[self->parity];
  self->parity ^= 1;
  pass(self->warp->gate, 32);
  return slots;
}

inline uint4* shared_memory() { return (uint4*)self->program->shared; }

}  // namespace gpu

#define threadIdx (gpu::self->thread)
#define blockIdx (gpu::self->block)
#define gridDim (gpu::grid)

inline void __syncthreads() { gpu::pass(gpu::self->program->gate, gpu::threads_of_program); }
inline void __syncwarp() { gpu::exchanged(); }
inline void arrive() {
  __syncthreads();
  gpu::self->phase = gpu::phase + 1;
  if (++gpu::cluster.arrived == (int)gpu::fibers.size()) gpu::phase++, gpu::release(gpu::cluster);
}
inline void wait() {
  __syncwarp();
  if (gpu::phase >= gpu::self->phase) return;
  gpu::cluster.waiting.push_back(gpu::self->number);
  gpu::pause();
}
inline float __shfl_xor_sync(unsigned, float y, int bit) {
  gpu::mine()[0] = __float_as_uint(y);
  const int other = gpu::self->lane ^ bit;
  return __uint_as_float(gpu::exchanged()[other][0]);
}

inline uint4 ldcg4(const void* p) { gpu::check(p, 16); return *(const uint4*)p; }
inline uint2 ldcg2(const void* p) { gpu::check(p, 8); return *(const uint2*)p; }
inline unsigned ldcg1(const void* p) { gpu::check(p, 4); return *(const unsigned*)p; }
inline void stcg4(void* p, uint4 v) { gpu::check(p, 16); *(uint4*)p = v; }
inline void stcg2(void* p, uint2 v) { gpu::check(p, 8); *(uint2*)p = v; }
inline void stcg1(void* p, unsigned v) { gpu::check(p, 4); *(unsigned*)p = v; }

inline unsigned rounded(float x) {
  unsigned v = __float_as_uint(x);
  return (v & 0x7fffffff) > 0x7f800000 ? 0x7fff : (v + 0x7fff + ((v >> 16) & 1)) >> 16;
}
inline unsigned pack(float x, float y) { return rounded(x) | rounded(y) << 16; }

// N products of one block of rows: all lanes have written their parts of it, and of N blocks of columns. The lane that
// comes last computes the sums of all, wherever they lie.
template <int N>
__attribute__((optimize("O3"))) void multiply(const unsigned (*slots)[4 + 2 * gpu::WIDEST], float* const* sums) {
  auto number = [](unsigned v, int e) { return __uint_as_float(e ? v & 0xffff0000u : v << 16); };
  static float a[16][16], b[16][8 * N], c[16][8 * N];  // too large for the stack of a fiber
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, j = lane % 4;
    for (int half = 0; half < 2; half++)
      for (int e = 0; e < 2; e++) {
        const int k = 8 * half + 2 * j + e;
        for (int low = 0; low < 2; low++) a[g + 8 * low][k] = number(slots[lane][2 * half + low], e);
        for (int i = 0; i < N; i++) b[k][8 * i + g] = number(slots[lane][4 + 2 * i + half], e);
      }
    for (int i = 0; i < N; i++)  // row g or g + 8, column 2 j or 2 j + 1
      for (int e = 0; e < 4; e++) c[g + 8 * (e / 2)][8 * i + 2 * j + e % 2] = sums[lane][4 * i + e];
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8 * N; n++) c[row][n] += a[row][k] * b[k][n];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < N; i++)
      for (int e = 0; e < 4; e++) sums[lane][4 * i + e] = c[lane / 4 + 8 * (e / 2)][8 * i + 2 * (lane % 4) + e % 2];
}
template <int N>
inline void products(float (&sum)[N][4]) {
  gpu::Warp* warp = gpu::self->warp;
  warp->sums[gpu::self->lane] = sum[0];
  if (warp->gate.arrived == 31) multiply<N>(warp->slot[gpu::self->parity], warp->sums);
  gpu::exchanged();
}
inline void mma(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
  unsigned* s = gpu::mine();
  s[0] = a.x, s[1] = a.y, s[2] = a.z, s[3] = a.w, s[4] = b0, s[5] = b1;
  products<1>(reinterpret_cast<float (&)[1][4]>(sum));
}

inline void prefetch(const void* from, unsigned bytes) {
  if (bytes % 16) gpu::fail("not a multiple of 16 bytes");
  for (unsigned at = 0; at < bytes; at += 16) gpu::check((const char*)from + at, 16);
}
inline void copy(uint4* to, const void* from) { gpu::self->copies.push_back({to, ldcg4(from)}); }
inline void copies_end() {
  for (auto& [to, y] : gpu::self->copies) *to = y;
  gpu::self->copies.clear();
}
inline void for_wgmma() {}
inline uint4 load_block(const uint4* block) {
  const int g = gpu::self->lane / 4, j = gpu::self->lane % 4;
  auto word = [&](int matrix) { return ((const unsigned*)(block + 8 * matrix + g))[j]; };
  return make_uint4(word(0), word(1), word(2), word(3));
}
template <int N>
inline void wgmma(float (&sum)[N][4], uint4 a, const uint4* w, int stride) {
  static_assert(N <= gpu::WIDEST);
  const int g = gpu::self->lane / 4, j = gpu::self->lane % 4;
  unsigned* s = gpu::mine();
  s[0] = a.x, s[1] = a.y, s[2] = a.z, s[3] = a.w;
  for (int n = 0; n < N; n++) {
    s[4 + 2 * n] = ((const unsigned*)(w + n * stride + g))[j];
    s[5 + 2 * n] = ((const unsigned*)(w + n * stride + 8 + g))[j];
  }
  products<N>(sum);
}
template <int N>
inline void wgmma_begin(float (&)[N][4]) {}
template <int N>
inline void wgmma_end(float (&)[N][4]) {}
inline int uniform(int y) { return y; }
