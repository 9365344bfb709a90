// Skeleton of a persistent forward pass of a Recurrent Transformer stack (see NOTES.md).
// nvcc -O3 -arch=sm_90a skeleton.cu -o skeleton
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

// attention of one (row, head) by LP lanes; returns 8 outputs of dims 8*(lane&7).. in o
template <int LP>
__device__ __forceinline__ void attend(float (&o)[8], const bf16* q, const bf16* o0, const bf16* kv, size_t pstride, int D, int n) {
  constexpr int PPL = LP / 8, IT = 16 / PPL;
  int lane = threadIdx.x & 31, d8 = lane & 7, pg = (lane % LP) / 8;
  uint4 Q = ldcg4(q + d8 * 8), O = ldcg4(o0 + d8 * 8), K[IT], V[IT];
#pragma unroll
  for (int i = 0; i < IT; i++) { int pos = i * PPL + pg; K[i] = make_uint4(0, 0, 0, 0); if (pos < n) K[i] = ldcg4(kv + pos * pstride + d8 * 8); }
#pragma unroll
  for (int i = 0; i < IT; i++) { int pos = i * PPL + pg; V[i] = make_uint4(0, 0, 0, 0); if (pos < n) V[i] = ldcg4(kv + pos * pstride + D + d8 * 8); }
  float s[IT], mx = 0.f;                       // the far part has m = 0, l = 1, o = o0
#pragma unroll
  for (int i = 0; i < IT; i++) {
    float x = lo(Q.x) * lo(K[i].x) + hi(Q.x) * hi(K[i].x) + lo(Q.y) * lo(K[i].y) + hi(Q.y) * hi(K[i].y)
            + lo(Q.z) * lo(K[i].z) + hi(Q.z) * hi(K[i].z) + lo(Q.w) * lo(K[i].w) + hi(Q.w) * hi(K[i].w);
    x += __shfl_xor_sync(~0u, x, 1); x += __shfl_xor_sync(~0u, x, 2); x += __shfl_xor_sync(~0u, x, 4);
    s[i] = (i * PPL + pg < n) ? x * SCL : -1e30f;
    mx = fmaxf(mx, s[i]);
  }
#pragma unroll
  for (int d = 8; d < LP; d *= 2) mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, d));
  float l = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++) o[j] = 0.f;
#pragma unroll
  for (int i = 0; i < IT; i++) {
    float p = exp2f(s[i] - mx); l += p;
    o[0] += p * lo(V[i].x); o[1] += p * hi(V[i].x); o[2] += p * lo(V[i].y); o[3] += p * hi(V[i].y);
    o[4] += p * lo(V[i].z); o[5] += p * hi(V[i].z); o[6] += p * lo(V[i].w); o[7] += p * hi(V[i].w);
  }
#pragma unroll
  for (int d = 8; d < LP; d *= 2) {
    l += __shfl_xor_sync(~0u, l, d);
#pragma unroll
    for (int j = 0; j < 8; j++) o[j] += __shfl_xor_sync(~0u, o[j], d);
  }
  float e = exp2f(-mx); l += e; float il = 1.f / l;
  o[0] = (o[0] + e * lo(O.x)) * il; o[1] = (o[1] + e * hi(O.x)) * il; o[2] = (o[2] + e * lo(O.y)) * il; o[3] = (o[3] + e * hi(O.y)) * il;
  o[4] = (o[4] + e * lo(O.z)) * il; o[5] = (o[5] + e * hi(O.z)) * il; o[6] = (o[6] + e * lo(O.w)) * il; o[7] = (o[7] + e * hi(O.w)) * il;
}

// ------------------------------------------------------------------ form A
constexpr int A_L = 6, A_D = 384, A_B = 64, A_C = 16, A_RING = 16, NCHK = 4;
constexpr int A_SW = 11 * A_D * A_D * 2 / A_C;
struct PA {
  const bf16 *Wo, *Wu, *Wd, *Wkv, *q, *o0; const float* x;
  uint32_t *ba, *bu, *bz; char* part; float *sqU, *sqZ; bf16* kv; float* zout; unsigned* ctr; int* err; int T; unsigned* prof;
};
template <int NW, int XCH> __host__ __device__ constexpr int a_scr() { return NW == 8 ? 12288 : (XCH ? 18432 : 24576); }
template <int NW, int XCH> __host__ __device__ constexpr int a_smem() { return A_SW + a_scr<NW, XCH>() + (XCH ? 6144 : 0) + 128; }

// NW warps; WG: wgmma instead of mma.sync; XCH: 1 = a, u, z through distributed shared memory, 0 = through L2;
// PBF: partial sums of the MLP as bf16; BK: kind of barrier; SK: parts left out
template <int NW, int WG, int XCH, int PBF, int BK, int SK>
__global__ void __launch_bounds__(NW * 32, 1) formA(PA P) {
  constexpr int D = A_D, B = A_B, C = A_C, NP = NW / 4, K8 = D / 8;
  constexpr int SCR = a_scr<NW, XCH>(), SCRM = SCR / 4;
  extern __shared__ __align__(128) char sm[];
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, m = w & 3, p = w >> 2;
  int layer = blockIdx.x / C, c = blockIdx.x % C, g = lane >> 2, qd = lane & 3;
  int kh = p & 1, nh = p >> 1;
  volatile int* sflag = (volatile int*)(sm + a_smem<NW, XCH>() - 128);
  if (tid == 0) *sflag = 0;
  const uint32_t sb = s2u(sm), sWo = sb, sWu = sWo + 24 * D * 2, sWd = sWu + 96 * D * 2, sWkv = sWd + 96 * D * 2;
  const uint32_t sc = sb + A_SW + m * SCRM, slA = sb + A_SW + SCR, slU = slA + 3072;   // z shares a's slice
  loadW(sm, 0, P.Wo + (size_t)layer * D * D, D, 24 * c, 24, 0, K8);
  loadW(sm + (sWu - sb), 0, P.Wu + (size_t)layer * 4 * D * D, D, 96 * c, 96, 0, K8);
  loadW(sm + (sWd - sb), 0, P.Wd + (size_t)layer * 4 * D * D, 4 * D, 0, D, 96 * c, 12);
  loadW(sm + (sWkv - sb), 0, P.Wkv + (size_t)layer * 2 * D * D, D, 24 * c, 24, 0, K8);
  loadW(sm + (sWkv - sb), 3, P.Wkv + (size_t)layer * 2 * D * D, D, D + 24 * c, 24, 0, K8);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  uint32_t* ba = P.ba + (size_t)layer * B * D / 2; uint32_t* bu = P.bu + (size_t)layer * B * D / 2; uint32_t* bz = P.bz + (size_t)layer * B * D / 2;
  float* sqU = P.sqU + layer * B * C; float* sqZ = P.sqZ + layer * B * C;
  char* part = P.part + (size_t)layer * C * C * 12 * 512;
  bf16* kv = P.kv + (size_t)layer * 16 * B * 2 * D;
  const float* xl = P.x + (size_t)layer * A_RING * B * D;
  unsigned* ctr = P.ctr + layer * 32;
  unsigned ep = 0;
  auto bar0 = [&]() {
    // keep the compiler from computing all addresses before the loop and spilling them
    asm volatile("" : "+r"(tid), "+r"(lane), "+r"(m), "+r"(p), "+r"(c), "+r"(g), "+r"(qd), "+r"(kh), "+r"(nh), "+r"(layer));
    if constexpr (BK == BAR_CLUSTER) clbar();
    else if constexpr (BK == BAR_CL1) clbar1();
    else if constexpr (BK == BAR_CLRLX) clbarrlx();
    else if constexpr (BK == BAR_L2) { ep += C; l2bar(ctr, ep, P.err, sflag); }
    else __syncthreads();
  };
  // SK_PROF: thread 0 adds up the cycles of the work before each barrier and of the barrier itself
  volatile unsigned* prf = (volatile unsigned*)(sflag + 4); unsigned last = 0; int bi = 0;
  auto bar = [&]() {
    if constexpr (SK & SK_PROF) {
      unsigned c1 = 0;
      if (threadIdx.x == 0) { c1 = clock(); prf[2 * bi] += c1 - last; }
      bar0();
      if (threadIdx.x == 0) { last = clock(); prf[2 * bi + 1] += last - c1; }
      bi++;
    } else bar0();
  };
  // sum acc[3] over the NP warps of a row tile into p == 0
  auto reduce3 = [&](float (&acc)[3][4]) {
    if (p > 0) {
#pragma unroll
      for (int j = 0; j < 3; j++) sts4f(sc + (((p - 1) * 3 + j) * 32 + lane) * 16, acc[j]);
    }
    nbar(1 + m, NP * 32);
    if (p == 0) {
#pragma unroll
      for (int i = 0; i < NP - 1; i++)
#pragma unroll
        for (int j = 0; j < 3; j++) adds4f(sc + ((i * 3 + j) * 32 + lane) * 16, acc[j]);
    }
  };
  // u or z of this CTA's 24 columns: bf16 slice and partial sums of squares
  auto emit = [&](const float (&v)[3][4], uint32_t* buf, uint32_t sl, float* sq) {
    float s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      s0 += v[j][0] * v[j][0] + v[j][1] * v[j][1]; s1 += v[j][2] * v[j][2] + v[j][3] * v[j][3];
      uint32_t e0 = pk(v[j][0], v[j][1]), e1 = pk(v[j][2], v[j][3]); int hk = 3 * c + j;
      if constexpr (XCH) sts2(sl + ((m * 3 + j) * 32 + lane) * 8, e0, e1);
      else __stcg((uint2*)(buf + ((m * 24 + (hk >> 1)) * 32 + lane) * 4 + 2 * (hk & 1)), make_uint2(e0, e1));
    }
    s0 += __shfl_xor_sync(~0u, s0, 1); s0 += __shfl_xor_sync(~0u, s0, 2);
    s1 += __shfl_xor_sync(~0u, s1, 1); s1 += __shfl_xor_sync(~0u, s1, 2);
    if (qd == 0) { __stcg(sq + (m * 16 + g) * C + c, s0); __stcg(sq + (m * 16 + g + 8) * C + c, s1); }
  };
  auto rowr = [&](const float* sq, float& r0, float& r1) {
    uint4 a = ldcg4(sq + (m * 16 + g) * C + qd * 4), b = ldcg4(sq + (m * 16 + g + 8) * C + qd * 4);
    float s0 = __uint_as_float(a.x) + __uint_as_float(a.y) + __uint_as_float(a.z) + __uint_as_float(a.w);
    float s1 = __uint_as_float(b.x) + __uint_as_float(b.y) + __uint_as_float(b.z) + __uint_as_float(b.w);
    s0 += __shfl_xor_sync(~0u, s0, 1); s0 += __shfl_xor_sync(~0u, s0, 2);
    s1 += __shfl_xor_sync(~0u, s1, 1); s1 += __shfl_xor_sync(~0u, s1, 2);
    r0 = rsqrtf(s0 * (1.f / D) + EPS); r1 = rsqrtf(s1 * (1.f / D) + EPS);
  };
  // 12 k16-tiles of u or z from tile kt0
  auto loadUZ = [&](uint32_t (&a)[12][4], const uint32_t* buf, uint32_t sl) {      // from k16-tile 12 kh
#pragma unroll
    for (int k = 0; k < 12; k++) {
      if constexpr (XCH) {
        const int h0 = 2 * k, h1 = h0 + 1;
        uint2 x = ldcl2(mapa(sl, 8 * kh + h0 / 3) + ((m * 3 + h0 % 3) * 32 + lane) * 8);
        uint2 y = ldcl2(mapa(sl, 8 * kh + h1 / 3) + ((m * 3 + h1 % 3) * 32 + lane) * 8);
        a[k][0] = x.x; a[k][1] = x.y; a[k][2] = y.x; a[k][3] = y.y;
      } else set4(a[k], ldcg4(buf + ((m * 24 + 12 * kh + k) * 32 + lane) * 4));
    }
  };
  if constexpr (BK == BAR_L2) bar(); else clbar();       // all CTAs of the cluster have begun
  for (int t = 0; t < P.T; t++) {
    if constexpr (SK & SK_WORK) {
      for (int i = 0; i < 5; i++) bar();
      if (*sflag) break;
      continue;
    } else {
    if constexpr (SK & SK_PROF) { bi = 0; if (t == 0 && threadIdx.x == 0) { for (int i = 0; i < 12; i++) prf[i] = 0; last = clock(); } }
    const int tr = t % A_RING, n = t % 16;
    float u[3][4];
    if (p == 0) {
#pragma unroll
      for (int j = 0; j < 3; j++) {
        const float* xp = xl + ((size_t)tr * B + m * 16 + g) * D + 24 * c + 8 * j + 2 * qd;
        uint2 a = ldcg2(xp), b = ldcg2(xp + 8 * D);
        u[j][0] = __uint_as_float(a.x); u[j][1] = __uint_as_float(a.y); u[j][2] = __uint_as_float(b.x); u[j][3] = __uint_as_float(b.y);
      }
    } else zero(u);
    // 1. attention: rows 16*(c/4) + 2*(c%4) + {0,1,8,9}, 6 heads
    if constexpr (!(SK & SK_ATT)) {
      constexpr int LP = NW == 8 ? 32 : 16, GR = NW * 32 / LP;
      const int grp = tid / LP;
#pragma unroll
      for (int it = 0; it < (24 + GR - 1) / GR; it++) {
        int pr = grp + it * GR;
        if (pr < 24) {                                      // uniform in the warp (24 is even)
          int i = pr / 6, hd = pr % 6, gg = 2 * (c % 4) + (i & 1), row = 16 * (c / 4) + gg + 8 * (i >> 1);
          size_t qo = (((size_t)layer * A_RING + tr) * B + row) * D + hd * 64;
          float o[8];
          attend<LP>(o, P.q + qo, P.o0 + qo, kv + (size_t)row * 2 * D + hd * 64, (size_t)B * 2 * D, D, n);
          if (lane % LP < 8) {
            int kk = hd * 8 + (lane & 7), kt = kk >> 1, wd = (i >> 1) + 2 * (kk & 1);
#pragma unroll
            for (int q = 0; q < 4; q++) {
              uint32_t v = pk(o[2 * q], o[2 * q + 1]);
              if constexpr (XCH) sts1(slA + kt * 128 + ((i & 1) * 4 + q) * 16 + wd * 4, v);
              else __stcg(ba + (((c / 4) * 24 + kt) * 32 + gg * 4 + q) * 4 + wd, v);
            }
          }
        }
      }
    }
    bar();
    // 2. y = a Wout, u = x + s y
    {
      constexpr int KT = 24 / NP;
      uint32_t a[KT][4]; float acc[3][4]; zero(acc);
      uint32_t ra = 0;
      if constexpr (XCH) ra = mapa(slA, m * 4 + (g >> 1)) + (lane & 7) * 16;
#pragma unroll
      for (int k = 0; k < KT; k++) {
        if constexpr (XCH) set4(a[k], ldcl4(ra + (p * KT + k) * 128));
        else set4(a[k], ldcg4(ba + ((m * 24 + p * KT + k) * 32 + lane) * 4));
      }
      gemm<3, KT, K8, WG, SK>(acc, a, sWo, 0, p * KT);
      reduce3(acc);
      if (p == 0) {
#pragma unroll
        for (int j = 0; j < 3; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) u[j][e] += RES * acc[j][e];
        emit(u, bu, slU, sqU);
      }
    }
    bar();
    // 3. MLP
    if constexpr (!(SK & SK_MLP)) {
      constexpr int NT3 = 24 / NP, OWN = NT3 / 2, RT = (NP == 4 && XCH) ? 1 : 3;
      float r0, r1;
      {
        uint32_t a[12][4]; float acc[NT3][4]; zero(acc);
        loadUZ(a, bu, slU);
        rowr(sqU, r0, r1);
        gemm<NT3, 12, K8, WG, SK>(acc, a, sWu, nh * NT3, kh * 12);
        // the two halves of K: kh = 0 ends with the first half of the columns, kh = 1 with the second
        float own[OWN][4];
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) own[j][e] = kh ? acc[OWN + j][e] : acc[j][e];
#pragma unroll
        for (int b = 0; b < OWN; b += RT) {
#pragma unroll
          for (int j = 0; j < RT; j++) {
            float snd[4];
#pragma unroll
            for (int e = 0; e < 4; e++) snd[e] = kh ? acc[b + j][e] : acc[OWN + b + j][e];
            sts4f(sc + ((p * RT + j) * 32 + lane) * 16, snd);
          }
          nbar(1 + m, NP * 32);
#pragma unroll
          for (int j = 0; j < RT; j++) adds4f(sc + (((p ^ 1) * RT + j) * 32 + lane) * 16, own[b + j]);
          nbar(1 + m, NP * 32);
        }
#pragma unroll
        for (int j = 0; j < OWN; j++) {
          int hk = nh * NT3 + kh * OWN + j;
          sts2(sc + (((hk >> 1) * 32 + lane) * 4 + 2 * (hk & 1)) * 4,
               pk(gelu(r0 * own[j][0]), gelu(r0 * own[j][1])), pk(gelu(r1 * own[j][2]), gelu(r1 * own[j][3])));
        }
        nbar(1 + m, NP * 32);
      }
      constexpr int NT4 = 48 / NP;
      uint32_t a[6][4]; float acc[NT4][4]; zero(acc);
#pragma unroll
      for (int k = 0; k < 6; k++) set4(a[k], lds4(sc + (k * 32 + lane) * 16));
      gemm<NT4, 6, 12, WG, SK>(acc, a, sWd, p * NT4, 0);
#pragma unroll
      for (int j = 0; j < NT4; j++) {
        int nt = p * NT4 + j; size_t tl = ((size_t)((nt / 3) * C + c) * 12 + (nt % 3) * 4 + m) * 32 + lane;
        if constexpr (PBF) __stcg((uint2*)part + tl, make_uint2(pk(acc[j][0], acc[j][1]), pk(acc[j][2], acc[j][3])));
        else __stcg((float4*)part + tl, make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
      }
    }
    bar();
    // 4. z = u + s (sum of 16 partials)
    {
      if constexpr (!(SK & SK_MLP)) {
        float acc[3][4]; zero(acc);
#pragma unroll
        for (int i = 0; i < C / NP; i++)
#pragma unroll
          for (int j = 0; j < 3; j++) {
            size_t tl = ((size_t)(c * C + i * NP + p) * 12 + j * 4 + m) * 32 + lane;
            if constexpr (PBF) { uint2 v = ldcg2((uint2*)part + tl); acc[j][0] += lo(v.x); acc[j][1] += hi(v.x); acc[j][2] += lo(v.y); acc[j][3] += hi(v.y); }
            else { uint4 v = ldcg4((uint4*)part + tl); acc[j][0] += __uint_as_float(v.x); acc[j][1] += __uint_as_float(v.y); acc[j][2] += __uint_as_float(v.z); acc[j][3] += __uint_as_float(v.w); }
          }
        reduce3(acc);
#pragma unroll
        for (int j = 0; j < 3; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) u[j][e] += RES * acc[j][e];
      }
      if (p == 0) {
        emit(u, bz, slA, sqZ);
        if (t < NCHK) {
#pragma unroll
          for (int j = 0; j < 3; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              P.zout[(((size_t)layer * NCHK + t) * B + m * 16 + g + 8 * (e >> 1)) * D + 24 * c + 8 * j + 2 * qd + (e & 1)] = u[j][e];
        }
      }
    }
    bar();
    // 5. k, v
    {
      constexpr int NT5 = 12 / NP;
      uint32_t a[12][4]; float acc[NT5][4], r0, r1; zero(acc);
      loadUZ(a, bz, slA);
      rowr(sqZ, r0, r1);
      gemm<NT5, 12, K8, WG, SK>(acc, a, sWkv, nh * NT5, kh * 12);
      if (kh) {
#pragma unroll
        for (int j = 0; j < NT5; j++) sts4f(sc + ((nh * NT5 + j) * 32 + lane) * 16, acc[j]);
      }
      nbar(1 + m, NP * 32);
      if (!kh) {
#pragma unroll
        for (int j = 0; j < NT5; j++) {
          adds4f(sc + ((nh * NT5 + j) * 32 + lane) * 16, acc[j]);
          int nt = nh * NT5 + j;
          bf16* d = kv + (((size_t)n * B + m * 16 + g) * 2 + nt / 3) * D + 24 * c + 8 * (nt % 3) + 2 * qd;
          __stcg((unsigned*)d, pk(r0 * acc[j][0], r0 * acc[j][1]));
          __stcg((unsigned*)(d + 8 * 2 * D), pk(r1 * acc[j][2], r1 * acc[j][3]));
        }
      }
    }
    bar();
    if constexpr (BK == BAR_L2) { if (*sflag) break; }
    }
  }
  if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) for (int i = 0; i < 12; i++) P.prof[blockIdx.x * 12 + i] = prf[i]; }
  if constexpr (BK != BAR_L2) clbar();   // no CTA leaves while its shared memory may be read
}
// ------------------------------------------------------------------ form B
constexpr int B_D = 1024, B_B = 32, B_C = 128, B_RING = 64, B_NW = 8;
constexpr int B_SW = 11 * B_D * B_D * 2 / B_C;
constexpr int b_scr = 32768;
constexpr int b_smem = B_SW + b_scr + 256;
struct PB {
  const bf16 *Wo, *Wu, *Wd, *Wkv, *q, *o0; const float* x;
  uint32_t *ba, *bu, *bh, *bz; char* part; float *sqU, *sqZ; bf16* kv; float* zout; unsigned* ctr; int* err; int T; unsigned* prof;
};
// KG: groups over the hidden dimension of the second MLP product (the CTA grid is KG x 128/KG):
// 128 = own hidden columns only, partial sums reduced; 1 = own 8 output columns, all of h read; 8 = in between
template <int KG, int PBF, int BK, int SK>
__global__ void __launch_bounds__(B_NW * 32, 1) formB(PB P) {
  constexpr int D = B_D, C = B_C, NP = 4, K8 = D / 8, NG = C / KG;
  constexpr int DK8 = 512 / KG, DN = 128 / NG;             // Wdown slice: k8 cores, n8 tiles
  extern __shared__ __align__(128) char sm[];
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, m = w & 1, p = w >> 1;
  const int c = blockIdx.x, g = lane >> 2, qd = lane & 3;
  float* rs = (float*)(sm + B_SW + b_scr); volatile int* sflag = (volatile int*)(sm + B_SW + b_scr + 128);
  if (tid == 0) *sflag = 0;
  const uint32_t sb = s2u(sm), sWo = sb, sWu = sWo + 8 * D * 2, sWd = sWu + 32 * D * 2, sWkv = sWd + 32 * D * 2, sc = sb + B_SW;
  const int kg = c % KG, ng = c / KG;
  loadW(sm, 0, P.Wo, D, 8 * c, 8, 0, K8);
  loadW(sm + (sWu - sb), 0, P.Wu, D, 32 * c, 32, 0, K8);
  loadW(sm + (sWd - sb), 0, P.Wd, 4 * D, ng * DN * 8, DN * 8, kg * DK8 * 8, DK8);
  loadW(sm + (sWkv - sb), 0, P.Wkv, D, 8 * c, 8, 0, K8);
  loadW(sm + (sWkv - sb), 1, P.Wkv, D, D + 8 * c, 8, 0, K8);
  __syncthreads();
  unsigned ep = 0;
  auto bar0 = [&]() {
    ++ep;
    if constexpr (BK == BAR_L2) l2bar(P.ctr, ep * C, P.err, sflag);
    else if constexpr (BK == BAR_HIER) hierbar(P.ctr, c, C / 16, ep, P.err, sflag);
    else __syncthreads();
  };
  // SK_PROF: thread 0 adds up the cycles of the work before each barrier and of the barrier itself
  volatile unsigned* prf = (volatile unsigned*)(sflag + 4); unsigned last = 0; int bi = 0;
  auto bar = [&]() {
    if constexpr (SK & SK_PROF) {
      unsigned c1 = 0;
      if (threadIdx.x == 0) { c1 = clock(); prf[2 * bi] += c1 - last; }
      bar0();
      if (threadIdx.x == 0) { last = clock(); prf[2 * bi + 1] += last - c1; }
      bi++;
    } else bar0();
  };
  // product over K = 16*KT*NP in this CTA, split over the NP warps of a row tile; the sum of tile (m, n) ends in warp (m, n % NP)
  auto rowr = [&](const float* sq) {                       // r of all 32 rows -> rs (before a __syncthreads)
    int row = tid >> 3; float s = 0.f; uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = ldcg4(sq + row * C + (tid & 7) * 4 + i * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) s += __uint_as_float(v[i].x) + __uint_as_float(v[i].y) + __uint_as_float(v[i].z) + __uint_as_float(v[i].w);
    s += __shfl_xor_sync(~0u, s, 1); s += __shfl_xor_sync(~0u, s, 2); s += __shfl_xor_sync(~0u, s, 4);
    if ((tid & 7) == 0) rs[row] = rsqrtf(s * (1.f / D) + EPS);
  };
  // tile (p, m, n) of partial accumulators in the scratch
#define SCT(pp, mm, nn, NN) (sc + ((((pp) * 2 + (mm)) * (NN) + (nn)) * 32 + lane) * 16)
  auto emit = [&](const float (&v)[4], uint32_t* buf, float* sq) {   // this CTA's n8 tile c
    __stcg((uint2*)(buf + ((m * 64 + (c >> 1)) * 32 + lane) * 4 + 2 * (c & 1)), make_uint2(pk(v[0], v[1]), pk(v[2], v[3])));
    float s0 = v[0] * v[0] + v[1] * v[1], s1 = v[2] * v[2] + v[3] * v[3];
    s0 += __shfl_xor_sync(~0u, s0, 1); s0 += __shfl_xor_sync(~0u, s0, 2);
    s1 += __shfl_xor_sync(~0u, s1, 1); s1 += __shfl_xor_sync(~0u, s1, 2);
    if (qd == 0) { __stcg(sq + (m * 16 + g) * C + c, s0); __stcg(sq + (m * 16 + g + 8) * C + c, s1); }
  };
  auto loadA = [&](uint32_t (&a)[16][4], const uint32_t* buf, int KTT, int kt0) {
#pragma unroll
    for (int k = 0; k < 16; k++) set4(a[k], ldcg4(buf + ((m * KTT + kt0 + k) * 32 + lane) * 4));
  };
  bar();
  for (int t = 0; t < P.T; t++) {
    if constexpr (SK & SK_WORK) {
      for (int i = 0; i < (KG == 128 || KG == 1 ? 5 : 6); i++) bar();
      if (*sflag) break;
      continue;
    } else {
    if constexpr (SK & SK_PROF) { bi = 0; if (t == 0 && threadIdx.x == 0) { for (int i = 0; i < 12; i++) prf[i] = 0; last = clock(); } }
    const int tr = t % B_RING, n = t % 16;
    float u[1][4]; zero(u);
    if (p == 0) {
      const float* xp = P.x + ((size_t)tr * B_B + m * 16 + g) * D + 8 * c + 2 * qd;
      uint2 a = ldcg2(xp), b = ldcg2(xp + 8 * D);
      u[0][0] = __uint_as_float(a.x); u[0][1] = __uint_as_float(a.y); u[0][2] = __uint_as_float(b.x); u[0][3] = __uint_as_float(b.y);
    }
    if constexpr (!(SK & SK_ATT)) {
      if (w < 4) {
        int row = c / 4, hd = 4 * (c % 4) + w;
        size_t qo = ((size_t)tr * B_B + row) * D + hd * 64; float o[8];
        attend<32>(o, P.q + qo, P.o0 + qo, P.kv + (size_t)row * 2 * D + hd * 64, (size_t)B_B * 2 * D, D, n);
        if (lane < 8) {
          int kk = hd * 8 + lane, kt = kk >> 1, wd = ((row >> 3) & 1) + 2 * (kk & 1);
#pragma unroll
          for (int q = 0; q < 4; q++) __stcg(P.ba + (((row >> 4) * 64 + kt) * 32 + (row & 7) * 4 + q) * 4 + wd, pk(o[2 * q], o[2 * q + 1]));
        }
      }
    }
    bar();
    { // 2. y = a Wout
      uint32_t a[16][4]; float acc[1][4]; zero(acc);
      loadA(a, P.ba, 64, p * 16);
      gemm<1, 16, K8, 0, SK>(acc, a, sWo, 0, p * 16);
      if (p) sts4f(SCT(p, m, 0, 1), acc[0]);
      __syncthreads();
      if (p == 0) {
#pragma unroll
        for (int i = 1; i < NP; i++) adds4f(SCT(i, m, 0, 1), acc[0]);
#pragma unroll
        for (int e = 0; e < 4; e++) u[0][e] += RES * acc[0][e];
        emit(u[0], P.bu, P.sqU);
      }
    }
    bar();
    if constexpr (!(SK & SK_MLP)) { // 3. MLP
      {
        uint32_t a[16][4]; float acc[4][4]; zero(acc);
        loadA(a, P.bu, 64, p * 16);
        rowr(P.sqU);
        gemm<4, 16, K8, 0, SK>(acc, a, sWu, 0, p * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) sts4f(SCT(p, m, j, 4), acc[j]);
        __syncthreads();
        float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < NP; i++) adds4f(SCT(i, m, p, 4), v);
        float r0 = rs[m * 16 + g], r1 = rs[m * 16 + g + 8];
        uint32_t e0 = pk(gelu(r0 * v[0]), gelu(r0 * v[1])), e1 = pk(gelu(r1 * v[2]), gelu(r1 * v[3]));
        if constexpr (KG == 128) {
          sts2(sc + 16384 + (((m * 2 + (p >> 1)) * 32 + lane) * 4 + 2 * (p & 1)) * 4, e0, e1);
          __syncthreads();
        } else {
          int hk = 4 * c + p;
          __stcg((uint2*)(P.bh + ((m * 256 + (hk >> 1)) * 32 + lane) * 4 + 2 * (hk & 1)), make_uint2(e0, e1));
          bar();
        }
      }
      if constexpr (KG == 128) {
        uint32_t a[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) set4(a[k], lds4(sc + 16384 + ((m * 2 + k) * 32 + lane) * 16));
#pragma unroll 1
        for (int n0 = p * 32; n0 < p * 32 + 32; n0 += 8) {
          float acc[8][4]; zero(acc);
          gemm<8, 2, DK8, 0, SK>(acc, a, sWd, n0, 0);
#pragma unroll
          for (int j = 0; j < 8; j++) {
            size_t tl = ((size_t)((n0 + j) * C + c) * 2 + m) * 32 + lane;
            if constexpr (PBF) __stcg((uint2*)P.part + tl, make_uint2(pk(acc[j][0], acc[j][1]), pk(acc[j][2], acc[j][3])));
            else __stcg((float4*)P.part + tl, make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
          }
        }
      } else if constexpr (KG == 8) {
        uint32_t a[8][4]; float acc[8][4]; zero(acc);
#pragma unroll
        for (int k = 0; k < 8; k++) set4(a[k], ldcg4(P.bh + ((m * 256 + kg * 32 + p * 8 + k) * 32 + lane) * 4));
        gemm<8, 8, DK8, 0, SK>(acc, a, sWd, 0, p * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) sts4f(SCT(p, m, j, 8), acc[j]);
        __syncthreads();
#pragma unroll
        for (int jj = 0; jj < 2; jj++) {
          int j = p * 2 + jj; float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int i = 0; i < NP; i++) adds4f(SCT(i, m, j, 8), v);
          __stcg((float4*)P.part + ((size_t)((ng * 8 + j) * KG + kg) * 2 + m) * 32 + lane, make_float4(v[0], v[1], v[2], v[3]));
        }
      }
    } else if constexpr (KG != 128) bar();
    if constexpr (KG != 1) bar();
    { // 4. z
      if constexpr (!(SK & SK_MLP)) {
        float acc[1][4]; zero(acc);
        if constexpr (KG == 1) {
#pragma unroll 1
          for (int b = 0; b < 4; b++) {
            uint32_t a[16][4]; loadA(a, P.bh, 256, p * 64 + b * 16);
            gemm<1, 16, DK8, 0, SK>(acc, a, sWd, 0, p * 64 + b * 16);
          }
        } else if constexpr (KG == 128 && PBF) {
#pragma unroll
          for (int i = 0; i < KG / NP; i++) {
            uint2 v = ldcg2((uint2*)P.part + ((size_t)(c * KG + i * NP + p) * 2 + m) * 32 + lane);
            acc[0][0] += lo(v.x); acc[0][1] += hi(v.x); acc[0][2] += lo(v.y); acc[0][3] += hi(v.y);
          }
        } else {
#pragma unroll
          for (int i = 0; i < KG / NP; i++) {
            uint4 v = ldcg4((uint4*)P.part + ((size_t)(c * KG + i * NP + p) * 2 + m) * 32 + lane);
            acc[0][0] += __uint_as_float(v.x); acc[0][1] += __uint_as_float(v.y); acc[0][2] += __uint_as_float(v.z); acc[0][3] += __uint_as_float(v.w);
          }
        }
        if (p) sts4f(SCT(p, m, 0, 1), acc[0]);
        __syncthreads();
        if (p == 0) {
#pragma unroll
          for (int i = 1; i < NP; i++) adds4f(SCT(i, m, 0, 1), acc[0]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) u[0][e] += RES * acc[0][e];
      }
      if (p == 0) {
        emit(u[0], P.bz, P.sqZ);
        if (t < NCHK) {
#pragma unroll
          for (int e = 0; e < 4; e++) P.zout[((size_t)t * B_B + m * 16 + g + 8 * (e >> 1)) * D + 8 * c + 2 * qd + (e & 1)] = u[0][e];
        }
      }
    }
    bar();
    { // 5. k, v
      uint32_t a[16][4]; float acc[2][4]; zero(acc);
      loadA(a, P.bz, 64, p * 16);
      rowr(P.sqZ);
      gemm<2, 16, K8, 0, SK>(acc, a, sWkv, 0, p * 16);
#pragma unroll
      for (int j = 0; j < 2; j++) sts4f(SCT(p, m, j, 2), acc[j]);
      __syncthreads();
      if (p < 2) {
        float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < NP; i++) adds4f(SCT(i, m, p, 2), v);
        float r0 = rs[m * 16 + g], r1 = rs[m * 16 + g + 8];
        bf16* d = P.kv + (((size_t)n * B_B + m * 16 + g) * 2 + p) * D + 8 * c + 2 * qd;
        __stcg((unsigned*)d, pk(r0 * v[0], r0 * v[1]));
        __stcg((unsigned*)(d + 8 * 2 * D), pk(r1 * v[2], r1 * v[3]));
      }
    }
    bar();
    if (*sflag) break;
    }
  }
  if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) for (int i = 0; i < 12; i++) P.prof[blockIdx.x * 12 + i] = prf[i]; }
#undef SCT
}
// ------------------------------------------------------------------ form C
constexpr int C_L = 6, C_D = 640, C_B = 64, C_C = 20, C_RING = 8, C_ST = 5, C_CH = 10240, C_NCH = 28;
constexpr int C_SWU = 128 * C_D * 2, C_SCR = 16384;
constexpr int c_smem = C_SWU + C_SCR + C_ST * C_CH + 256;
struct PC {
  const bf16 *Wo, *Wu, *Wd, *Wkv, *q, *o0; const float* x; const char* S;
  uint32_t *ba, *bu, *bz; char* part; float *sqU, *sqZ; bf16* kv; float* zout; unsigned* ctr; int* err; int T; unsigned* prof;
};
// S: [layer][CTA][28 chunks of 10240 B]: 4 of Wout (one n8 tile x 640), 16 of Wdown (5 n8 tiles x 128), 8 of Wkv (one n8 tile x 640)
__global__ void packC(char* S, const bf16* Wo, const bf16* Wu, const bf16* Wd, const bf16* Wkv) {
  const int D = C_D; int ch = blockIdx.x % C_NCH, c = blockIdx.x / C_NCH % C_C, l = blockIdx.x / C_NCH / C_C; size_t DD = (size_t)D * D;
  char* s = S + (size_t)blockIdx.x * C_CH;
  if (ch < 4) loadW(s, 0, Wo + l * DD, D, 32 * c + 8 * ch, 8, 0, D / 8);
  else if (ch < 20) loadW(s, 0, Wd + l * 4 * DD, 4 * D, 40 * (ch - 4), 40, 128 * c, 16);
  else { int j = ch - 20; loadW(s, 0, Wkv + l * 2 * DD, D, (j < 4 ? 0 : D) + 32 * c + 8 * (j & 3), 8, 0, D / 8); }
}
__device__ __forceinline__ bool mbwait(uint32_t mb, uint32_t ph, int* err, volatile int* sflag) {
  for (unsigned n = 0; n < SPIN_LIMIT * 4; n++) {
    uint32_t ok;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(ok) : "r"(mb), "r"(ph) : "memory");
    if (ok) return true;
    if ((n & 63) == 63 && *sflag) return false;
  }
  *(volatile int*)err = 1; *sflag = 1; return false;
}
template <int PBF, int BK, int SK>
__global__ void __launch_bounds__(256, 1) formC(PC P) {
  constexpr int D = C_D, B = C_B, C = C_C, K8 = D / 8;
  extern __shared__ __align__(128) char sm[];
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, m = w & 3, p = (w >> 2) & 1;
  int layer = blockIdx.x / C, c = blockIdx.x % C, g = lane >> 2, qd = lane & 3;
  const uint32_t sb = s2u(sm), sWu = sb, sc = sb + C_SWU + m * (C_SCR / 4), st = sb + C_SWU + C_SCR, mb = st + C_ST * C_CH;  // full[5], empty[5]
  volatile int* sflag = (volatile int*)(sm + c_smem - 128);
  volatile int* dead = sflag + 1;                          // written by thread 0 inside bar() only, so that all leave together
  if (tid == 0) {
    *sflag = 0; *dead = 0;
    for (int i = 0; i < C_ST; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(mb + 8 * i) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" :: "r"(mb + 8 * (C_ST + i)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  loadW(sm, 0, P.Wu + (size_t)layer * 4 * D * D, D, 128 * c, 128, 0, K8);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const char* src = P.S + (size_t)(layer * C + c) * C_NCH * C_CH;
  // thread 0 issues chunk r into its stage, once all warps have left the stage's previous chunk
  auto issue = [&](int r) {
    int s = r % C_ST;
    if (r >= P.T * C_NCH || (r >= C_ST && !mbwait(mb + 8 * (C_ST + s), ((r / C_ST) - 1) & 1, P.err, sflag))) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(mb + 8 * s), "r"(C_CH) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(st + s * C_CH), "l"(src + (size_t)(r % C_NCH) * C_CH), "r"(C_CH), "r"(mb + 8 * s) : "memory");
  };
  if constexpr (!(SK & (SK_STREAM | SK_WORK))) { if (tid == 0) for (int r = 0; r < C_ST - 1; r++) issue(r); }
  uint32_t* ba = P.ba + (size_t)layer * B * D / 2; uint32_t* bu = P.bu + (size_t)layer * B * D / 2; uint32_t* bz = P.bz + (size_t)layer * B * D / 2;
  float* sqU = P.sqU + layer * B * 32; float* sqZ = P.sqZ + layer * B * 32;
  char* part = P.part + (size_t)layer * C * C * 16 * 512;
  bf16* kv = P.kv + (size_t)layer * 16 * B * 2 * D;
  unsigned* ctr = P.ctr + layer * 32;
  unsigned ep = 0; int ci = 0;
  auto bar0 = [&]() {
    asm volatile("" : "+r"(tid), "+r"(lane), "+r"(w), "+r"(m), "+r"(p), "+r"(c), "+r"(g), "+r"(qd), "+r"(layer));
    nbar(15, 256);
    if constexpr (BK == BAR_L2) {
      ep += C;
      if (tid == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(ctr) : "memory");
        if (*sflag || !spin_until(ctr, ep, P.err)) *sflag = 1;
        *dead = *sflag;
      }
      nbar(15, 256);
    }
  };
  // SK_PROF: thread 0 adds up the cycles of the work before each barrier and of the barrier itself
  volatile unsigned* prf = (volatile unsigned*)(sflag + 4); unsigned last = 0; int bi = 0;
  auto bar = [&]() {
    if constexpr (SK & SK_PROF) {
      unsigned c1 = 0;
      if (threadIdx.x == 0) { c1 = clock(); prf[2 * bi] += c1 - last; }
      bar0();
      if (threadIdx.x == 0) { last = clock(); prf[2 * bi + 1] += last - c1; }
      bi++;
    } else bar0();
  };
  auto acquire = [&](int i) -> uint32_t {
    int s = i % C_ST;
    if constexpr (!(SK & SK_STREAM)) mbwait(mb + 8 * s, (i / C_ST) & 1, P.err, sflag);
    return st + s * C_CH;
  };
  auto release = [&](int i) {
    __syncwarp();
    if constexpr (!(SK & SK_STREAM)) {
      if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(mb + 8 * (C_ST + i % C_ST)) : "memory");
      if (tid == 0) issue(i + C_ST - 1);                   // the stage of chunk i - 1
      __syncwarp();
    }
  };
  auto reduce4 = [&](float (&acc)[4][4]) {
    if (p) {
#pragma unroll
      for (int j = 0; j < 4; j++) sts4f(sc + (j * 32 + lane) * 16, acc[j]);
    }
    nbar(1 + m, 64);
    if (!p) {
#pragma unroll
      for (int j = 0; j < 4; j++) adds4f(sc + (j * 32 + lane) * 16, acc[j]);
    }
  };
  auto emit = [&](const float (&v)[4][4], uint32_t* buf, float* sq) {
    float s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      s0 += v[j][0] * v[j][0] + v[j][1] * v[j][1]; s1 += v[j][2] * v[j][2] + v[j][3] * v[j][3]; int hk = 4 * c + j;
      __stcg((uint2*)(buf + ((m * 40 + (hk >> 1)) * 32 + lane) * 4 + 2 * (hk & 1)), make_uint2(pk(v[j][0], v[j][1]), pk(v[j][2], v[j][3])));
    }
    s0 += __shfl_xor_sync(~0u, s0, 1); s0 += __shfl_xor_sync(~0u, s0, 2);
    s1 += __shfl_xor_sync(~0u, s1, 1); s1 += __shfl_xor_sync(~0u, s1, 2);
    if (qd == 0) { __stcg(sq + (m * 16 + g) * 32 + c, s0); __stcg(sq + (m * 16 + g + 8) * 32 + c, s1); }
  };
  auto rowr = [&](const float* sq, float& r0, float& r1) {
    float s[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* b = sq + (m * 16 + g + 8 * i) * 32 + qd * 8; uint4 x = ldcg4(b), y = ldcg4(b + 4);
      s[i] = __uint_as_float(x.x) + __uint_as_float(x.y) + __uint_as_float(x.z) + __uint_as_float(x.w) + __uint_as_float(y.x) + __uint_as_float(y.y) + __uint_as_float(y.z) + __uint_as_float(y.w);
      s[i] += __shfl_xor_sync(~0u, s[i], 1); s[i] += __shfl_xor_sync(~0u, s[i], 2);
    }
    r0 = rsqrtf(s[0] * (1.f / D) + EPS); r1 = rsqrtf(s[1] * (1.f / D) + EPS);
  };
  auto loadA = [&](uint32_t (&a)[20][4], const uint32_t* buf) {
#pragma unroll
    for (int k = 0; k < 20; k++) set4(a[k], ldcg4(buf + ((m * 40 + p * 20 + k) * 32 + lane) * 4));
  };
  bar();
  for (int t = 0; t < P.T; t++) {
    if constexpr (SK & SK_WORK) {
      for (int i = 0; i < 5; i++) bar();
      if (*dead) break;
      continue;
    } else {
    if constexpr (SK & SK_PROF) { bi = 0; if (t == 0 && threadIdx.x == 0) { for (int i = 0; i < 12; i++) prf[i] = 0; last = clock(); } }
    const int tr = t % C_RING, n = t % 16;
    float u[4][4]; zero(u);
    if (!p) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float* xp = P.x + (((size_t)layer * C_RING + tr) * B + m * 16 + g) * D + 32 * c + 8 * j + 2 * qd; uint2 a = ldcg2(xp), b = ldcg2(xp + 8 * D);
        u[j][0] = __uint_as_float(a.x); u[j][1] = __uint_as_float(a.y); u[j][2] = __uint_as_float(b.x); u[j][3] = __uint_as_float(b.y);
      }
    }
    if constexpr (!(SK & SK_ATT)) {
#pragma unroll
      for (int it = 0; it < 4; it++) {
        int pid = c * 32 + w + 8 * it, row = pid / 10, hd = pid % 10;
        size_t qo = (((size_t)layer * C_RING + tr) * B + row) * D + hd * 64; float o[8];
        attend<32>(o, P.q + qo, P.o0 + qo, kv + (size_t)row * 2 * D + hd * 64, (size_t)B * 2 * D, D, n);
        if (lane < 8) {
          int kk = hd * 8 + lane, kt = kk >> 1, wd = ((row >> 3) & 1) + 2 * (kk & 1);
#pragma unroll
          for (int q = 0; q < 4; q++) __stcg(ba + (((row >> 4) * 40 + kt) * 32 + (row & 7) * 4 + q) * 4 + wd, pk(o[2 * q], o[2 * q + 1]));
        }
      }
    }
    bar();
    {
      uint32_t a[20][4]; float acc[4][4]; zero(acc);
      loadA(a, ba);
#pragma unroll
      for (int j = 0; j < 4; j++, ci++) {
        uint32_t s = acquire(ci);
        gemm<1, 20, K8, 0, SK>(reinterpret_cast<float(&)[1][4]>(acc[j]), a, s, 0, p * 20);
        release(ci);
      }
      reduce4(acc);
      if (!p) {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) u[j][e] += RES * acc[j][e];
        emit(u, bu, sqU);
      }
    }
    bar();
    if constexpr (SK & SK_MLP) {
      for (int j = 0; j < 16; j++, ci++) { acquire(ci); release(ci); }
    } else {
      {
        uint32_t a[20][4]; float acc[16][4], r0, r1; zero(acc);
        loadA(a, bu);
        rowr(sqU, r0, r1);
        gemm<16, 20, K8, 0, SK>(acc, a, sWu, 0, p * 20);
        float own[8][4];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) own[j][e] = p ? acc[8 + j][e] : acc[j][e];
#pragma unroll
        for (int b = 0; b < 8; b += 4) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float snd[4];
#pragma unroll
            for (int e = 0; e < 4; e++) snd[e] = p ? acc[b + j][e] : acc[8 + b + j][e];
            sts4f(sc + ((p * 4 + j) * 32 + lane) * 16, snd);
          }
          nbar(1 + m, 64);
#pragma unroll
          for (int j = 0; j < 4; j++) adds4f(sc + (((p ^ 1) * 4 + j) * 32 + lane) * 16, own[b + j]);
          nbar(1 + m, 64);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          int hk = p * 8 + j;
          sts2(sc + (((hk >> 1) * 32 + lane) * 4 + 2 * (hk & 1)) * 4,
               pk(gelu(r0 * own[j][0]), gelu(r0 * own[j][1])), pk(gelu(r1 * own[j][2]), gelu(r1 * own[j][3])));
        }
        nbar(1 + m, 64);
      }
      uint32_t a[8][4];
#pragma unroll
      for (int k = 0; k < 8; k++) set4(a[k], lds4(sc + (k * 32 + lane) * 16));
#pragma unroll 1
      for (int j = 0; j < 16; j++, ci++) {                 // chunk j belongs to the warps p = j % 2
        uint32_t s = acquire(ci);
        if ((j & 1) == p) {
          float acc[5][4]; zero(acc);
          gemm<5, 8, 16, 0, SK>(acc, a, s, 0, 0);
          release(ci);
#pragma unroll
          for (int i = 0; i < 5; i++) {
            int nt = j * 5 + i; size_t tl = ((size_t)((nt >> 2) * C + c) * 16 + (nt & 3) * 4 + m) * 32 + lane;
            if constexpr (PBF) __stcg((uint2*)part + tl, make_uint2(pk(acc[i][0], acc[i][1]), pk(acc[i][2], acc[i][3])));
            else __stcg((float4*)part + tl, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
          }
        } else release(ci);
      }
    }
    bar();
    {
      if constexpr (!(SK & SK_MLP)) {
        float acc[4][4]; zero(acc);
#pragma unroll
        for (int i = 0; i < C / 2; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            size_t tl = ((size_t)(c * C + i * 2 + p) * 16 + j * 4 + m) * 32 + lane;
            if constexpr (PBF) { uint2 v = ldcg2((uint2*)part + tl); acc[j][0] += lo(v.x); acc[j][1] += hi(v.x); acc[j][2] += lo(v.y); acc[j][3] += hi(v.y); }
            else { uint4 v = ldcg4((uint4*)part + tl); acc[j][0] += __uint_as_float(v.x); acc[j][1] += __uint_as_float(v.y); acc[j][2] += __uint_as_float(v.z); acc[j][3] += __uint_as_float(v.w); }
          }
        reduce4(acc);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) u[j][e] += RES * acc[j][e];
      }
      if (!p) {
        emit(u, bz, sqZ);
        if (t < NCHK) {
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              P.zout[(((size_t)layer * NCHK + t) * B + m * 16 + g + 8 * (e >> 1)) * D + 32 * c + 8 * j + 2 * qd + (e & 1)] = u[j][e];
        }
      }
    }
    bar();
    {
      uint32_t a[20][4]; float acc[8][4], r0, r1; zero(acc);
      loadA(a, bz);
      rowr(sqZ, r0, r1);
#pragma unroll
      for (int j = 0; j < 8; j++, ci++) {
        uint32_t s = acquire(ci);
        gemm<1, 20, K8, 0, SK>(reinterpret_cast<float(&)[1][4]>(acc[j]), a, s, 0, p * 20);
        release(ci);
      }
      if (p) {
#pragma unroll
        for (int j = 0; j < 8; j++) sts4f(sc + (j * 32 + lane) * 16, acc[j]);
      }
      nbar(1 + m, 64);
      if (!p) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          adds4f(sc + (j * 32 + lane) * 16, acc[j]);
          bf16* d = kv + (((size_t)n * B + m * 16 + g) * 2 + (j >> 2)) * D + 32 * c + 8 * (j & 3) + 2 * qd;
          __stcg((unsigned*)d, pk(r0 * acc[j][0], r0 * acc[j][1]));
          __stcg((unsigned*)(d + 8 * 2 * D), pk(r1 * acc[j][2], r1 * acc[j][3]));
        }
      }
    }
    bar();
    if (*dead) break;
    }
  }
  if constexpr (SK & SK_PROF) { if (threadIdx.x == 0) for (int i = 0; i < 12; i++) P.prof[blockIdx.x * 12 + i] = prf[i]; }
}
// ------------------------------------------------------------------ host
__device__ __forceinline__ float rnd(unsigned long long i, unsigned seed) {
  unsigned long long z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull; z = (z ^ (z >> 27)) * 0x94D049BB133111EBull; z ^= z >> 31;
  return (float)(z >> 40) * (2.f / 16777216.f) - 1.f;      // uniform in (-1, 1)
}
__global__ void fillb(bf16* p, size_t n, float s, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = __float2bfloat16(s * rnd(i, seed)); }
__global__ void fillf(float* p, size_t n, float s, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = s * rnd(i, seed); }
static bf16* newb(size_t n, float s, unsigned seed) { bf16* p; CK(cudaMalloc(&p, n * 2)); fillb<<<264, 256>>>(p, n, s, seed); CK(cudaGetLastError()); return p; }
static float* newf(size_t n, float s, unsigned seed) { float* p; CK(cudaMalloc(&p, n * 4)); fillf<<<264, 256>>>(p, n, s, seed); CK(cudaGetLastError()); return p; }
template <class T> static T* newz(size_t n) { T* p; CK(cudaMalloc(&p, n * sizeof(T))); CK(cudaMemset(p, 0, n * sizeof(T))); return p; }
static std::vector<float> getb(const bf16* p, size_t n) {
  std::vector<bf16> h(n); CK(cudaMemcpy(h.data(), p, n * 2, cudaMemcpyDeviceToHost)); std::vector<float> f(n);
  for (size_t i = 0; i < n; i++) f[i] = __bfloat162float(h[i]);
  return f; }
static std::vector<float> getf(const float* p, size_t n) { std::vector<float> f(n); CK(cudaMemcpy(f.data(), p, n * 4, cudaMemcpyDeviceToHost)); return f; }

// plain float computation of NCHK positions of one layer for some rows; z[t][i][D] and x likewise
struct Ref { int D, B, nr; std::vector<int> rows; std::vector<float> z, x; };
static Ref reference(int D, int B, int ring_stride_rows, const bf16* Wo_, const bf16* Wu_, const bf16* Wd_, const bf16* Wkv_,
                     const bf16* q_, const bf16* o_, const float* x_, std::vector<int> rows) {
  size_t DD = (size_t)D * D; int H = D / 64, nr = (int)rows.size();
  auto Wo = getb(Wo_, DD), Wu = getb(Wu_, 4 * DD), Wd = getb(Wd_, 4 * DD), Wkv = getb(Wkv_, 2 * DD);
  size_t ni = (size_t)NCHK * ring_stride_rows * D;
  auto q = getb(q_, ni), o0 = getb(o_, ni); auto x = getf(x_, ni);
  Ref R; R.D = D; R.B = B; R.nr = nr; R.rows = rows; R.z.resize((size_t)NCHK * nr * D); R.x = R.z;
  std::vector<float> a(D), u(D), h(4 * D), z(D), kv;
  for (int ri = 0; ri < nr; ri++) {
    kv.assign((size_t)NCHK * 2 * D, 0.f);
    for (int t = 0; t < NCHK; t++) {
      size_t b = ((size_t)t * ring_stride_rows + rows[ri]) * D;
      for (int hd = 0; hd < H; hd++) {
        float s[NCHK], mx = 0.f, l; for (int j = 0; j < t; j++) { s[j] = 0; for (int d = 0; d < 64; d++) s[j] += q[b + hd * 64 + d] * kv[(size_t)j * 2 * D + hd * 64 + d]; s[j] *= 0.125f; mx = fmaxf(mx, s[j]); }
        l = expf(-mx); for (int d = 0; d < 64; d++) a[hd * 64 + d] = o0[b + hd * 64 + d] * l;
        for (int j = 0; j < t; j++) { float pj = expf(s[j] - mx); l += pj; for (int d = 0; d < 64; d++) a[hd * 64 + d] += pj * kv[(size_t)j * 2 * D + D + hd * 64 + d]; }
        for (int d = 0; d < 64; d++) a[hd * 64 + d] /= l;
      }
      float ss = 0;
      for (int i = 0; i < D; i++) { float y = 0; for (int k = 0; k < D; k++) y += a[k] * Wo[(size_t)i * D + k]; u[i] = x[b + i] + RES * y; ss += u[i] * u[i]; }
      float r = 1.f / sqrtf(ss / D + EPS);
      for (int i = 0; i < 4 * D; i++) { float y = 0; for (int k = 0; k < D; k++) y += u[k] * Wu[(size_t)i * D + k]; y *= r; h[i] = 0.5f * y * (1.f + tanhf(0.7978845608f * (y + 0.044715f * y * y * y))); }
      ss = 0;
      for (int i = 0; i < D; i++) { float y = 0; for (int k = 0; k < 4 * D; k++) y += h[k] * Wd[(size_t)i * 4 * D + k]; z[i] = u[i] + RES * y; ss += z[i] * z[i]; }
      r = 1.f / sqrtf(ss / D + EPS);
      for (int i = 0; i < 2 * D; i++) { float y = 0; for (int k = 0; k < D; k++) y += z[k] * Wkv[(size_t)i * D + k]; kv[(size_t)t * 2 * D + i] = r * y; }
      for (int i = 0; i < D; i++) { R.z[((size_t)t * nr + ri) * D + i] = z[i]; R.x[((size_t)t * nr + ri) * D + i] = x[b + i]; }
    }
  }
  return R;
}
static float refdiff(const Ref& R, const float* zd) {      // zd: [NCHK][B][D] on the device
  auto z = getf(zd, (size_t)NCHK * R.B * R.D); double n = 0, d = 0;
  for (int t = 0; t < NCHK; t++) for (int i = 0; i < R.nr; i++) for (int k = 0; k < R.D; k++) {
    size_t j = ((size_t)t * R.nr + i) * R.D + k; double e = z[((size_t)t * R.B + R.rows[i]) * R.D + k] - R.z[j], c = R.z[j] - R.x[j]; n += e * e; d += c * c; }
  return (float)sqrt(n / (d + 1e-30));
}

static cudaEvent_t e0, e1;
static double t_start;
static double now() { timespec ts; clock_gettime(CLOCK_MONOTONIC, &ts); return ts.tv_sec + 1e-9 * ts.tv_nsec; }
static int device_sms;

template <class PT>
static bool launch(void (*k)(PT), PT P, int grid, int threads, int smem, int cluster, bool coop) {
  cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(grid); cfg.blockDim = dim3(threads); cfg.dynamicSmemBytes = smem;
  cudaLaunchAttribute at[2]; int na = 0;
  if (cluster) { at[na].id = cudaLaunchAttributeClusterDimension; at[na].val.clusterDim.x = cluster; at[na].val.clusterDim.y = 1; at[na].val.clusterDim.z = 1; na++; }
  if (coop) { at[na].id = cudaLaunchAttributeCooperative; at[na].val.cooperative = 1; na++; }
  cfg.attrs = at; cfg.numAttrs = na;
  cudaError_t e = cudaLaunchKernelEx(&cfg, k, P);
  if (e != cudaSuccess) { printf("  launch refused: %s\n", cudaGetErrorString(e)); fflush(stdout); cudaGetLastError(); return false; }
  return true;
}
template <class PT>
static void bench(const char* name, void (*k)(PT), PT P, int grid, int threads, int smem, int cluster, bool coop, unsigned* ctr, size_t nctr, const Ref* R, const float* zd) {
  if (now() - t_start > 75) { printf("%-58s skipped, 75 s are over\n", name); fflush(stdout); return; }
  CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  if (cluster > 8) CK(cudaFuncSetAttribute(k, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaFuncAttributes fa; CK(cudaFuncGetAttributes(&fa, k));
  std::vector<float> ms;
  if (R) CK(cudaMemset((void*)zd, 0, (size_t)NCHK * R->B * R->D * 4));
  for (int i = 0; i < 6; i++) {
    CK(cudaMemset(ctr, 0, nctr * 4)); CK(cudaMemset(P.err, 0, 4));
    CK(cudaEventRecord(e0));
    if (!launch(k, P, grid, threads, smem, cluster, coop)) return;
    CK(cudaEventRecord(e1)); CK(cudaEventSynchronize(e1));
    float f; CK(cudaEventElapsedTime(&f, e0, e1)); if (i) ms.push_back(f);
    int err; CK(cudaMemcpy(&err, P.err, 4, cudaMemcpyDeviceToHost));
    if (err) { printf("%-58s ERROR FLAG: a spin loop ran over its limit (%.2f ms)\n", name, f); fflush(stdout); return; }
  }
  std::sort(ms.begin(), ms.end());
  char chk[64] = "";
  if (R) { float d = refdiff(*R, zd); snprintf(chk, 64, "  rel. diff %.4f %s", d, d < 0.03f ? "ok" : "BAD"); }
  printf("%-58s %8.3f us/pos %8.3f ms (min %.3f max %.3f) regs %3d local %d%s\n", name, ms[2] * 1e3 / P.T, ms[2], ms[0], ms[4], fa.numRegs, (int)fa.localSizeBytes, chk);
  fflush(stdout);
}

// mean cycles a position of CTA 0: work | barrier, for each of the nb barriers
static void showprof(const unsigned* d, int nb, int T, const char* names) {
  unsigned h[12]; CK(cudaMemcpy(h, d, 48, cudaMemcpyDeviceToHost)); double tot = 0, wk = 0, wt = 0;
  printf("   cycles a position, CTA 0 thread 0 (work|wait) [%s]:", names);
  for (int i = 0; i < nb; i++) { printf("  %.0f|%.0f", (double)h[2 * i] / T, (double)h[2 * i + 1] / T); wk += h[2 * i]; wt += h[2 * i + 1]; }
  tot = wk + wt; printf("   sum %.0f = work %.0f + wait %.0f\n", tot / T, wk / T, wt / T); fflush(stdout);
}
static char GRP = 0;   // group of variants of this process
static PA pa; static size_t nctrA; static Ref refA;
template <int NW, int WG, int XCH, int PBF, int BK, int SK>
static void runA(const char* what) {
  if (GRP != (BK == BAR_L2 ? '5' : WG ? (XCH ? '4' : '3') : (XCH ? '2' : '1'))) return;
  char nm[128];
  snprintf(nm, 128, "A %dthr %s %s part-%s %s: %s", NW * 32, WG ? "wgmma" : "mma", XCH ? "dsmem" : "L2", PBF ? "bf16" : "f32", BK == BAR_CLUSTER ? "cl-bar" : BK == BAR_L2 ? "L2-bar" : BK == BAR_CL1 ? "cl-bar-1fence" : BK == BAR_CLRLX ? "cl-bar-nofence" : "no-bar", what);
  bench<PA>(nm, formA<NW, WG, XCH, PBF, BK, SK>, pa, A_L * A_C, NW * 32, a_smem<NW, XCH>(), BK == BAR_L2 ? 0 : A_C, BK == BAR_L2, pa.ctr, nctrA,
            (SK == 0 && BK != BAR_NONE) ? &refA : nullptr, pa.zout + (size_t)(A_L - 1) * NCHK * A_B * A_D);
  if (SK & SK_PROF) showprof(pa.prof, 5, pa.T, "attention, Wout+u, MLP, sum+z, kv");
}
static PB pb; static size_t nctrB; static Ref refB;
template <int KG, int PBF, int BK, int SK>
static void runB(const char* what) {
  char nm[128];
  snprintf(nm, 128, "B 256thr mma L2 KG=%d part-%s %s: %s", KG, PBF ? "bf16" : "f32", BK == BAR_L2 ? "flat-bar" : BK == BAR_HIER ? "hier-bar" : "no-bar", what);
  bench<PB>(nm, formB<KG, PBF, BK, SK>, pb, B_C, 256, b_smem, 0, true, pb.ctr, nctrB, (SK == 0 && BK != BAR_NONE) ? &refB : nullptr, pb.zout);
  if (SK & SK_PROF) showprof(pb.prof, KG == 8 ? 6 : 5, pb.T, KG == 128 ? "attention, Wout+u, MLP, sum+z, kv" : KG == 8 ? "attention, Wout+u, up, down, sum+z, kv" : "attention, Wout+u, up, down+z, kv");
}

static PC pc; static size_t nctrC; static Ref refC;
template <int PBF, int BK, int SK>
static void runC(const char* what) {
  char nm[128];
  snprintf(nm, 128, "C 256thr mma L2 part-%s %s: %s", PBF ? "bf16" : "f32", BK == BAR_L2 ? "L2-bar" : "no-bar", what);
  bench<PC>(nm, formC<PBF, BK, SK>, pc, C_L * C_C, 256, c_smem, 0, true, pc.ctr, nctrC, (SK == 0 && BK != BAR_NONE) ? &refC : nullptr, pc.zout + (size_t)(C_L - 1) * NCHK * C_B * C_D);
  if (SK & SK_PROF) showprof(pc.prof, 5, pc.T, "attention, Wout+u, MLP, sum+z, kv");
}

static void group(char grp) {
  alarm((unsigned)std::max(1.0, std::min(40.0, 93.0 - (now() - t_start)))); GRP = grp;
  int dev = 0; cudaDeviceProp pr; CK(cudaSetDevice(dev)); CK(cudaGetDeviceProperties(&pr, dev)); device_sms = pr.multiProcessorCount;
  int clk = 0; CK(cudaDeviceGetAttribute(&clk, cudaDevAttrClockRate, dev));
  if (grp == *"1" || grp == *"B") printf("device %s, %d SMs, %.0f MHz at most, L2 %d MB, smem/block optin %zu\n", pr.name, device_sms, clk * 1e-3, pr.l2CacheSize >> 20, pr.sharedMemPerBlockOptin); fflush(stdout);
  CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
  bool doA = grp >= '1' && grp <= '5', doB = grp == 'B', doC = grp == 'C';
  if (doA) {
    const size_t DD = (size_t)A_D * A_D, L = A_L; float sk = 1.732f / sqrtf((float)A_D), sh = 1.732f / sqrtf(4.f * A_D);
    const size_t NI = L * A_RING * A_B * A_D;
    pa.Wo = newb(L * DD, sk, 1); pa.Wu = newb(L * 4 * DD, sk, 2); pa.Wd = newb(L * 4 * DD, sh, 3); pa.Wkv = newb(L * 2 * DD, sk, 4);
    pa.q = newb(NI, 1.7f, 5); pa.o0 = newb(NI, 1.f, 6); pa.x = newf(NI, 1.f, 7);
    pa.ba = newz<uint32_t>(L * A_B * A_D / 2); pa.bu = newz<uint32_t>(L * A_B * A_D / 2); pa.bz = newz<uint32_t>(L * A_B * A_D / 2);
    pa.part = newz<char>(L * A_C * A_C * 12 * 512); pa.sqU = newz<float>(L * A_B * A_C); pa.sqZ = newz<float>(L * A_B * A_C);
    pa.kv = newz<bf16>(L * 16 * A_B * 2 * A_D); pa.zout = newz<float>(L * NCHK * A_B * A_D);
    nctrA = L * 32; pa.ctr = newz<unsigned>(nctrA); pa.err = newz<int>(1); pa.prof = newz<unsigned>(12 * 132); pa.T = 672;
    CK(cudaDeviceSynchronize());
    const int rl = A_L - 1; size_t io = (size_t)rl * A_RING * A_B * A_D; std::vector<int> rows; for (int i = 0; i < 8; i++) rows.push_back(i * 9);
    refA = reference(A_D, A_B, A_B, pa.Wo + rl * DD, pa.Wu + rl * 4 * DD, pa.Wd + rl * 4 * DD, pa.Wkv + rl * 2 * DD, pa.q + io, pa.o0 + io, pa.x + io, rows);
    { auto k = formA<8, 0, 0, 0, BAR_CLUSTER, 0>; int nc = 0; const int s = a_smem<8, 0>();
      CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, s)); CK(cudaFuncSetAttribute(k, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      cudaLaunchConfig_t cfg = {}; cfg.gridDim = dim3(A_L * A_C); cfg.blockDim = dim3(256); cfg.dynamicSmemBytes = s;
      cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim.x = A_C; at[0].val.clusterDim.y = 1; at[0].val.clusterDim.z = 1; cfg.attrs = at; cfg.numAttrs = 1;
      cudaError_t e = cudaOccupancyMaxActiveClusters(&nc, k, &cfg);
      printf("form A: clusters of 16 CTAs with %d B shared memory: %d fit at once (6 wanted)%s [%s]\n", s, nc, nc < 6 ? "  ** TIMES OF THE CLUSTER VARIANTS HOLD SEVERAL WAVES **" : "", cudaGetErrorString(e)); fflush(stdout); cudaGetLastError(); }
    printf("form A: L=6 D=384 B=64, 16 CTAs a layer, T=%d; host reference and set-up took %.1f s\n", pa.T, now() - t_start); fflush(stdout);
    // whole step
    runA<8, 0, 0, 0, BAR_CLUSTER, 0>("whole");
    runA<8, 0, 0, 1, BAR_CLUSTER, 0>("whole");
    runA<8, 0, 1, 0, BAR_CLUSTER, 0>("whole");
    runA<8, 0, 1, 1, BAR_CLUSTER, 0>("whole");
    runA<16, 0, 0, 0, BAR_CLUSTER, 0>("whole");
    runA<16, 0, 0, 1, BAR_CLUSTER, 0>("whole");
    runA<16, 0, 1, 1, BAR_CLUSTER, 0>("whole");
    runA<8, 1, 0, 0, BAR_CLUSTER, 0>("whole");
    runA<8, 1, 0, 1, BAR_CLUSTER, 0>("whole");
    runA<8, 1, 1, 1, BAR_CLUSTER, 0>("whole");
    runA<16, 1, 0, 1, BAR_CLUSTER, 0>("whole");
    runA<16, 1, 1, 1, BAR_CLUSTER, 0>("whole");
    runA<8, 0, 0, 1, BAR_L2, 0>("whole");
    runA<8, 1, 0, 1, BAR_L2, 0>("whole");
    runA<16, 1, 0, 1, BAR_L2, 0>("whole");
    runA<8, 0, 0, 1, BAR_CL1, 0>("whole");
    runA<8, 1, 0, 1, BAR_CL1, 0>("whole");
    runA<8, 1, 1, 1, BAR_CL1, 0>("whole");
    runA<16, 1, 0, 1, BAR_CL1, 0>("whole");
    runA<8, 1, 0, 1, BAR_CLRLX, 0>("whole (order of memory not kept)");
    runA<8, 1, 1, 1, BAR_CLRLX, 0>("whole (order of memory not kept)");
    runA<8, 0, 0, 1, BAR_CLUSTER, SK_PROF>("whole, profiled");
    runA<8, 0, 1, 1, BAR_CLUSTER, SK_PROF>("whole, profiled");
    runA<8, 1, 0, 1, BAR_CLUSTER, SK_PROF>("whole, profiled");
    runA<8, 1, 1, 1, BAR_CLUSTER, SK_PROF>("whole, profiled");
    runA<8, 1, 1, 1, BAR_CL1, SK_PROF>("whole, profiled");
    runA<8, 1, 0, 1, BAR_L2, SK_PROF>("whole, profiled");
    // one thing left out
    runA<8, 0, 0, 0, BAR_CL1, SK_WORK>("barriers only");
    runA<8, 0, 0, 0, BAR_CLRLX, SK_WORK>("barriers only");
    runA<8, 0, 0, 0, BAR_CLUSTER, SK_WORK>("barriers only");
    runA<16, 0, 0, 0, BAR_CLUSTER, SK_WORK>("barriers only");
    runA<8, 0, 0, 0, BAR_L2, SK_WORK>("barriers only");
    runA<8, 0, 0, 1, BAR_NONE, 0>("without barriers");
    runA<8, 0, 0, 1, BAR_CLUSTER, SK_ATT>("without attention");
    runA<8, 0, 0, 1, BAR_CLUSTER, SK_MLP>("without MLP");
    runA<8, 0, 0, 1, BAR_CLUSTER, SK_MMA>("without mma");
    runA<8, 0, 1, 1, BAR_NONE, 0>("without barriers");
    runA<8, 0, 1, 1, BAR_CLUSTER, SK_MMA>("without mma");
    runA<8, 1, 0, 1, BAR_NONE, 0>("without barriers");
    runA<8, 1, 0, 1, BAR_CLUSTER, SK_ATT>("without attention");
    runA<8, 1, 0, 1, BAR_CLUSTER, SK_MLP>("without MLP");
    runA<8, 1, 0, 1, BAR_CLUSTER, SK_MMA>("without mma");
    runA<8, 1, 1, 1, BAR_NONE, 0>("without barriers");
    runA<8, 1, 1, 1, BAR_CLUSTER, SK_ATT>("without attention");
    runA<8, 1, 1, 1, BAR_CLUSTER, SK_MLP>("without MLP");
    runA<8, 1, 1, 1, BAR_CLUSTER, SK_MMA>("without mma");
    runA<16, 0, 0, 1, BAR_NONE, 0>("without barriers");
    runA<16, 0, 0, 1, BAR_CLUSTER, SK_ATT>("without attention");
    runA<16, 0, 0, 1, BAR_CLUSTER, SK_MLP>("without MLP");
    runA<16, 0, 0, 1, BAR_CLUSTER, SK_MMA>("without mma");
  }
  if (doB) {
    const size_t DD = (size_t)B_D * B_D; float sk = 1.732f / sqrtf((float)B_D), sh = 1.732f / sqrtf(4.f * B_D); const size_t NI = (size_t)B_RING * B_B * B_D;
    pb.Wo = newb(DD, sk, 11); pb.Wu = newb(4 * DD, sk, 12); pb.Wd = newb(4 * DD, sh, 13); pb.Wkv = newb(2 * DD, sk, 14);
    pb.q = newb(NI, 1.7f, 15); pb.o0 = newb(NI, 1.f, 16); pb.x = newf(NI, 1.f, 17);
    pb.ba = newz<uint32_t>(B_B * B_D / 2); pb.bu = newz<uint32_t>(B_B * B_D / 2); pb.bz = newz<uint32_t>(B_B * B_D / 2); pb.bh = newz<uint32_t>(B_B * B_D * 2);
    pb.part = newz<char>((size_t)B_C * B_C * 1024); pb.sqU = newz<float>(B_B * B_C); pb.sqZ = newz<float>(B_B * B_C);
    pb.kv = newz<bf16>((size_t)16 * B_B * 2 * B_D); pb.zout = newz<float>((size_t)NCHK * B_B * B_D);
    nctrB = 32 * 16; pb.ctr = newz<unsigned>(nctrB); pb.err = newz<int>(1); pb.prof = newz<unsigned>(12 * 132); pb.T = 512;
    CK(cudaDeviceSynchronize()); double t0 = now();
    refB = reference(B_D, B_B, B_B, pb.Wo, pb.Wu, pb.Wd, pb.Wkv, pb.q, pb.o0, pb.x, {0, 9, 22, 31});
    printf("form B: D=1024 B=32, 128 CTAs, T=%d, %d B shared memory; host reference took %.1f s\n", pb.T, b_smem, now() - t0); fflush(stdout);
    runB<128, 0, BAR_L2, 0>("whole");
    runB<128, 1, BAR_L2, 0>("whole");
    runB<8, 0, BAR_L2, 0>("whole");
    runB<1, 0, BAR_L2, 0>("whole");
    runB<128, 1, BAR_HIER, 0>("whole");
    runB<8, 0, BAR_HIER, 0>("whole");
    runB<128, 1, BAR_L2, SK_PROF>("whole, profiled");
    runB<8, 0, BAR_L2, SK_PROF>("whole, profiled");
    runB<1, 0, BAR_L2, SK_PROF>("whole, profiled");
    runB<8, 0, BAR_L2, SK_WORK>("barriers only (6)");
    runB<8, 0, BAR_HIER, SK_WORK>("barriers only (6)");
    runB<128, 0, BAR_L2, SK_WORK>("barriers only (5)");
    runB<8, 0, BAR_NONE, 0>("without barriers");
    runB<8, 0, BAR_L2, SK_ATT>("without attention");
    runB<8, 0, BAR_L2, SK_MLP>("without MLP");
    runB<8, 0, BAR_L2, SK_MMA>("without mma");
    runB<128, 1, BAR_NONE, 0>("without barriers");
    runB<128, 1, BAR_L2, SK_ATT>("without attention");
    runB<128, 1, BAR_L2, SK_MLP>("without MLP");
    runB<128, 1, BAR_L2, SK_MMA>("without mma");
    runB<1, 0, BAR_NONE, 0>("without barriers");
  }
  if (doC) {
    const size_t DD = (size_t)C_D * C_D, L = C_L; float sk = 1.732f / sqrtf((float)C_D), sh = 1.732f / sqrtf(4.f * C_D); const size_t NI = L * C_RING * C_B * C_D;
    pc.Wo = newb(L * DD, sk, 21); pc.Wu = newb(L * 4 * DD, sk, 22); pc.Wd = newb(L * 4 * DD, sh, 23); pc.Wkv = newb(L * 2 * DD, sk, 24);
    pc.q = newb(NI, 1.7f, 25); pc.o0 = newb(NI, 1.f, 26); pc.x = newf(NI, 1.f, 27);
    pc.ba = newz<uint32_t>(L * C_B * C_D / 2); pc.bu = newz<uint32_t>(L * C_B * C_D / 2); pc.bz = newz<uint32_t>(L * C_B * C_D / 2);
    pc.part = newz<char>(L * C_C * C_C * 16 * 512); pc.sqU = newz<float>(L * C_B * 32); pc.sqZ = newz<float>(L * C_B * 32);
    pc.kv = newz<bf16>(L * 16 * C_B * 2 * C_D); pc.zout = newz<float>(L * NCHK * C_B * C_D);
    char* S = newz<char>(L * C_C * C_NCH * C_CH); packC<<<C_L * C_C * C_NCH, 128>>>(S, pc.Wo, pc.Wu, pc.Wd, pc.Wkv); CK(cudaGetLastError()); pc.S = S;
    nctrC = L * 32; pc.ctr = newz<unsigned>(nctrC); pc.err = newz<int>(1); pc.prof = newz<unsigned>(12 * 132); pc.T = 672;
    CK(cudaDeviceSynchronize()); double t0 = now();
    const int rl = C_L - 1; size_t io = (size_t)rl * C_RING * C_B * C_D;
    refC = reference(C_D, C_B, C_B, pc.Wo + rl * DD, pc.Wu + rl * 4 * DD, pc.Wd + rl * 4 * DD, pc.Wkv + rl * 2 * DD, pc.q + io, pc.o0 + io, pc.x + io, {0, 9, 27, 36, 54, 63});
    printf("form C: L=6 D=640 B=64, 20 CTAs a layer, T=%d, %d B shared memory; host reference took %.1f s\n", pc.T, c_smem, now() - t0); fflush(stdout);
    runC<0, BAR_L2, 0>("whole");
    runC<1, BAR_L2, 0>("whole");
    runC<1, BAR_L2, SK_PROF>("whole, profiled");
    runC<1, BAR_L2, SK_WORK>("barriers only");
    runC<1, BAR_NONE, 0>("without barriers");
    runC<1, BAR_L2, SK_ATT>("without attention");
    runC<1, BAR_L2, SK_MLP>("without MLP (its chunks still come)");
    runC<1, BAR_L2, SK_MMA>("without mma");
    runC<1, BAR_L2, SK_STREAM>("without streaming of weights");
    runC<1, BAR_NONE, SK_MMA>("without barriers and mma");
  }
}

// each group in a process of its own: a CUDA error or a time-out in one does not take the others along
int main(int argc, char** argv) {
  alarm(95); t_start = now();
  const char* gs = argc > 1 ? argv[1] : "12345BC";
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
