// The common part of the chunk kernels: shape, instructions, products of a cluster's rows, attention of a warp.
//
// A chunk kernel computes the 16 positions of a chunk in one launch (see chunk.py). A *cluster* of C programs serves
// one layer and a *tile* of M sequences. A program keeps its slice of the layer's matrices in shared memory:
//
//     matrix  outputs x inputs   of a program's slice, forward               of its slice, backward (transposed)
//     out     D x D              COLS of the outputs                         COLS of the inputs
//     up      F x D              HID of the outputs                          HID of the outputs
//     down    D x F              HID of the inputs                           HID of the inputs
//     kv      2 D x D            COLS of the keys and COLS of the values     COLS of the inputs
//
// Rows go from program to program through the second-level cache (ldcg, stcg), with a barrier of the cluster in
// between.
//
// *Products* are those of mma.m16n8k16, or of wgmma for four tiles of rows: rows in tiles of 16, columns in tiles of
// 8, and the summed axis in blocks of 32. Lane 4 g + j of a warp holds, of a tile of sums, the columns 2 j and 2 j +
// 1 of rows g and g + 8. Of each block it takes columns 8 j .. 8 j + 7, which are 16 bytes of a matrix as it lies in
// memory. Which of them an instruction sums first is of no importance, as long as both factors agree.
//
// Rows that a product reads lie in the *order of products*: (row tile, block, half, lane) 16 bytes, which are columns
// 8 j + 4 half .. 8 j + 4 half + 3 of rows g and g + 8: two columns of g, the same of g + 8, the next two of g, of g
// + 8.
//
// A warp is (m, p): tile m of the rows, and part p of NP of the summed axis or of the columns. A ``row`` is a
// sequence of the tile. ``constants_of`` in chunk.py lists the constants that the compiler gets.

typedef unsigned short bf16;
typedef long long i64;

constexpr int D = WIDTH, K = HEAD_DIM, H = D / K, F = 4 * D;
constexpr int C = PROGRAMS;                                // programs of a cluster
constexpr int MT = ROW_TILES, M = 16 * MT;                 // tiles of rows, rows
constexpr int WARPS = THREADS / 32, NP = WARPS / MT;       // warps, and those of a tile of rows
constexpr bool WARP_GROUPS = MT == 4;                      // four warps multiply together, by wgmma
constexpr int COLS = D / C, NT = COLS / 8;                 // columns of a program and their tiles
constexpr int HID = F / C, HT = HID / 8;                   // hidden columns of a program and their tiles
constexpr int DB = D / 32, HB = HID / 32;                  // blocks of 32 columns
constexpr int ROUND = 2 * NT;                              // most tiles of columns whose sums fit into part_room
constexpr int PARTS_OF_D = C * (NP < NT ? NP : NT);        // partial sums of a row over D columns
constexpr int PARTS_OF_F = C * (NP < ROUND ? NP : ROUND);  // those over F columns
static_assert(MT * (NP - 1) * ROUND * 512 >= M * HID * 2);  // for chunk_backward.cu's after_gelu
constexpr float EPS = NORM_EPS, LOG2E = 1.4426950408889634f;

// Attention: a warp's unit of work is a row and a block of 64 channels.
constexpr int ROWS = M / C, BLOCKS = D / 64;                // rows of a program, blocks of a row
constexpr int UNITS = (ROWS * BLOCKS + WARPS - 1) / WARPS;  // units of a warp
constexpr float LOGIT_SCALE = K == 16 ? 0.25f : K == 32 ? 0.17677669529663687f : 0.125f;  // 1 / sqrt(K)

// ------------------------------------------------------------------------------------------------ instructions
// tests/mixers/rt/emulator/gpu.h replaces this section on a CPU.
#ifndef EMULATE
#define DEVICE __device__ __forceinline__

DEVICE uint4 ldcg4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE uint2 ldcg2(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE unsigned ldcg1(const void* p) {
  unsigned v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void stcg4(void* p, uint4 v) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void stcg2(void* p, uint2 v) {
  asm volatile("st.global.cg.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void stcg1(void* p, unsigned v) { asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copy 16 bytes to shared memory; copies are complete after copies_end and a barrier.
DEVICE void copy(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Bring memory into the second-level cache: a multiple of 16 bytes.
DEVICE void prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Let wgmma read what this thread wrote to shared memory, after a barrier.
DEVICE void for_wgmma() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A number that is the same in all lanes of a warp, and that the compiler knows to be so.
DEVICE int uniform(int y) { return __shfl_sync(~0u, y, 0); }

DEVICE unsigned pack(float x, float y) {  // two numbers in bfloat16, x in the lower half
  unsigned v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(y), "f"(x));
  return v;
}
DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sum += a b, a 16 x 16, b 16 x 8
DEVICE void mma(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of a block of a slice: of each half of the block, the two factors b0, b1 of mma
DEVICE uint4 load_block(const uint4* block) {
  uint4 b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
               : "r"(shared_address(block + threadIdx.x % 32)));
  return b;
}

// sum += a b for the 64 rows of four warps, a their tiles of 16 x 16, and b the N tiles of a slice that begin at ``w``,
// ``stride`` apart. wgmma_begin comes before, wgmma_end before the sums are read.
#define SUMS_OF(n) "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
#define WGMMA(columns, sums, a0, a1, a2, a3, b, ...)                                                                \
  asm volatile("{.reg .pred p; setp.eq.u32 p, 1, 1;\n wgmma.mma_async.sync.aligned.m64n" columns                  \
               "k16.f32.bf16.bf16 {" sums "}, {" a0 "," a1 "," a2 "," a3 "}, " b ", p, 1, 1, 0;}"                  \
               : __VA_ARGS__                                                                                       \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(slice))
#define SUMS12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define SUMS16 SUMS12 ",%12,%13,%14,%15"
#define SUMS24 SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS32 SUMS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
template <int N>
DEVICE void wgmma(float (&sum)[N][4], uint4 a, const uint4* w, int stride) {
  const unsigned long long slice =
      (shared_address(w) & 0x3ffff) >> 4 | (128ull >> 4) << 16 | (unsigned long long)stride << 32;
  if constexpr (N == 3) {
    WGMMA("24", SUMS12, "%12", "%13", "%14", "%15", "%16", SUMS_OF(0), SUMS_OF(1), SUMS_OF(2));
  } else if constexpr (N == 4) {
    WGMMA("32", SUMS16, "%16", "%17", "%18", "%19", "%20", SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3));
  } else if constexpr (N == 6) {
    WGMMA("48", SUMS24, "%24", "%25", "%26", "%27", "%28", SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4),
          SUMS_OF(5));
  } else {
    static_assert(N == 8);
    WGMMA("64", SUMS32, "%32", "%33", "%34", "%35", "%36", SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4),
          SUMS_OF(5), SUMS_OF(6), SUMS_OF(7));
  }
}
template <int N>
DEVICE void wgmma_begin(float (&sum)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum[n][e])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int N>
DEVICE void wgmma_end(float (&sum)[N][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum[n][e])::"memory");
}

// Barrier of the cluster in two parts. What threads wrote before arrive, all threads see after wait.
DEVICE void arrive() {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");  // one for all, after the barrier
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

// ------------------------------------------------------------------------------------------------ numbers
DEVICE float low(unsigned v) { return __uint_as_float(v << 16); }
DEVICE float high(unsigned v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE float ldcgf(const float* p) { return __uint_as_float(ldcg1(p)); }
DEVICE void stcgf(float* p, float v) { stcg1(p, __float_as_uint(v)); }
DEVICE float2 ldcgf2(const float* p) {
  const uint2 v = ldcg2(p);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
DEVICE void stcgf2(float* p, float x, float y) { stcg2(p, make_uint2(__float_as_uint(x), __float_as_uint(y))); }

DEVICE void floats(float (&y)[8], uint4 v) {
  y[0] = low(v.x), y[1] = high(v.x), y[2] = low(v.y), y[3] = high(v.y);
  y[4] = low(v.z), y[5] = high(v.z), y[6] = low(v.w), y[7] = high(v.w);
}
DEVICE float dot(uint4 x, uint4 y) {
  return low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y) +
         low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
}
DEVICE void add_scaled(float (&sum)[8], float by, uint4 v) {
  float y[8];
  floats(y, v);
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] += by * y[e];
}

// Sum over lanes whose numbers differ in the bits from FROM to below TO; all get it.
template <int FROM, int TO>
DEVICE float sum_lanes(float y) {
#pragma unroll
  for (int bit = FROM; bit < TO; bit *= 2) y += __shfl_xor_sync(~0u, y, bit);
  return y;
}
template <int FROM, int TO>
DEVICE float max_lanes(float y) {
#pragma unroll
  for (int bit = FROM; bit < TO; bit *= 2) y = fmaxf(y, __shfl_xor_sync(~0u, y, bit));
  return y;
}

// Normal distribution function at h, and exp(-h^2 / 2), as mixers.ops.kernels.common has them.
DEVICE float normal_cdf(float h, float& bell) {
  bell = exp2_(h * h * (-0.5f * LOG2E));
  float r = 1.f + fabsf(h) * (0.3275911f * 0.7071067811865476f);
  r = rsqrtf(r * r);
  const float tail = 0.5f * bell * r *
      (0.254829592f + r * (-0.284496736f + r * (1.421413741f + r * (-1.453152027f + r * 1.061405429f))));
  return h < 0.f ? tail : 1.f - tail;
}

// ------------------------------------------------------------------------------------------------ products
template <int N>
DEVICE void zero(float (&sum)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
}

// Rows in the order of products: where lane (g, j) puts two columns of rows g and g + 8 of a tile of 8 columns.
DEVICE unsigned order_of_products(int blocks, int m, int tile) {
  const int lane = threadIdx.x % 32;
  return (((m * blocks + tile / 4) * 2 + lane % 4 / 2) * 32 + lane / 4 * 4 + tile % 4) * 2 + lane % 2;
}
// The same for one row: where the columns ``column`` and ``column`` + 1 are, in units of 4 bytes. The next two, of the
// same four, are 2 units further.
DEVICE unsigned order_of_products_of_row(int blocks, int row, int column) {
  return (((row / 16 * blocks + column / 32) * 2 + column % 8 / 4) * 32 + row % 8 * 4 + column % 32 / 8) * 4 +
         column % 4 / 2 * 2 + row % 16 / 8;
}

// Copy a slice of a matrix (outputs, inputs) to shared memory: 8 ``tiles`` outputs from ``row``, 32 ``blocks`` inputs
// from ``column``, as (tile, block, 8 outputs, 32 inputs). ``width`` is the number of the matrix's inputs.
DEVICE void load_slice(uint4* to, const bf16* from, int width, int row, int tiles, int column, int blocks) {
  for (int i = threadIdx.x; i < 8 * tiles * 4 * blocks; i += THREADS) {
    const int n = i / (4 * blocks), eighth = i % (4 * blocks);
    copy(to + ((n / 8) * blocks + eighth / 4) * 32 + n % 8 * 4 + eighth % 4,
         from + (i64)(row + n) * width + column + 8 * eighth);
  }
}

// Wait for all slices, and turn each block of 8 outputs and 32 inputs into four 8 x 8 matrices: (half, pair, 8 outputs,
// 8 inputs). The inputs of a half and pair are 8 j + 4 half + 2 pair and the next one, of j = 0 .. 3.
DEVICE void arrange_slices(uint4* slices) {
  copies_end();
  __syncthreads();
#pragma unroll 4
  for (int block = uniform(threadIdx.x / 32); block < 11 * D * D / C / 256; block += WARPS) {
    const int lane = threadIdx.x % 32;
    const uint4 inputs = slices[block * 32 + lane];  // 8 j .. 8 j + 7 of output g
    __syncwarp();
    unsigned* const to = (unsigned*)(slices + block * 32) + lane;
    to[0] = inputs.x, to[32] = inputs.y, to[64] = inputs.z, to[96] = inputs.w;
  }
  for_wgmma();
  __syncthreads();
}

// The part of a warp of BLOCKS_ blocks of its rows: blocks p, p + NP, ...
template <int BLOCKS_>
struct Part {
  static constexpr int COUNT = (BLOCKS_ + NP - 1) / NP;
  uint4 a[COUNT][2];  // of each block

  DEVICE void load(const uint2* rows, int m, int p) {
    // The thread's place first, then constants: loads share one address. Sums of unsigned numbers would not.
    rows += ((m * BLOCKS_ + p) * 64 + threadIdx.x % 32) * 2;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (BLOCKS_ % NP == 0 || p + NP * i < BLOCKS_)
        a[i][0] = ldcg4(rows + NP * i * 128), a[i][1] = ldcg4(rows + NP * i * 128 + 64);
  }

  // sum (N tiles of columns) += a times the slice w
  template <int N>
  DEVICE void multiply(float (&sum)[N][4], const uint4* w, int p) const {
    if (WARP_GROUPS) wgmma_begin(sum);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (BLOCKS_ % NP == 0 || p + NP * i < BLOCKS_) {
        const uint4* const block = w + (p + NP * i) * 32;
        if constexpr (WARP_GROUPS) {
          wgmma(sum, a[i][0], block, BLOCKS_ * 32);
          wgmma(sum, a[i][1], block + 16, BLOCKS_ * 32);
        } else {
#pragma unroll
          for (int n = 0; n < N; n++) {
            const uint4 b = load_block(block + n * BLOCKS_ * 32);
            mma(sum[n], a[i][0], b.x, b.y);
            mma(sum[n], a[i][1], b.z, b.w);
          }
        }
      }
    if (WARP_GROUPS) wgmma_end(sum);
  }
};

// Number of tiles of N that a warp owns: tiles p, p + NP, ...
DEVICE constexpr int own_tiles(int N) { return (N + NP - 1) / NP; }

// Add up the parts of N tiles of sums; each warp gets the tiles that it owns. A barrier must come before the room is
// used again.
template <int N>
DEVICE void add_parts(float (&own)[own_tiles(N)][4], const float (&sum)[N][4], float4* room, int m, int p) {
  const int lane = threadIdx.x % 32;
  zero(own);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int owner = n % NP;
    if (p == owner) {
#pragma unroll
      for (int e = 0; e < 4; e++) own[n / NP][e] = sum[n][e];
    } else {
      room[((n * MT + m) * (NP - 1) + p - (p > owner)) * 32 + lane] =
          make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int o = 0; o < own_tiles(N); o++)
    if (p + NP * o < N) {
#pragma unroll
      for (int i = 0; i < NP - 1; i++) {
        const float4 y = room[(((p + NP * o) * MT + m) * (NP - 1) + i) * 32 + lane];
        own[o][0] += y.x, own[o][1] += y.y, own[o][2] += y.z, own[o][3] += y.w;
      }
    }
}

// Product of a program's hidden columns with its slice w of D columns: a part of the sum over all hidden columns. Parts
// are exchanged in bfloat16: (program of the columns, program of the part, tile of columns, row tile, lane). Of two row
// tiles, a warp takes both, because it reads the slice for each.
DEVICE void multiply_hidden(uint2* parts, const uint2* hidden, const uint4* w, int c) {
  constexpr int RT = MT > 1 && !WARP_GROUPS ? 2 : 1, TILES = D / 8 * MT / RT / WARPS;
  constexpr int STEP = TILES < ROUND ? TILES : ROUND;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), row_tile = warp % (MT / RT) * RT;
  uint4 a[RT][HB][2];
#pragma unroll
  for (int r = 0; r < RT; r++)
#pragma unroll
    for (int i = 0; i < HB; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        a[r][i][half] = ((const uint4*)hidden)[(((row_tile + r) * HB + i) * 2 + half) * 32 + lane];

#pragma unroll 1
  for (int first = warp / (MT / RT) * TILES; first < (warp / (MT / RT) + 1) * TILES; first += STEP) {
    float sum[RT][STEP][4];
#pragma unroll
    for (int r = 0; r < RT; r++) zero(sum[r]);
    if (WARP_GROUPS) wgmma_begin(sum[0]);
#pragma unroll
    for (int i = 0; i < HB; i++) {
      const uint4* const block = w + (first * HB + i) * 32;
      if constexpr (WARP_GROUPS) {
        wgmma(sum[0], a[0][i][0], block, HB * 32);
        wgmma(sum[0], a[0][i][1], block + 16, HB * 32);
      } else {
#pragma unroll
        for (int n = 0; n < STEP; n++) {
          const uint4 b = load_block(block + n * HB * 32);
#pragma unroll
          for (int r = 0; r < RT; r++) {
            mma(sum[r][n], a[r][i][0], b.x, b.y);
            mma(sum[r][n], a[r][i][1], b.z, b.w);
          }
        }
      }
    }
    if (WARP_GROUPS) wgmma_end(sum[0]);
#pragma unroll
    for (int n = 0; n < STEP; n++)
#pragma unroll
      for (int r = 0; r < RT; r++) {
        const int tile = first + n;
        stcg2(parts + ((((tile / NT) * C + c) * NT + tile % NT) * MT + row_tile + r) * 32 + lane,
              make_uint2(pack(sum[r][n][0], sum[r][n][1]), pack(sum[r][n][2], sum[r][n][3])));
      }
  }
}

// Store hidden columns in shared memory as rows; a lane has 8 columns of rows g and g + 8.
DEVICE void keep_hidden(bf16* rows, const uint2* hidden, int first, int B, int c) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int block = uniform(threadIdx.x / 32); block < MT * HB; block += WARPS) {
    const uint4* const from = (const uint4*)hidden + block * 64 + lane;
    const uint4 x = from[0], y = from[32];
    const int sequence = first + block / HB * 16 + lane / 4;
    bf16* const to = rows + (unsigned)(sequence * F + c * HID + block % HB * 32 + lane % 4 * 8);
    if (sequence < B) stcg4(to, make_uint4(x.x, x.z, y.x, y.z));
    if (sequence + 8 < B) stcg4(to + 8 * F, make_uint4(x.y, x.w, y.y, y.w));
  }
}

// Sum of all programs' parts, of the tiles that a warp owns.
DEVICE void add_hidden(float (&own)[own_tiles(NT)][4], const uint2* parts, int c, int m, int p) {
  zero(own);
  // The thread's place first, as in Part.
  parts += ((c * C * NT + p) * MT + m) * 32 + threadIdx.x % 32;
#pragma unroll
  for (int o = 0; o < own_tiles(NT); o++)
    if (p + NP * o < NT) {
      uint2 y[C];
#pragma unroll
      for (int i = 0; i < C; i++) y[i] = ldcg2(parts + (i * NT + NP * o) * MT * 32);
#pragma unroll
      for (int i = 0; i < C; i++) {
        own[o][0] += low(y[i].x), own[o][1] += high(y[i].x);
        own[o][2] += low(y[i].y), own[o][3] += high(y[i].y);
      }
    }
}

// Sums over rows: a warp's part of COUNT of two rows (row, program, p), each the sum over its lanes of a row.
template <int COUNT>
DEVICE void put_sums(float* sums, float of_g, float of_g8, int c, int m, int p) {
  const int lane = threadIdx.x % 32, row = 16 * m + lane / 4;
  of_g = sum_lanes<1, 4>(of_g);
  of_g8 = sum_lanes<1, 4>(of_g8);
  if (lane % 4 == 0 && p < COUNT / C) {
    stcgf(sums + row * COUNT + c * (COUNT / C) + p, of_g);
    stcgf(sums + (row + 8) * COUNT + c * (COUNT / C) + p, of_g8);
  }
}

// The COUNT parts of each row's sum. What else a step needs is loaded between ``load`` and ``add``, so that no load
// waits for another. Where a product follows, ``add`` comes after it: the compiler would put the product's loads behind
// the shuffles.
template <int COUNT>
struct Means {
  static constexpr int LANES = THREADS / M;  // of a row
  float parts[(COUNT + LANES - 1) / LANES];

  DEVICE void load(const float* sums) {
#pragma unroll
    for (int i = 0; i < (COUNT + LANES - 1) / LANES; i++) {
      const int at = threadIdx.x % LANES + LANES * i;
      parts[i] = COUNT % LANES == 0 || at < COUNT ? ldcgf(sums + threadIdx.x / LANES * COUNT + at) : 0.f;
    }
  }

  // Their sum over D to shared memory; a barrier must follow. ROOT: as the reciprocal root.
  template <bool ROOT>
  DEVICE void add(float* means) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < (COUNT + LANES - 1) / LANES; i++) sum += parts[i];
    const float mean = sum_lanes<1, LANES>(sum) * (1.f / D);
    if (threadIdx.x % LANES == 0) means[threadIdx.x / LANES] = ROOT ? rsqrtf(mean + EPS) : mean;
  }
};

// ------------------------------------------------------------------------------------------------ tiles of sequences
// Rows of a tile: where they are in tensors, and those two of a product that are this thread's. Rows past the last
// sequence read the last one, and are not stored.
template <class Arguments>
struct Rows {
  const Arguments& args;
  const int first, B, layer, m, lane;  // first: the tile's first sequence

  const int g = 16 * m + lane / 4, g8 = g + 8;
  const bool live_g = first + g < B, live_g8 = first + g8 < B;
  const unsigned sequence_g = live_g ? first + g : B - 1, sequence_g8 = live_g8 ? first + g8 : B - 1;

  // The row of sequence 0 at t, of kept tensors and of those of a group.
  DEVICE i64 kept(int t) const { return layer * args.kept_stride + (i64)t * B; }
  DEVICE i64 group(int t) const { return layer * args.group_stride + (i64)t * B; }
};

// Own columns of the two rows: tile p + NP i of the program's columns is i of a warp. Its columns are ``step`` i after
// the first ones, which are at ``at_g`` and ``at_g8`` of tensors with D columns.
struct Columns {
  const unsigned sequence_g, sequence_g8;
  const int c, p, lane;

  static constexpr unsigned step = 8 * NP;
  const unsigned first = c * COLS + 8 * p + 2 * (lane % 4);
  const unsigned at_g = sequence_g * D + first, at_g8 = sequence_g8 * D + first;

  DEVICE bool owned(int i) const { return p + NP * i < NT; }
};

// A warp's units of attention. A lane takes 8 channels of a unit (its head's group of K / 8 lanes: sums over a head),
// and every fourth position.
struct Units {
  const int first, B, c, warp, lane;  // first: the tile's first sequence

  const unsigned quarter = lane / 8, eight = 8 * (lane % 8);  // the first of the positions, and of the channels

  DEVICE int number(int u) const { return warp + WARPS * u; }  // among those of the program
  DEVICE bool exists(int u) const { return (u + 1) * WARPS <= ROWS * BLOCKS || number(u) < ROWS * BLOCKS; }
  DEVICE int row(int u) const { return c * ROWS + number(u) / BLOCKS; }
  DEVICE bool live(int u) const { return first + row(u) < B; }
  DEVICE int sequence(int u) const { return live(u) ? first + row(u) : B - 1; }
  DEVICE int block(int u) const { return 64 * (number(u) % BLOCKS); }  // its first channel
  // Bring the program's rows, of those of all sequences at ``rows``, into the second-level cache.
  template <class Number>
  DEVICE void prefetch_rows(const Number* rows, int width) const {
    const int sequence = first + c * ROWS, count = B - sequence < ROWS ? B - sequence : ROWS;
    if (count > 0) prefetch(rows + (i64)sequence * width, count * width * sizeof(Number));
  }
  DEVICE int head(int u) const { return block(u) / K + eight / K; }  // that of the lane's channels

  // Where the lane's channels are, and numbers of its head, from the row of sequence 0 on. These are 32 bits in a
  // register for the whole kernel; the row is the same for all lanes.
  DEVICE unsigned at(int u) const { return sequence(u) * D + block(u) + eight; }
  DEVICE unsigned at_head(int u) const { return sequence(u) * H + head(u); }
};
