// Skeleton of a persistent backward pass of a Recurrent Transformer stack, form A (see NOTES.md).
// nvcc -O3 -gencode arch=compute_90a,code=sm_90a --split-compile=0 skeleton_backward.cu -o skeleton_backward
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cmath>
#include <vector>
#include <algorithm>
#include <unistd.h>
#include <cstring>
#include <ctime>
#include <sys/wait.h>
#include <type_traits>
#include <cuda_runtime.h>
#include <cuda_bf16.h>

#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { \
  printf("CUDA error %s at line %d: %s\n", cudaGetErrorName(e_), __LINE__, #x); fflush(stdout); exit(1);} } while (0)

typedef __nv_bfloat16 bf16;
enum { SK_WORK = 1, SK_ATT = 2, SK_MLP = 4, SK_MMA = 8, SK_STREAM = 16, SK_PROF = 32 };
enum { BAR_CLUSTER = 0, BAR_L2 = 1, BAR_NONE = 2, BAR_HIER = 3, BAR_CL1 = 4, BAR_CLRLX = 5 };
constexpr float RES = 0.3f;        // residual scale s
constexpr float EPS = 1e-6f;
constexpr float SCL = 0.125f * 1.44269504f;
constexpr unsigned SPIN_LIMIT = 400000;

// ------------------------------------------------------------------ device helpers
__device__ __forceinline__ uint4 ldcg4(const void* p) {
  uint4 v; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ uint2 ldcg2(const void* p) {
  uint2 v; asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ uint4 ldcl4(uint32_t p) {
  uint4 v; asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory"); return v; }
__device__ __forceinline__ uint2 ldcl2(uint32_t p) {
  uint2 v; asm volatile("ld.shared::cluster.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory"); return v; }
__device__ __forceinline__ uint32_t mapa(uint32_t a, uint32_t r) {
  uint32_t v; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(r)); return v; }
__device__ __forceinline__ void ldsm4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a)); }
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
__device__ __forceinline__ uint32_t pk(float a, float b) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b); return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ float lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float gelu(float x) {
  float t = 0.7978845608f * (x + 0.044715f * x * x * x), y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(t)); return 0.5f * x * (1.f + y); }
__device__ __forceinline__ void nbar(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
__device__ __forceinline__ void set4(uint32_t (&a)[4], uint4 v) { a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w; }
__device__ __forceinline__ void sts4f(uint32_t a, const float (&c)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" :: "r"(a), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]) : "memory"); }
__device__ __forceinline__ void adds4f(uint32_t a, float (&c)[4]) {
  float x, y, z, w; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(a) : "memory");
  c[0] += x; c[1] += y; c[2] += z; c[3] += w; }
__device__ __forceinline__ void sts2(uint32_t a, uint32_t x, uint32_t y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(a), "r"(x), "r"(y) : "memory"); }
__device__ __forceinline__ void sts1(uint32_t a, uint32_t x) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(a), "r"(x) : "memory"); }
__device__ __forceinline__ uint4 lds4(uint32_t a) {
  uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v; }
__device__ __forceinline__ uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// counter barrier through L2; ctr grows for ever (zeroed by the host before each launch); never hangs
__device__ __forceinline__ bool spin_until(unsigned* ctr, unsigned target, int* err) {
  unsigned n = 0, v;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(ctr) : "memory");
    if ((int)(v - target) >= 0) return true;
    ++n;
    if (n > SPIN_LIMIT || ((n & 255u) == 0 && *(volatile int*)err)) { *(volatile int*)err = 1; return false; }
  }
}
__device__ __forceinline__ void l2bar(unsigned* ctr, unsigned target, int* err, volatile int* sflag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(ctr) : "memory");
    if (*sflag || !spin_until(ctr, target, err)) *sflag = 1;
  }
  __syncthreads();
}
// two levels: groups of 16 CTAs; ctr[0] root, ctr[32*(1+g)] group g; epoch counts from 1
__device__ __forceinline__ void hierbar(unsigned* ctr, int cta, int ngroups, unsigned epoch, int* err, volatile int* sflag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned old; unsigned* gc = ctr + 32 * (1 + (cta >> 4));
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(gc) : "memory");
    if (old == epoch * 16 - 1) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(ctr) : "memory");
    if (*sflag || !spin_until(ctr, epoch * ngroups, err)) *sflag = 1;
  }
  __syncthreads();
}
__device__ __forceinline__ void clbar() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// the same with one fence per CTA (by thread 0, cumulative after the __syncthreads) instead of one per warp
__device__ __forceinline__ void clbar1() {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// no fence at all: NOT a correct barrier for memory, only the time of the bare hardware barrier
__device__ __forceinline__ void clbarrlx() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ uint64_t mkdesc(uint32_t a, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((a & 0x3ffff) >> 4) | ((uint64_t)(lbo >> 4) << 16) | ((uint64_t)(sbo >> 4) << 32); }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void wgmma_n(float (&d)[3][4], const uint32_t (&a)[4], uint64_t desc, int sc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %17, 0;\n"
  "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12,%13,%14,%15}, %16, p, 1, 1, 0;}\n"
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
  : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(desc),"r"(sc));
}
__device__ __forceinline__ void wgmma_n(float (&d)[6][4], const uint32_t (&a)[4], uint64_t desc, int sc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0;\n"
  "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24,%25,%26,%27}, %28, p, 1, 1, 0;}\n"
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
  : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(desc),"r"(sc));
}
__device__ __forceinline__ void wgmma_n(float (&d)[12][4], const uint32_t (&a)[4], uint64_t desc, int sc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %53, 0;\n"
  "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48,%49,%50,%51}, %52, p, 1, 1, 0;}\n"
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
  : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(desc),"r"(sc));
}
__device__ __forceinline__ void wgmma_n(float (&d)[24][4], const uint32_t (&a)[4], uint64_t desc, int sc) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %101, 0;\n"
  "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%96,%97,%98,%99}, %100, p, 1, 1, 0;}\n"
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]), "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]), "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
  : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(desc),"r"(sc));
}
#endif
// acc (NT n8-tiles of this warp's 16 rows) += A (KT k16-tiles in registers) * B (shared, core-matrix layout, K8 k8-cores a row of cores)
template <int NT, int KT, int K8, int WG, int SK>
__device__ __forceinline__ void gemm(float (&acc)[NT][4], const uint32_t (&a)[KT][4], uint32_t sB, int nt0, int kt0) {
  if constexpr (SK & SK_MMA) {
#pragma unroll
    for (int k = 0; k < KT; k++) { acc[0][0] += lo(a[k][0]); acc[0][1] += lo(a[k][1]); acc[0][2] += lo(a[k][2]); acc[0][3] += lo(a[k][3]); }
  }
  if constexpr (WG) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (!(SK & SK_MMA)) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < KT; k++)
        wgmma_n(acc, a[k], mkdesc(sB + (nt0 * K8 + 2 * (kt0 + k)) * 128, 128, K8 * 128), k != 0);
      asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int n = 0; n < NT; n++) asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3]) :: "memory");
    }
#else
    __trap();                               // wgmma needs sm_90a; a generic compute_90 pass of nvcc must compile too
#endif
  } else {
    uint32_t base = sB + (nt0 * K8 + 2 * kt0) * 128 + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int k = 0; k < KT; k += 2)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        uint32_t b[4]; ldsm4(b, base + (n * K8 + 2 * k) * 128);
        if constexpr (!(SK & SK_MMA)) { mma(acc[n], a[k], b[0], b[1]); mma(acc[n], a[k + 1], b[2], b[3]); }
      }
  }
}
template <int N> __device__ __forceinline__ void zero(float (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0.f; }

// rows x K8*8 slice of a row-major (n, k) matrix -> shared, 8x8 core matrices of 128 contiguous bytes
__device__ __forceinline__ void loadW(char* s, int snt0, const bf16* W, size_t ld, int n0, int nrows, int k0, int K8) {
  for (int i = threadIdx.x; i < nrows * K8; i += blockDim.x) {
    int n = i / K8, k = i % K8;
    *(uint4*)(s + ((size_t)((snt0 + n / 8) * K8 + k) * 128 + (n % 8) * 16)) = *(const uint4*)(W + (size_t)(n0 + n) * ld + k0 + k * 8);
  }
}

// ------------------------------------------------------------------ backward, form A
enum { O_NOWIN = 64, O_NOREC = 128, O_NOPF = 256, O_LATE = 512, O_MERGE = 1024 };
constexpr int A_L = 6, A_D = 384, A_F = 1536, A_B = 64, A_C = 16, A_H = 6, NCHK = 18;
constexpr int A_SW = 11 * A_D * A_D * 2 / A_C, A_SCR = 12288, A_EA = 12288;
constexpr int a_smem = A_SW + A_SCR + A_EA + 256;
constexpr int NPF = 14;
constexpr float LOG2E = 1.44269504f;
struct PA {
  const bf16 *WkvT, *WdT, *WuT, *WoT, *MT;                     // (D, 2D), (F, D), (D, F), (D, D): (outputs of the backward, inner); MT = WoT WuT (D, F)
  const bf16 *nz, *nu, *nuo, *h, *q, *a, *k, *v;                   // kept (L, T, B, .)
  const float *lse, *rz, *ru, *rk, *d, *dki, *dvi;
  uint32_t *bkv, *by, *bu; char* part; float *cz, *cs;       // exchanged
  bf16 *dkv, *dy, *g, *dh, *du, *da; float *duf, *delta;     // stored for what follows once a group (da: also exchanged)
  unsigned* ctr; int* err; int T; unsigned* prof;
  const char* pft[16]; int pfn[16];                          // kept tensors and the bytes of a CTA's part of a position
};
__device__ __forceinline__ uint32_t ldcg1(const void* p) { uint32_t v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void lds2f(float& x, float& y, uint32_t a) { asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(a) : "memory"); }
__device__ __forceinline__ float ldcgf(const void* p) { return __uint_as_float(ldcg1(p)); }
__device__ __forceinline__ void pfbulk(const void* p, int bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory"); }
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  return lo(a.x) * lo(b.x) + hi(a.x) * hi(b.x) + lo(a.y) * lo(b.y) + hi(a.y) * hi(b.y) + lo(a.z) * lo(b.z) + hi(a.z) * hi(b.z) + lo(a.w) * lo(b.w) + hi(a.w) * hi(b.w); }
__device__ __forceinline__ void axpy8(float* x, float s, uint4 a) {
  x[0] += s * lo(a.x); x[1] += s * hi(a.x); x[2] += s * lo(a.y); x[3] += s * hi(a.y); x[4] += s * lo(a.z); x[5] += s * hi(a.z); x[6] += s * lo(a.w); x[7] += s * hi(a.w); }
// GELU (tanh form) and its derivative
__device__ __forceinline__ void gelu_d(float x, float& gl, float& dv) {
  float x2 = x * x, t = 0.7978845608f * (x + 0.044715f * x * x2), y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(t));
  float cdf = 0.5f + 0.5f * y; gl = x * cdf;
  dv = cdf + 0.5f * x * (1.f - y * y) * (0.7978845608f + 0.1070322243f * x2); }
__device__ __host__ __forceinline__ float slope2(int hd) { return LOG2E / (float)(2 << hd); }

// 256 threads. WG: wgmma; PBF: partial sums as bf16; BK: kind of barrier; SK: parts left out or put elsewhere
template <int WG, int PBF, int BK, int SK>
__global__ void __launch_bounds__(256, 1) bwdA(PA P) {
  constexpr int D = A_D, F = A_F, B = A_B, C = A_C, H = A_H, NP = 2, K8 = D / 8, MG = (SK & O_MERGE) != 0;
  extern __shared__ __align__(128) char sm[];
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, m = w & 3, p = w >> 2;
  int layer = blockIdx.x / C, c = blockIdx.x % C, g = lane >> 2, qd = lane & 3;
  char* misc = sm + A_SW + A_SCR + A_EA;
  volatile int* sflag = (volatile int*)misc;
  volatile unsigned* prf = (volatile unsigned*)(misc + 16);       // 15 words
  if (tid == 0) { *sflag = 0; for (int i = 0; i < 15; i++) prf[i] = 0; }
  const uint32_t sb = s2u(sm), sWkv = sb, sWd = sWkv + 24 * 2 * D * 2, sWu = sWd + 96 * D * 2, sWo = sWu + 96 * D * 2;
  const uint32_t sc = sb + A_SW + m * (A_SCR / 4), sEA = sb + A_SW + A_SCR, sPX = s2u(misc) + 128;
  loadW(sm, 0, P.WkvT + (size_t)layer * 2 * D * D, 2 * D, 24 * c, 24, 0, 2 * K8);
  loadW(sm + (sWd - sb), 0, P.WdT + (size_t)layer * F * D, D, 96 * c, 96, 0, K8);
  loadW(sm + (sWu - sb), 0, (MG ? P.MT : P.WuT) + (size_t)layer * F * D, F, 0, D, 96 * c, 12);
  loadW(sm + (sWo - sb), 0, P.WoT + (size_t)layer * D * D, D, 24 * c, 24, 0, K8);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  uint32_t* bkv = P.bkv + (size_t)layer * B * D; uint32_t* by = P.by + (size_t)layer * B * D / 2; uint32_t* bu = P.bu + (size_t)layer * B * D / 2;
  char* part = P.part + (size_t)layer * C * C * 12 * 512;
  float* cz = P.cz + layer * B; float* cs = P.cs + layer * B * 32;
  unsigned* ctr = P.ctr + layer * 32;
  unsigned ep = 0;
  auto arrive = [&]() {
    asm volatile("" : "+r"(tid), "+r"(lane), "+r"(w), "+r"(m), "+r"(p), "+r"(c), "+r"(g), "+r"(qd), "+r"(layer));
    if constexpr (BK == BAR_CLUSTER) { __syncwarp(); asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
    else if constexpr (BK == BAR_CL1) {
      __syncthreads();
      if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
      __syncwarp();
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    } else if constexpr (BK == BAR_CLRLX) { __syncwarp(); asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
    else if constexpr (BK == BAR_L2) {
      ep += C; __syncthreads();
      if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(ctr) : "memory");
      __syncwarp();
    }
  };
  auto wait = [&]() {
    __syncwarp();
    if constexpr (BK == BAR_CLUSTER || BK == BAR_CL1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else if constexpr (BK == BAR_CLRLX) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    else if constexpr (BK == BAR_L2) {
      if (threadIdx.x == 0) { if (*sflag || !spin_until(ctr, ep, P.err)) *sflag = 1; }
      __syncthreads();
    } else __syncthreads();
    asm volatile("" : "+r"(tid), "+r"(lane), "+r"(w), "+r"(m), "+r"(p), "+r"(c), "+r"(g), "+r"(qd), "+r"(layer));
  };
  // a barrier with work that needs nothing from it between arrival and wait. SK_PROF: cycles of thread 0: work before | this work | wait
  unsigned last = 0; int bi = 0;
  auto bar = [&](auto&& win) {
    if constexpr (SK & O_NOWIN) win();
    [[maybe_unused]] unsigned c1 = 0, c2 = 0;
    if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) c1 = clock(); }
    arrive();
    if constexpr (!(SK & O_NOWIN)) win();
    if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) c2 = clock(); }
    wait();
    if constexpr (SK & SK_PROF) {
      if (threadIdx.x == 0) { prf[3 * bi] += c1 - last; prf[3 * bi + 1] += c2 - c1; last = clock(); prf[3 * bi + 2] += last - c2; }
      bi++;
    }
  };
  auto reduce3 = [&](float (&acc)[3][4]) {                   // sum over the two warps of a row tile into p == 0
    if (p > 0) {
#pragma unroll
      for (int j = 0; j < 3; j++) sts4f(sc + (j * 32 + lane) * 16, acc[j]);
    }
    nbar(1 + m, NP * 32);
    if (p == 0) {
#pragma unroll
      for (int j = 0; j < 3; j++) adds4f(sc + (j * 32 + lane) * 16, acc[j]);
    }
  };
  // 24 columns of RES * v in bf16: fragment order for the exchange; the words stay in e for the record
  auto emit = [&](const float (&v)[3][4], uint32_t* buf, uint32_t (&e)[6]) {
#pragma unroll
    for (int j = 0; j < 3; j++) {
      e[2 * j] = pk(RES * v[j][0], RES * v[j][1]); e[2 * j + 1] = pk(RES * v[j][2], RES * v[j][3]); int hk = 3 * c + j;
      __stcg((uint2*)(buf + ((m * 24 + (hk >> 1)) * 32 + lane) * 4 + 2 * (hk & 1)), make_uint2(e[2 * j], e[2 * j + 1]));
    }
  };
  auto rec24 = [&](bf16* dst, const uint32_t (&e)[6], int t) {  // the same, row-major
    if constexpr (!(SK & O_NOREC)) {
      bf16* x = dst + (((size_t)layer * P.T + t) * B + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
      for (int j = 0; j < 3; j++) { __stcg((unsigned*)(x + 8 * j), e[2 * j]); __stcg((unsigned*)(x + 8 * D + 8 * j), e[2 * j + 1]); }
    }
  };
  auto ld24 = [&](const bf16* src, uint32_t (&e)[6], int t) {
    const bf16* x = src + (((size_t)layer * P.T + t) * B + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
    for (int j = 0; j < 3; j++) { e[2 * j] = ldcg1(x + 8 * j); e[2 * j + 1] = ldcg1(x + 8 * D + 8 * j); }
  };
  auto prefetch = [&](int t) {                               // this CTA's sixteenth of what the layer keeps of position t
    if constexpr (!(SK & O_NOPF)) {
      int i = w + 8 * lane;                                  // two by each warp
      if (i < NPF) {
        const char* s = P.pft[i]; int n = P.pfn[i];
        if (MG && i == 1) s = (const char*)P.nuo;
        pfbulk(s + (size_t)(layer * P.T + t) * (16 * n) + c * n, n);
      }
      __syncwarp();
    }
  };
  // attention: warp w has row arow and heads 3 (w & 1) + u
  float pN[3] = {0, 0, 0}, qkN[3] = {0, 0, 0}, E1 = 0, E2 = 0;
  auto arow = [&]() { int i = w >> 1; return 16 * (c / 4) + 2 * (c % 4) + (i & 1) + 8 * (i >> 1); };
  // all that pair t gets but for the query t + 1: from outside the chunk and from queries t + 2 ..; p of query t + 1
  auto early = [&](auto uc, int t) {
    [[maybe_unused]] constexpr int u = decltype(uc)::value;
    if constexpr (!(SK & SK_ATT)) {
      const int hd = 3 * (w & 1) + u, n = 15 - (t & 15), d8 = lane & 7, b0 = (lane >> 3) & 1, b1 = lane >> 4, pg = lane >> 3;
      const size_t ro = ((size_t)layer * P.T + t) * B + arow(), o = ro * D + hd * 64 + d8 * 8;
      const uint4 K = ldcg4(P.k + o), V = ldcg4(P.v + o);
      const uint4 I = ldcg4((b1 ? P.dvi : P.dki) + o + 4 * b0);
      uint4 Q[4], A[4], Q1 = make_uint4(0, 0, 0, 0); float ls[4], de[4], ls1 = 0;
      if (n > 0) { Q1 = ldcg4(P.q + o + B * D); ls1 = ldcgf(P.lse + (ro + B) * H + hd); }
#pragma unroll
      for (int it = 0; it < 4; it++) {
        Q[it] = A[it] = make_uint4(0, 0, 0, 0); ls[it] = 1e30f; de[it] = 0;
        if (it * 4 < n - 1) {                                // uniform
          int i = it * 4 + pg;
          if (i < n - 1) {
            size_t x = (size_t)(2 + i) * B;
            Q[it] = ldcg4(P.q + o + x * D); A[it] = ldcg4(P.da + o + x * D); ls[it] = ldcgf(P.lse + (ro + x) * H + hd); de[it] = ldcgf(P.delta + (ro + x) * H + hd);
          }
        }
      }
      const float sl = slope2(hd);
      float x[16];
#pragma unroll
      for (int j = 0; j < 16; j++) x[j] = 0;
#pragma unroll
      for (int it = 0; it < 4; it++)
        if (it * 4 < n - 1) {
          float s = dot8(Q[it], K), y = dot8(A[it], V);
          s += __shfl_xor_sync(~0u, s, 1); y += __shfl_xor_sync(~0u, y, 1); s += __shfl_xor_sync(~0u, s, 2); y += __shfl_xor_sync(~0u, y, 2);
          s += __shfl_xor_sync(~0u, s, 4); y += __shfl_xor_sync(~0u, y, 4);
          float pp = exp2f(s * SCL - sl * (float)(2 + it * 4 + pg) - ls[it]), ds = pp * (y - de[it]);
          axpy8(x, ds, Q[it]); axpy8(x + 8, pp, A[it]);
        }
      float z[4];
#pragma unroll
      for (int j = 0; j < 8; j++) { float mine = b1 ? x[8 + j] : x[j], his = b1 ? x[j] : x[8 + j]; x[j] = mine + __shfl_xor_sync(~0u, his, 16); }
#pragma unroll
      for (int j = 0; j < 4; j++) { float mine = b0 ? x[4 + j] : x[j], his = b0 ? x[j] : x[4 + j]; z[j] = mine + __shfl_xor_sync(~0u, his, 8); }
      const float f = b1 ? 1.f : 0.125f;
      z[0] = f * (z[0] + __uint_as_float(I.x)); z[1] = f * (z[1] + __uint_as_float(I.y)); z[2] = f * (z[2] + __uint_as_float(I.z)); z[3] = f * (z[3] + __uint_as_float(I.w));
      sts4f(sEA + ((w * 3 + u) * 128 + b1 * 64 + d8 * 8 + b0 * 4) * 4, z);
      uint4 Y = b1 ? V : K; uint32_t y0 = b0 ? Y.z : Y.x, y1 = b0 ? Y.w : Y.y;
      float e = z[0] * lo(y0) + z[1] * hi(y0) + z[2] * lo(y1) + z[3] * hi(y1), s = dot8(Q1, K);
      e += __shfl_xor_sync(~0u, e, 1); s += __shfl_xor_sync(~0u, s, 1); e += __shfl_xor_sync(~0u, e, 2); s += __shfl_xor_sync(~0u, s, 2);
      e += __shfl_xor_sync(~0u, e, 4); s += __shfl_xor_sync(~0u, s, 4); e += __shfl_xor_sync(~0u, e, 8);
      float eo = __shfl_xor_sync(~0u, e, 16);
      if (u == 0) E1 = E2 = 0;
      E1 += b1 ? eo : e; E2 += b1 ? e : eo;
      pN[u] = n > 0 ? exp2f(s * SCL - sl - ls1) : 0.f; qkN[u] = 0.125f * s;
    }
  };
  auto int0 = std::integral_constant<int, 0>{}; auto int1 = std::integral_constant<int, 1>{}; auto int2 = std::integral_constant<int, 2>{};
  uint32_t kw[3] = {0, 0, 0}, vw[3] = {0, 0, 0}, qw[3] = {0, 0, 0}, aw[3] = {0, 0, 0}; float rk = 0;
  auto attload = [&](int t) {                                // operands of the dependent step, 2 channels a lane
    if constexpr (!(SK & SK_ATT)) {
      const size_t ro = ((size_t)layer * P.T + t) * B + arow(); const int n = 15 - (t & 15);
#pragma unroll
      for (int u = 0; u < 3; u++) {
        size_t o = ro * D + (3 * (w & 1) + u) * 64 + 2 * lane;
        kw[u] = ldcg1(P.k + o); vw[u] = ldcg1(P.v + o); qw[u] = aw[u] = 0;
        if (n > 0) { qw[u] = ldcg1(P.q + o + B * D); aw[u] = ldcg1(P.a + o + B * D); }
      }
      rk = ldcgf(P.rk + ro);
    }
  };
  auto nothing = [&]() {};
  prefetch(P.T - 1); prefetch(P.T - 2);
  if constexpr (BK == BAR_L2) { arrive(); wait(); } else clbar();
  if constexpr (!(SK & SK_WORK)) { if constexpr (!(SK & O_LATE)) { early(int0, P.T - 1); early(int1, P.T - 1); early(int2, P.T - 1); } attload(P.T - 1); }
  if constexpr (SK & SK_PROF) last = clock();
  for (int t = P.T - 1; t >= 0; t--) {
    if constexpr (SK & SK_WORK) {
      for (int i = 0; i < 5 - MG; i++) bar(nothing);
      if (*sflag) break;
      continue;
    } else {
    bi = 0;
    const size_t rt = ((size_t)layer * P.T + t) * B;         // row of sequence 0
    // 1. attention: query t + 1 to pair t; norm of the key; 4 rows, 6 heads
    uint32_t ek[3], ev[3];
    if constexpr (!(SK & SK_ATT)) {
      const int n = 15 - (t & 15), i = w >> 1, gg = 2 * (c % 4) + (i & 1), row = arow();
      uint32_t dw[3] = {0, 0, 0};
      if (n > 0) {
#pragma unroll
        for (int u = 0; u < 3; u++) dw[u] = ldcg1(P.da + (rt + B + row) * D + (3 * (w & 1) + u) * 64 + 2 * lane);
      }
      if constexpr (SK & O_LATE) { early(int0, t); early(int1, t); early(int2, t); }
      float x[3], y[3];
#pragma unroll
      for (int u = 0; u < 3; u++) { x[u] = lo(dw[u]) * lo(vw[u]) + hi(dw[u]) * hi(vw[u]); y[u] = lo(dw[u]) * lo(aw[u]) + hi(dw[u]) * hi(aw[u]); }
#pragma unroll
      for (int s = 1; s < 32; s *= 2)
#pragma unroll
        for (int u = 0; u < 3; u++) { x[u] += __shfl_xor_sync(~0u, x[u], s); y[u] += __shfl_xor_sync(~0u, y[u], s); }
      float ds[3], S1 = E1, S2 = E2;
#pragma unroll
      for (int u = 0; u < 3; u++) { ds[u] = pN[u] * (x[u] - y[u]); S1 += ds[u] * qkN[u]; S2 += pN[u] * x[u]; }
      if (lane == 0) sts2(sPX + w * 8, __float_as_uint(S1), __float_as_uint(S2));
      nbar(5 + i, 64);
      { float a0, a1; lds2f(a0, a1, sPX + (w ^ 1) * 8); S1 += a0; S2 += a1; }
      const float mk = S1 * (1.f / D);
#pragma unroll
      for (int u = 0; u < 3; u++) {
        float k0, k1, v0, v1;
        lds2f(k0, k1, sEA + ((w * 3 + u) * 128 + 2 * lane) * 4);
        lds2f(v0, v1, sEA + ((w * 3 + u) * 128 + 64 + 2 * lane) * 4);
        float q8 = 0.125f * ds[u];
        k0 += q8 * lo(qw[u]); k1 += q8 * hi(qw[u]); v0 += pN[u] * lo(dw[u]); v1 += pN[u] * hi(dw[u]);
        ek[u] = pk(rk * (k0 - mk * lo(kw[u])), rk * (k1 - mk * hi(kw[u]))); ev[u] = pk(v0, v1);
        int kk = (3 * (w & 1) + u) * 8 + (lane >> 2);
        uint32_t* e = bkv + (((c / 4) * 48 + (kk >> 1)) * 32 + gg * 4 + (lane & 3)) * 4 + (i >> 1) + 2 * (kk & 1);
        __stcg(e, ek[u]); __stcg(e + 24 * 32 * 4, ev[u]);
        if (lane == 0 && n > 0) __stcg(P.delta + (rt + B + row) * H + 3 * (w & 1) + u, y[u]);
      }
      // sum of dn n_z = dk_raw k_raw + dv v, and the norm of k makes the first of them zero
      if (lane == 0 && !(w & 1)) __stcg(cz + row, S2 * (1.f / D));
      __syncwarp();                                          // delta and the room of early() belong to this warp alone
    }
    float r[3][4]; uint32_t e6[6], n6[6], hw[12]; float rn0 = 0, rn1 = 0; zero(r);
    bar([&]() {
      if (t >= 2) prefetch(t - 2);
      if (p == 0) {
        const float* dp = P.d + (rt + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
        for (int j = 0; j < 3; j++) {
          uint2 a = ldcg2(dp + 8 * j), b = ldcg2(dp + 8 * D + 8 * j);
          r[j][0] = __uint_as_float(a.x); r[j][1] = __uint_as_float(a.y); r[j][2] = __uint_as_float(b.x); r[j][3] = __uint_as_float(b.y);
        }
        ld24(P.nz, n6, t); rn0 = ldcgf(P.rz + rt + m * 16 + g); rn1 = ldcgf(P.rz + rt + m * 16 + g + 8);
      }
      if constexpr (!(SK & SK_MLP)) {
        const bf16* hp = P.h + (rt + m * 16 + g) * F + 96 * c + 48 * p + 2 * qd;
#pragma unroll
        for (int j = 0; j < 6; j++) { hw[2 * j] = ldcg1(hp + 8 * j); hw[2 * j + 1] = ldcg1(hp + 8 * F + 8 * j); }
      }
      if constexpr (!(SK & (SK_ATT | O_NOREC))) {
        bf16* x = P.dkv + (rt + arow()) * 2 * D + 192 * (w & 1) + 2 * lane;
#pragma unroll
        for (int u = 0; u < 3; u++) { __stcg((unsigned*)(x + 64 * u), ek[u]); __stcg((unsigned*)(x + D + 64 * u), ev[u]); }
      }
      if constexpr (!(SK & O_LATE)) if (t > 0) early(int0, t - 1);
    });
    // 2. dn_z = dkv Wkv^T; dz = d + r_z (dn_z - n_z c)
    {
      uint32_t a[24][4]; float acc[3][4]; zero(acc);
#pragma unroll
      for (int k = 0; k < 24; k++) set4(a[k], ldcg4(bkv + ((m * 48 + p * 24 + k) * 32 + lane) * 4));
      float c0 = 0, c1 = 0;
      if (p == 0) { c0 = ldcgf(cz + m * 16 + g); c1 = ldcgf(cz + m * 16 + g + 8); }
      gemm<3, 24, 2 * K8, WG, SK>(acc, a, sWkv, 0, p * 24);
      reduce3(acc);
      if (p == 0) {
#pragma unroll
        for (int j = 0; j < 3; j++) {
          r[j][0] += rn0 * (acc[j][0] - c0 * lo(n6[2 * j])); r[j][1] += rn0 * (acc[j][1] - c0 * hi(n6[2 * j]));
          r[j][2] += rn1 * (acc[j][2] - c1 * lo(n6[2 * j + 1])); r[j][3] += rn1 * (acc[j][3] - c1 * hi(n6[2 * j + 1]));
        }
        emit(r, by, e6);
      }
    }
    float gp[24];
    bar([&]() {
      if (p == 0) {
        rec24(P.dy, e6, t);
        if constexpr (MG && !(SK & O_NOREC)) {               // du itself is left to a product once a group
          float* x = P.duf + (rt + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
          for (int j = 0; j < 3; j++) { __stcg((float2*)(x + 8 * j), make_float2(r[j][0], r[j][1])); __stcg((float2*)(x + 8 * D + 8 * j), make_float2(r[j][2], r[j][3])); }
        }
      }
      if constexpr (!(SK & SK_MLP)) {
        bf16* x = P.g + (rt + m * 16 + g) * F + 96 * c + 48 * p + 2 * qd;
#pragma unroll
        for (int j = 0; j < 12; j++) {
          float g0, g1; gelu_d(lo(hw[j]), g0, gp[2 * j]); gelu_d(hi(hw[j]), g1, gp[2 * j + 1]);
          if constexpr (!(SK & O_NOREC)) __stcg((unsigned*)(x + 8 * (j >> 1) + (j & 1) * 8 * F), pk(g0, g1));
        }
      }
    });
    // 3. dh = (dy Wdown^T) GELU'(h), own 96 channels; partial sums of dh Wup^T
    uint32_t eh[12];
    if constexpr (!(SK & SK_MLP)) {
      {
        uint32_t a[12][4]; float acc[12][4]; zero(acc);
#pragma unroll
        for (int k = 0; k < 12; k++) set4(a[k], ldcg4(by + ((m * 24 + 12 * p + k) * 32 + lane) * 4));
        if constexpr (MG) { zero(r); gemm<3, 12, K8, WG, SK>(r, a, sWo, 0, p * 12); }   // s dz Wout^T, half of the inner dimension
        gemm<12, 12, K8, WG, SK>(acc, a, sWd, 0, p * 12);
        float own[6][4];
#pragma unroll
        for (int j = 0; j < 6; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) own[j][e] = p ? acc[6 + j][e] : acc[j][e];
#pragma unroll
        for (int b = 0; b < 6; b += 3) {
#pragma unroll
          for (int j = 0; j < 3; j++) {
            float snd[4];
#pragma unroll
            for (int e = 0; e < 4; e++) snd[e] = p ? acc[b + j][e] : acc[6 + b + j][e];
            sts4f(sc + ((p * 3 + j) * 32 + lane) * 16, snd);
          }
          nbar(1 + m, NP * 32);
#pragma unroll
          for (int j = 0; j < 3; j++) adds4f(sc + (((p ^ 1) * 3 + j) * 32 + lane) * 16, own[b + j]);
          nbar(1 + m, NP * 32);
        }
        float s0 = 0, s1 = 0;
#pragma unroll
        for (int j = 0; j < 6; j++) {
          int hk = p * 6 + j;
          float d0 = own[j][0] * gp[4 * j], d1 = own[j][1] * gp[4 * j + 1], d2 = own[j][2] * gp[4 * j + 2], d3 = own[j][3] * gp[4 * j + 3];
          s0 += d0 * lo(hw[2 * j]) + d1 * hi(hw[2 * j]); s1 += d2 * lo(hw[2 * j + 1]) + d3 * hi(hw[2 * j + 1]);
          eh[2 * j] = pk(d0, d1); eh[2 * j + 1] = pk(d2, d3);
          sts2(sc + (((hk >> 1) * 32 + lane) * 4 + 2 * (hk & 1)) * 4, eh[2 * j], eh[2 * j + 1]);
        }
        nbar(1 + m, NP * 32);
        s0 += __shfl_xor_sync(~0u, s0, 1); s1 += __shfl_xor_sync(~0u, s1, 1); s0 += __shfl_xor_sync(~0u, s0, 2); s1 += __shfl_xor_sync(~0u, s1, 2);
        if (qd == 0) { __stcg(cs + (m * 16 + g) * 32 + 2 * c + p, s0); __stcg(cs + (m * 16 + g + 8) * 32 + 2 * c + p, s1); }
      }
      uint32_t a[6][4]; float acc[24][4]; zero(acc);
#pragma unroll
      for (int k = 0; k < 6; k++) set4(a[k], lds4(sc + (k * 32 + lane) * 16));
      gemm<24, 6, 12, WG, SK>(acc, a, sWu, p * 24, 0);
#pragma unroll
      for (int j = 0; j < 24; j++) {
        int nt = p * 24 + j; size_t tl = ((size_t)((nt / 3) * C + c) * 12 + (nt % 3) * 4 + m) * 32 + lane;
        if constexpr (PBF) __stcg((uint2*)part + tl, make_uint2(pk(acc[j][0], acc[j][1]), pk(acc[j][2], acc[j][3])));
        else __stcg((float4*)part + tl, make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
      }
    }
    bar([&]() {
      if (p == 0 || MG) { if (p == 0) ld24(MG ? P.nuo : P.nu, n6, t); rn0 = ldcgf(P.ru + rt + m * 16 + g); rn1 = ldcgf(P.ru + rt + m * 16 + g + 8); }
      if constexpr (!(SK & (SK_MLP | O_NOREC))) {
        bf16* x = P.dh + (rt + m * 16 + g) * F + 96 * c + 48 * p + 2 * qd;
#pragma unroll
        for (int j = 0; j < 12; j++) __stcg((unsigned*)(x + 8 * (j >> 1) + (j & 1) * 8 * F), eh[j]);
      }
      if constexpr (!(SK & O_LATE)) if (t > 0) early(int1, t - 1);
    });
    // 4. du = dz + r_u (sum of 16 partials - n_u c)
    {
      if constexpr (!(SK & SK_MLP)) {
        float acc[3][4]; zero(acc); uint4 a[4];
        if (p == 0) {
#pragma unroll
          for (int j = 0; j < 4; j++) a[j] = ldcg4(cs + (m * 16 + g + 8 * (j >> 1)) * 32 + qd * 8 + 4 * (j & 1));
        }
#pragma unroll
        for (int i = 0; i < C / NP; i++)
#pragma unroll
          for (int j = 0; j < 3; j++) {
            size_t tl = ((size_t)(c * C + i * NP + p) * 12 + j * 4 + m) * 32 + lane;
            if constexpr (PBF) { uint2 v = ldcg2((uint2*)part + tl); acc[j][0] += lo(v.x); acc[j][1] += hi(v.x); acc[j][2] += lo(v.y); acc[j][3] += hi(v.y); }
            else { uint4 v = ldcg4((uint4*)part + tl); acc[j][0] += __uint_as_float(v.x); acc[j][1] += __uint_as_float(v.y); acc[j][2] += __uint_as_float(v.z); acc[j][3] += __uint_as_float(v.w); }
          }
        if constexpr (MG) {
          rn0 *= RES; rn1 *= RES;
#pragma unroll
          for (int j = 0; j < 3; j++) { acc[j][0] = r[j][0] + rn0 * acc[j][0]; acc[j][1] = r[j][1] + rn0 * acc[j][1]; acc[j][2] = r[j][2] + rn1 * acc[j][2]; acc[j][3] = r[j][3] + rn1 * acc[j][3]; }
        }
        reduce3(acc);
        if (p == 0) {
          auto sum4 = [](uint4 v) { return __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w); };
          float c0 = sum4(a[0]) + sum4(a[1]), c1 = sum4(a[2]) + sum4(a[3]);
          c0 += __shfl_xor_sync(~0u, c0, 1); c1 += __shfl_xor_sync(~0u, c1, 1); c0 += __shfl_xor_sync(~0u, c0, 2); c1 += __shfl_xor_sync(~0u, c1, 2);
          c0 *= 1.f / D; c1 *= 1.f / D;
          if constexpr (MG) {
            c0 *= rn0; c1 *= rn1;
#pragma unroll
            for (int j = 0; j < 3; j++) {
              r[j][0] = acc[j][0] - c0 * lo(n6[2 * j]); r[j][1] = acc[j][1] - c0 * hi(n6[2 * j]);
              r[j][2] = acc[j][2] - c1 * lo(n6[2 * j + 1]); r[j][3] = acc[j][3] - c1 * hi(n6[2 * j + 1]);
            }
          } else
#pragma unroll
          for (int j = 0; j < 3; j++) {
            r[j][0] += rn0 * (acc[j][0] - c0 * lo(n6[2 * j])); r[j][1] += rn0 * (acc[j][1] - c0 * hi(n6[2 * j]));
            r[j][2] += rn1 * (acc[j][2] - c1 * lo(n6[2 * j + 1])); r[j][3] += rn1 * (acc[j][3] - c1 * hi(n6[2 * j + 1]));
          }
        }
      }
      auto stda = [&](const float (&v)[3][4]) {
        bf16* x = P.da + (rt + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
        for (int j = 0; j < 3; j++) { __stcg((unsigned*)(x + 8 * j), pk(v[j][0], v[j][1])); __stcg((unsigned*)(x + 8 * D + 8 * j), pk(v[j][2], v[j][3])); }
      };
      if (p == 0) { if constexpr (MG) stda(r); else emit(r, bu, e6); }
    }
    if constexpr (!MG) {
    bar([&]() {
      if (p == 0) {
        rec24(P.du, e6, t);
        if constexpr (!(SK & O_NOREC)) {
          float* x = P.duf + (rt + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
          for (int j = 0; j < 3; j++) { __stcg((float2*)(x + 8 * j), make_float2(r[j][0], r[j][1])); __stcg((float2*)(x + 8 * D + 8 * j), make_float2(r[j][2], r[j][3])); }
        }
      }
      if constexpr (!(SK & O_LATE)) if (t > 0) early(int2, t - 1);
    });
    // 5. da = s du Wout^T
    {
      uint32_t a[12][4]; float acc[3][4]; zero(acc);
#pragma unroll
      for (int k = 0; k < 12; k++) set4(a[k], ldcg4(bu + ((m * 24 + p * 12 + k) * 32 + lane) * 4));
      gemm<3, 12, K8, WG, SK>(acc, a, sWo, 0, p * 12);
      reduce3(acc);
      if (p == 0) {
        bf16* x = P.da + (rt + m * 16 + g) * D + 24 * c + 2 * qd;
#pragma unroll
        for (int j = 0; j < 3; j++) { __stcg((unsigned*)(x + 8 * j), pk(acc[j][0], acc[j][1])); __stcg((unsigned*)(x + 8 * D + 8 * j), pk(acc[j][2], acc[j][3])); }
      }
    }
    }
    bar([&]() { if (t > 0) { if constexpr (MG && !(SK & O_LATE)) early(int2, t - 1); attload(t - 1); } });
    if constexpr (BK == BAR_L2) { if (*sflag) break; }
    }
  }
  if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) for (int i = 0; i < 15; i++) P.prof[blockIdx.x * 16 + i] = prf[i]; }
  if constexpr (BK != BAR_L2) clbar();
}

// ------------------------------------------------------------------ host
__device__ __forceinline__ float rnd(unsigned long long i, unsigned seed) {
  unsigned x = (unsigned)i * 0x9E3779B1u + (unsigned)(i >> 32) * 0x85EBCA77u + seed * 0xC2B2AE3Du;
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return (float)(x >> 8) * (2.f / 16777216.f) - 1.f;         // uniform in (-1, 1)
}
__global__ void fillb(bf16* p, size_t n, float s, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = __float2bfloat16(s * rnd(i, seed)); }
__global__ void fillf(float* p, size_t n, float o, float s, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = o + s * rnd(i, seed); }
// k, v, h, r_k of one layer's last NCHK positions, as they follow from n_z and n_u
__global__ void merged(PA P, bf16* MT) {                     // one block a row of a layer
  constexpr int D = A_D, F = A_F; const bf16* o = P.WoT + (size_t)blockIdx.x * D; const bf16* U = P.WuT + (size_t)(blockIdx.x / D) * D * F;
  for (int f = threadIdx.x; f < F; f += blockDim.x) { float x = 0; for (int i = 0; i < D; i++) x += __bfloat162float(o[i]) * __bfloat162float(U[(size_t)i * F + f]); MT[(size_t)blockIdx.x * F + f] = __float2bfloat16(x); }
}
__global__ void consist(PA P, int layer, bf16* k, bf16* v, bf16* h, float* rk, bf16* nuo) {
  constexpr int D = A_D, F = A_F;
  __shared__ float ss; int t = P.T - NCHK + blockIdx.x; size_t row = ((size_t)layer * P.T + t) * A_B + blockIdx.y;
  if (threadIdx.x == 0) ss = 0;
  __syncthreads();
  float kr[2];
  for (int i = threadIdx.x, j = 0; i < D; i += blockDim.x, j++) {
    float x = 0, y = 0;
    for (int d = 0; d < D; d++) { float n = __bfloat162float(P.nz[row * D + d]); const bf16* W = P.WkvT + ((size_t)layer * D + d) * 2 * D; x += n * __bfloat162float(W[i]); y += n * __bfloat162float(W[D + i]); }
    kr[j] = x; v[row * D + i] = __float2bfloat16(y); atomicAdd(&ss, x * x);
  }
  __syncthreads();
  float r = rsqrtf(ss / D + EPS);
  for (int i = threadIdx.x, j = 0; i < D; i += blockDim.x, j++) k[row * D + i] = __float2bfloat16(kr[j] * r);
  if (threadIdx.x == 0) rk[row] = r;
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    float x = 0;
    for (int d = 0; d < D; d++) x += __bfloat162float(P.nu[row * D + d]) * __bfloat162float(P.WoT[((size_t)layer * D + i) * D + d]);
    nuo[row * D + i] = __float2bfloat16(x);
  }
  for (int i = threadIdx.x; i < F; i += blockDim.x) {
    float x = 0;
    for (int d = 0; d < D; d++) x += __bfloat162float(P.nu[row * D + d]) * __bfloat162float(P.WuT[((size_t)layer * D + d) * F + i]);
    h[row * F + i] = __float2bfloat16(x);
  }
}
static bf16* newb(size_t n, float s, unsigned seed) { bf16* p; CK(cudaMalloc(&p, n * 2)); fillb<<<1056, 256>>>(p, n, s, seed); CK(cudaGetLastError()); return p; }
static float* newf(size_t n, float o, float s, unsigned seed) { float* p; CK(cudaMalloc(&p, n * 4)); fillf<<<1056, 256>>>(p, n, o, s, seed); CK(cudaGetLastError()); return p; }
template <class T> static T* newz(size_t n) { T* p; CK(cudaMalloc(&p, n * sizeof(T))); CK(cudaMemset(p, 0, n * sizeof(T))); return p; }
static std::vector<float> getb(const bf16* p, size_t n) {
  std::vector<bf16> h(n); CK(cudaMemcpy(h.data(), p, n * 2, cudaMemcpyDeviceToHost)); std::vector<float> f(n);
  for (size_t i = 0; i < n; i++) f[i] = __bfloat162float(h[i]);
  return f; }
static std::vector<float> getf(const float* p, size_t n) { std::vector<float> f(n); CK(cudaMemcpy(f.data(), p, n * 4, cudaMemcpyDeviceToHost)); return f; }

static double t_start;
static double now() { timespec ts; clock_gettime(CLOCK_MONOTONIC, &ts); return ts.tv_sec + 1e-9 * ts.tv_nsec; }

// plain float backward of the last NCHK positions (one whole chunk of 16 and 2 of the one before) of the last layer for some rows
struct Ref { std::vector<int> rows; std::vector<float> dkv, dh, dz, du, da, delta; };
static PA pa;
static Ref reference(const std::vector<int>& rows) {
  const int D = A_D, F = A_F, H = A_H, B = A_B, N = NCHK, nr = (int)rows.size(), layer = A_L - 1;
  auto Wkv = getb(pa.WkvT + (size_t)layer * 2 * D * D, 2 * D * D), Wd = getb(pa.WdT + (size_t)layer * F * D, F * D), Wu = getb(pa.WuT + (size_t)layer * F * D, F * D), Wo = getb(pa.WoT + (size_t)layer * D * D, D * D);
  const size_t r0 = ((size_t)layer * pa.T + pa.T - N) * B, nn = (size_t)N * B;
  auto nz = getb(pa.nz + r0 * D, nn * D), nu = getb(pa.nu + r0 * D, nn * D), h = getb(pa.h + r0 * F, nn * F), q = getb(pa.q + r0 * D, nn * D), a = getb(pa.a + r0 * D, nn * D), k = getb(pa.k + r0 * D, nn * D), v = getb(pa.v + r0 * D, nn * D);
  auto lse = getf(pa.lse + r0 * H, nn * H), rz = getf(pa.rz + r0, nn), ru = getf(pa.ru + r0, nn), rk = getf(pa.rk + r0, nn), d = getf(pa.d + r0 * D, nn * D), dki = getf(pa.dki + r0 * D, nn * D), dvi = getf(pa.dvi + r0 * D, nn * D);
  Ref R; R.rows = rows; R.dkv.resize((size_t)N * nr * 2 * D); R.dh.resize((size_t)N * nr * F); R.du.resize((size_t)N * nr * D); R.da = R.dz = R.du; R.delta.resize((size_t)N * nr * H);
  std::vector<float> dn(D), dz(D);
  for (int ri = 0; ri < nr; ri++) for (int i = N - 1; i >= 0; i--) {
    const int t = pa.T - N + i; const size_t o = (size_t)i * B + rows[ri], x = (size_t)i * nr + ri;
    float* dk = &R.dkv[x * 2 * D]; float* dv = dk + D; float *dh = &R.dh[x * F], *du = &R.du[x * D], *da = &R.da[x * D];
    for (int j = 0; j < D; j++) { dk[j] = dki[o * D + j]; dv[j] = dvi[o * D + j]; }
    for (int e = 1; e <= 15 - (t & 15) && i + e < N; e++) {
      const size_t oe = o + (size_t)e * B, xe = x + (size_t)e * nr; const float* dae = &R.da[xe * D];
      for (int hd = 0; hd < H; hd++) {
        float s = 0, y = 0; for (int j = hd * 64; j < hd * 64 + 64; j++) { s += q[oe * D + j] * k[o * D + j]; y += dae[j] * v[o * D + j]; }
        float p = exp2f(s * SCL - slope2(hd) * e - lse[oe * H + hd]), ds = p * (y - R.delta[xe * H + hd]);
        for (int j = hd * 64; j < hd * 64 + 64; j++) { dk[j] += ds * q[oe * D + j]; dv[j] += p * dae[j]; }
      }
    }
    double s = 0; for (int j = 0; j < D; j++) { dk[j] *= 0.125f; s += dk[j] * k[o * D + j]; }
    for (int j = 0; j < D; j++) dk[j] = rk[o] * (dk[j] - k[o * D + j] * (float)(s / D));
    s = 0;
    for (int j = 0; j < D; j++) { float y = 0; for (int l = 0; l < 2 * D; l++) y += dk[l] * Wkv[(size_t)j * 2 * D + l]; dn[j] = y; s += y * nz[o * D + j]; }
    for (int j = 0; j < D; j++) dz[j] = d[o * D + j] + rz[o] * (dn[j] - nz[o * D + j] * (float)(s / D));
    for (int j = 0; j < D; j++) R.dz[x * D + j] = dz[j];
    for (int f = 0; f < F; f++) {
      float y = 0; for (int l = 0; l < D; l++) y += dz[l] * Wd[(size_t)f * D + l];
      float hh = h[o * F + f], th = tanhf(0.7978845608f * (hh + 0.044715f * hh * hh * hh));
      dh[f] = RES * y * (0.5f * (1 + th) + 0.5f * hh * (1 - th * th) * 0.7978845608f * (1 + 3 * 0.044715f * hh * hh));
    }
    s = 0;
    for (int j = 0; j < D; j++) { float y = 0; for (int l = 0; l < F; l++) y += dh[l] * Wu[(size_t)j * F + l]; dn[j] = y; s += y * nu[o * D + j]; }
    for (int j = 0; j < D; j++) du[j] = dz[j] + ru[o] * (dn[j] - nu[o * D + j] * (float)(s / D));
    for (int j = 0; j < D; j++) { float y = 0; for (int l = 0; l < D; l++) y += du[l] * Wo[(size_t)j * D + l]; da[j] = RES * y; }
    for (int hd = 0; hd < H; hd++) { float y = 0; for (int j = hd * 64; j < hd * 64 + 64; j++) y += da[j] * a[o * D + j]; R.delta[x * H + hd] = y; }
  }
  return R;
}
static float rel(const Ref& R, const std::vector<float>& r, const std::vector<float>& y, int W) {
  const int nr = (int)R.rows.size(); double n = 0, d = 0;
  for (int t = 0; t < NCHK; t++) for (int i = 0; i < nr; i++) for (int j = 0; j < W; j++) { double x = r[((size_t)t * nr + i) * W + j], e = y[((size_t)t * A_B + R.rows[i]) * W + j] - x; n += e * e; d += x * x; }
  return (float)sqrt(n / (d + 1e-30));
}
static Ref refA;
static void check(char* out, size_t len, bool merge) {
  const size_t r0 = ((size_t)(A_L - 1) * pa.T + pa.T - NCHK) * A_B, nn = (size_t)NCHK * A_B;
  float a = rel(refA, refA.dkv, getb(pa.dkv + r0 * 2 * A_D, nn * 2 * A_D), 2 * A_D), b = rel(refA, refA.dh, getb(pa.dh + r0 * A_F, nn * A_F), A_F),
        c = rel(refA, merge ? refA.dz : refA.du, getf(pa.duf + r0 * A_D, nn * A_D), A_D), d = rel(refA, refA.da, getb(pa.da + r0 * A_D, nn * A_D), A_D);
  snprintf(out, len, "  rel. diff dkv %.4f dh %.4f %s %.4f da %.4f %s", a, b, merge ? "dz" : "du", c, d, (a < 0.03f && b < 0.03f && c < 0.03f && d < 0.03f) ? "ok" : "BAD");
}

static cudaEvent_t e0, e1; static char GRP = 0; static size_t nctr;
template <int WG, int PBF, int BK, int SK>
static void run(const char* what) {
  if (GRP != (BK == BAR_L2 ? '2' : '1')) return;
  char nm[160];
  snprintf(nm, 160, "bwd A 256thr %s part-%s %s: %s", WG ? "wgmma" : "mma", SK & O_MERGE ? "bf16 4 exchanges" : PBF ? "bf16" : "f32", BK == BAR_CLUSTER ? "cl-bar" : BK == BAR_L2 ? "L2-bar" : BK == BAR_CL1 ? "cl-bar-1fence" : BK == BAR_CLRLX ? "cl-bar-nofence" : "no-bar", what);
  if (now() - t_start > 32) { printf("%-84s skipped, 32 s are over\n", nm); fflush(stdout); return; }
  auto k = bwdA<WG, PBF, BK, SK>;
  CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, a_smem));
  if (BK != BAR_L2) CK(cudaFuncSetAttribute(k, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaFuncAttributes fa; CK(cudaFuncGetAttributes(&fa, k));
  const bool whole = !(SK & (SK_WORK | SK_ATT | SK_MLP | SK_MMA | O_NOREC)) && BK != BAR_NONE;
  const size_t r0 = (size_t)(A_L - 1) * pa.T * A_B, nn = (size_t)pa.T * A_B;
  if (whole) { CK(cudaMemset(pa.dkv + r0 * 2 * A_D, 0, nn * 4 * A_D)); CK(cudaMemset(pa.dh + r0 * A_F, 0, nn * A_F * 2)); CK(cudaMemset(pa.duf + r0 * A_D, 0, nn * A_D * 4)); CK(cudaMemset(pa.da + r0 * A_D, 0, nn * A_D * 2)); }
  std::vector<float> ms;
  for (int i = 0; i < 6; i++) {
    CK(cudaMemset(pa.ctr, 0, nctr * 4)); CK(cudaMemset(pa.err, 0, 4));
    cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(A_L * A_C); cfg.blockDim = dim3(256); cfg.dynamicSmemBytes = a_smem;
    cudaLaunchAttribute at[1];
    if (BK == BAR_L2) { at[0].id = cudaLaunchAttributeCooperative; at[0].val.cooperative = 1; }
    else { at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim.x = A_C; at[0].val.clusterDim.y = 1; at[0].val.clusterDim.z = 1; }
    cfg.attrs = at; cfg.numAttrs = 1;
    CK(cudaEventRecord(e0));
    cudaError_t e = cudaLaunchKernelEx(&cfg, k, pa);
    if (e != cudaSuccess) { printf("%-84s launch refused: %s\n", nm, cudaGetErrorString(e)); fflush(stdout); cudaGetLastError(); return; }
    CK(cudaEventRecord(e1)); CK(cudaEventSynchronize(e1)); CK(cudaGetLastError());
    float f; CK(cudaEventElapsedTime(&f, e0, e1)); if (i) ms.push_back(f);
    int err; CK(cudaMemcpy(&err, pa.err, 4, cudaMemcpyDeviceToHost));
    if (err) { printf("%-84s ERROR FLAG: a spin loop ran over its limit (%.2f ms)\n", nm, f); fflush(stdout); return; }
  }
  std::sort(ms.begin(), ms.end());
  char chk[160] = ""; if (whole) check(chk, 160, SK & O_MERGE);
  printf("%-84s %8.3f us/pos %8.3f ms (min %.3f max %.3f) regs %3d local %d%s\n", nm, ms[2] * 1e3 / pa.T, ms[2], ms[0], ms[4], fa.numRegs, (int)fa.localSizeBytes, chk);
  if (SK & SK_PROF) {
    unsigned h[15]; double wk = 0, wi = 0, wt = 0; CK(cudaMemcpy(h, pa.prof, 60, cudaMemcpyDeviceToHost));
    printf("   cycles a position, CTA 0 thread 0 (work|independent work between arrival and wait|wait) [%s]:", SK & O_MERGE ? "attention, kv+dz, MLP, sum+da" : "attention, kv+dz, MLP, sum+du, out");
    for (int i = 0; i < (SK & O_MERGE ? 4 : 5); i++) { printf("  %.0f|%.0f|%.0f", (double)h[3 * i] / pa.T, (double)h[3 * i + 1] / pa.T, (double)h[3 * i + 2] / pa.T); wk += h[3 * i]; wi += h[3 * i + 1]; wt += h[3 * i + 2]; }
    printf("   sum %.0f = work %.0f + independent %.0f + wait %.0f\n", (wk + wi + wt) / pa.T, wk / pa.T, wi / pa.T, wt / pa.T);
  }
  fflush(stdout);
}
static void group(char grp) {
  alarm((unsigned)std::max(1.0, std::min(25.0, 38.0 - (now() - t_start)))); GRP = grp;
  cudaDeviceProp pr; CK(cudaSetDevice(0)); CK(cudaGetDeviceProperties(&pr, 0));
  int clk = 0; CK(cudaDeviceGetAttribute(&clk, cudaDevAttrClockRate, 0));
  printf("device %s, %d SMs, %.0f MHz at most, L2 %d MB, smem/block optin %zu\n", pr.name, pr.multiProcessorCount, clk * 1e-3, pr.l2CacheSize >> 20, pr.sharedMemPerBlockOptin); fflush(stdout);
  CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
  const size_t L = A_L, D = A_D, F = A_F, B = A_B, H = A_H; pa.T = 672; const size_t R = L * pa.T * B;
  const float sk = 1.732f / sqrtf((float)D), sh = 1.732f / sqrtf((float)F);
  pa.WkvT = newb(L * 2 * D * D, sk, 1); pa.WdT = newb(L * F * D, sk, 2); pa.WuT = newb(L * F * D, sk, 3); pa.WoT = newb(L * D * D, sk, 4); (void)sh;
  bf16 *h = newb(R * F, 1.732f, 5), *k = newb(R * D, 1.732f, 6), *v = newb(R * D, 1.732f, 7); float* rk = newf(R, 1.f, 0.2f, 8);
  pa.h = h; pa.k = k; pa.v = v; pa.rk = rk;
  pa.nz = newb(R * D, 1.732f, 9); pa.nu = newb(R * D, 1.732f, 10); pa.q = newb(R * D, 1.732f, 11); pa.a = newb(R * D, 1.f, 12);
  pa.lse = newf(R * H, 3.f, 0.5f, 13); pa.rz = newf(R, 1.f, 0.2f, 14); pa.ru = newf(R, 1.f, 0.2f, 15);
  pa.d = newf(R * D, 0, 1.f, 16); pa.dki = newf(R * D, 0, 4.f, 17); pa.dvi = newf(R * D, 0, 1.f, 18);
  pa.bkv = newz<uint32_t>(L * B * D); pa.by = newz<uint32_t>(L * B * D / 2); pa.bu = newz<uint32_t>(L * B * D / 2);
  pa.part = newz<char>(L * A_C * A_C * 12 * 512); pa.cz = newz<float>(L * B); pa.cs = newz<float>(L * B * 32);
  pa.dkv = newz<bf16>(R * 2 * D); pa.dy = newz<bf16>(R * D); pa.g = newz<bf16>(R * F); pa.dh = newz<bf16>(R * F); pa.du = newz<bf16>(R * D); pa.da = newz<bf16>(R * D);
  pa.duf = newz<float>(R * D); pa.delta = newz<float>(R * H);
  nctr = L * 32; pa.ctr = newz<unsigned>(nctr); pa.err = newz<int>(1); pa.prof = newz<unsigned>(16 * A_L * A_C);
  bf16 *MT = newb(L * F * D, sk, 19), *nuo = newb(R * D, 1.732f, 20); pa.MT = MT; pa.nuo = nuo;
  { const void* pp[NPF] = {pa.nz, pa.nu, pa.h, pa.q, pa.a, pa.k, pa.v, pa.d, pa.dki, pa.dvi, pa.lse, pa.rz, pa.ru, pa.rk};
    const int nn[NPF] = {3072, 3072, 12288, 3072, 3072, 3072, 3072, 6144, 6144, 6144, 96, 16, 16, 16};
    for (int i = 0; i < NPF; i++) { pa.pft[i] = (const char*)pp[i]; pa.pfn[i] = nn[i]; } }
  merged<<<A_L * A_D, 256>>>(pa, MT); CK(cudaGetLastError());
  consist<<<dim3(NCHK, A_B), 256>>>(pa, A_L - 1, k, v, h, rk, nuo); CK(cudaGetLastError());
  CK(cudaDeviceSynchronize());
  const double tr = now();
  refA = reference({0, 22, 41, 63});
  printf("group %c: set-up until %.1f s (reference %.1f s)\n", grp, now() - t_start, now() - tr); fflush(stdout);
  if (grp == '1') {
    auto kk = bwdA<1, 1, BAR_CL1, 0>; int nc = 0;
    CK(cudaFuncSetAttribute(kk, cudaFuncAttributeMaxDynamicSharedMemorySize, a_smem)); CK(cudaFuncSetAttribute(kk, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(A_L * A_C); cfg.blockDim = dim3(256); cfg.dynamicSmemBytes = a_smem;
    cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim.x = A_C; at[0].val.clusterDim.y = 1; at[0].val.clusterDim.z = 1; cfg.attrs = at; cfg.numAttrs = 1;
    cudaError_t e = cudaOccupancyMaxActiveClusters(&nc, kk, &cfg);
    printf("clusters of 16 CTAs with %d B shared memory: %d fit at once (6 wanted)%s [%s]\n", a_smem, nc, nc < 6 ? "  ** TIMES OF THE CLUSTER VARIANTS HOLD SEVERAL WAVES **" : "", cudaGetErrorString(e)); fflush(stdout); cudaGetLastError();
  }
  // whole
  run<1, 1, BAR_CL1, 0>("whole");
  run<1, 1, BAR_CLUSTER, 0>("whole");
  run<1, 0, BAR_CL1, 0>("whole");
  run<0, 1, BAR_CL1, 0>("whole");
  run<1, 1, BAR_L2, 0>("whole");
  run<1, 1, BAR_CL1, O_MERGE>("whole");
  run<1, 1, BAR_CLUSTER, O_MERGE>("whole");
  run<1, 1, BAR_L2, O_MERGE>("whole");
  run<1, 1, BAR_CL1, O_NOWIN>("whole, nothing between arrival and wait");
  run<1, 1, BAR_CL1, O_LATE>("whole, all attention in the dependent step");
  run<1, 1, BAR_CL1, O_NOPF>("whole, no prefetch into L2");
  run<1, 1, BAR_L2, O_LATE>("whole, all attention in the dependent step");
  run<1, 1, BAR_CLRLX, 0>("whole (order of memory not kept)");
  run<1, 1, BAR_CL1, SK_PROF>("whole, profiled");
  run<1, 1, BAR_CL1, SK_PROF | O_NOWIN>("whole, nothing between, profiled");
  run<1, 1, BAR_CL1, SK_PROF | O_LATE>("whole, all attention late, profiled");
  run<1, 1, BAR_L2, SK_PROF>("whole, profiled");
  run<1, 1, BAR_CL1, O_MERGE | O_NOWIN>("whole, nothing between arrival and wait");
  run<1, 1, BAR_CL1, O_MERGE | O_LATE>("whole, all attention in the dependent step");
  run<1, 1, BAR_CLRLX, O_MERGE>("whole (order of memory not kept)");
  run<1, 1, BAR_CL1, O_MERGE | SK_PROF>("whole, profiled");
  run<1, 1, BAR_L2, O_MERGE | SK_PROF>("whole, profiled");
  // one thing left out
  run<1, 1, BAR_CL1, SK_WORK>("barriers only (5)");
  run<1, 1, BAR_CLUSTER, SK_WORK>("barriers only (5)");
  run<1, 1, BAR_CLRLX, SK_WORK>("barriers only (5)");
  run<1, 1, BAR_L2, SK_WORK>("barriers only (5)");
  run<1, 1, BAR_NONE, 0>("without barriers");
  run<1, 1, BAR_CL1, SK_ATT>("without attention");
  run<1, 1, BAR_CL1, SK_MLP>("without MLP");
  run<1, 1, BAR_CL1, SK_MMA>("without mma");
  run<1, 1, BAR_CL1, O_NOREC>("without stores for later products");
  run<1, 1, BAR_CL1, O_NOREC | SK_ATT>("without these stores and attention");
  run<1, 1, BAR_L2, SK_ATT>("without attention");
  run<1, 1, BAR_L2, O_NOREC>("without stores for later products");
  run<1, 1, BAR_CL1, O_MERGE | SK_WORK>("barriers only (4)");
  run<1, 1, BAR_L2, O_MERGE | SK_WORK>("barriers only (4)");
  run<1, 1, BAR_NONE, O_MERGE>("without barriers");
  run<1, 1, BAR_CL1, O_MERGE | SK_ATT>("without attention");
  run<1, 1, BAR_CL1, O_MERGE | SK_MLP>("without MLP");
  run<1, 1, BAR_CL1, O_MERGE | SK_MMA>("without mma");
  run<1, 1, BAR_CL1, O_MERGE | O_NOREC>("without stores for later products");
}
int main(int argc, char** argv) {
  alarm(39); t_start = now();
  const char* gs = argc > 1 ? argv[1] : "12";
  for (const char* g = gs; *g; g++) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) { group(*g); fflush(stdout); exit(0); }
    int st = 0; if (pid > 0) waitpid(pid, &st, 0);
    if (pid < 0 || !WIFEXITED(st) || WEXITSTATUS(st)) printf("** group %c ended badly (status 0x%x)\n", *g, st);
    printf("-- group %c done at %.1f s\n", *g, now() - t_start); fflush(stdout);
  }
  return 0;
}
