// A GPU for the chunk kernels on a CPU, x86-64: a kernel's source is compiled after this file, and linked with gpu.cpp.
//
// It models threads, barriers, the memory that a program may touch, and copies that are complete at copies_end alone. It
// does not model the order of memory, what wgmma sees of it, or how wgmma's descriptors encode a matrix.
//
// Each thread of a cluster is a fiber. A fiber runs until it waits: for the lanes of its warp (mma, shuffles,
// __syncwarp), for its program (__syncthreads), or for its cluster (wait). Which ready fiber runs next is chosen by
// ``order``: 0 the first, 1 the last, 2 at random, 3 that of the warp that comes first in a random order of warps. With
// the last, some warps are far ahead of others, so that a missing barrier shows as a difference of results. Accesses of
// global memory outside the registered ranges end the run with a message, those past the shared memory with a fault.

#include <cstddef>
#include <cstdint>

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
inline float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
inline float fabsf(float x) { return __builtin_fabsf(x); }  // <cmath> takes longer to compile than a kernel's parts
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
inline float exp2_(float x) { return __builtin_exp2f(x); }

namespace gpu {

struct Index { unsigned x, y, z; };
constexpr int WIDEST = 8;  // products of a wgmma that a warp exchanges the operands of at once
using Slots = unsigned[32][4 + 2 * WIDEST];
struct Thread {
  Index thread, block;
  char* shared;
  Slots* slots;  // of the warp: two, used in turn
  int lane, parity;
};
extern Thread* self;
extern Index grid;

void fail(const char* text);
void check(const void* p, size_t bytes);  // an access of global memory
void pass_warp();                         // barriers
void pass_program();
void arrive();
void wait();
void products(int tiles, float* sums);  // all lanes have written their operands
void copy(uint4* to, uint4 y);
void copies_end();
void run(void (*body)(), int programs, int threads, int clusters, int layers, int shared_bytes, int order, uint64_t seed,
         int count, const void* const* starts, const size_t* sizes);

inline unsigned* mine() { return self->slots[self->parity][self->lane]; }
// All lanes have written their slots; the next operation uses the other ones.
inline const Slots& exchanged() {
  const Slots& slots = self->slots[self->parity];
  self->parity ^= 1;
  pass_warp();
  return slots;
}
inline uint4* shared_memory() { return (uint4*)self->shared; }

}  // namespace gpu

#define threadIdx (gpu::self->thread)
#define blockIdx (gpu::self->block)
#define gridDim (gpu::grid)

inline void __syncthreads() { gpu::pass_program(); }
inline void __syncwarp() { gpu::exchanged(); }
inline void arrive() { gpu::arrive(); }
inline void wait() { gpu::wait(); }
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

inline void mma(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
  unsigned* s = gpu::mine();
  s[0] = a.x, s[1] = a.y, s[2] = a.z, s[3] = a.w, s[4] = b0, s[5] = b1;
  gpu::products(1, sum);
}

inline void prefetch(const void* from, unsigned bytes) {
  if (bytes % 16) gpu::fail("not a multiple of 16 bytes");
  for (unsigned at = 0; at < bytes; at += 16) gpu::check((const char*)from + at, 16);
}
inline void copy(uint4* to, const void* from) { gpu::copy(to, ldcg4(from)); }
inline void copies_end() { gpu::copies_end(); }
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
  gpu::products(N, sum[0]);
}
template <int N>
inline void wgmma_begin(float (&)[N][4]) {}
template <int N>
inline void wgmma_end(float (&)[N][4]) {}
inline int uniform(int y) { return y; }
