// What runs the threads of a kernel; see gpu.h.

#include "gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>
#include <sys/mman.h>

namespace gpu {
namespace {

struct Gate { int arrived = 0; std::vector<int> waiting; };  // a barrier
struct Warp { Gate gate; Slots slots[2]; float* sums[32]; };
struct Program { Gate gate; char* shared; std::vector<Warp> warps; };
struct Fiber : Thread {
  void* stack;
  Program* program;
  Warp* warp;
  int number, phase;
  std::vector<std::pair<uint4*, uint4>> copies;  // under way
};

constexpr size_t STACK = (16 << 10) + 192;  // neighbours begin in different lines of the processor's cache
std::vector<Fiber> fibers;
std::vector<Program> programs;
std::deque<int> ready;
std::vector<std::vector<int>> of_warps;  // ready fibers by the rank of their warp, for order 3
size_t first_rank;                       // none of a warp before it is ready
std::vector<int> ranks;
Gate cluster;
int phase;  // barriers of the cluster that are complete
void* scheduler;
void (*body)();
int order, left, threads_of_program;
uint64_t seed;
std::map<const char*, const char*> ranges;  // where one starts, and ends

}  // namespace

Thread* self;
Index grid;

extern "C" void gpu_switch(void** from, void* to);
asm(R"(
.text
.globl gpu_switch
.hidden gpu_switch
gpu_switch:
  pushq %rbx; pushq %rbp; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbp; popq %rbx
  ret
)");

void fail(const char* text) { fprintf(stderr, "emulator: %s\n", text); abort(); }
void check(const void* p, size_t bytes) {
  if ((uintptr_t)p % bytes) fail("address is not aligned");
  auto range = ranges.upper_bound((const char*)p);  // the first that starts later
  if (range == ranges.begin() || (const char*)p + bytes > (--range)->second)
    fail("access outside of global memory");
}

namespace {

Fiber& current() { return *static_cast<Fiber*>(self); }
int random_below(int n) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (seed >> 33) % n;
}
void make_ready(int fiber) {
  if (order != 3) return ready.push_back(fiber);
  const size_t rank = ranks[fiber / 32];
  of_warps[rank].push_back(fiber);
  if (rank < first_rank) first_rank = rank;
}
void release(Gate& gate) {
  for (int fiber : gate.waiting) make_ready(fiber);
  gate.waiting.clear();
  gate.arrived = 0;
}
int next() {  // -1: none is ready
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
void pause() {  // until this fiber is the next one
  const int fiber = next();
  if (fiber < 0) fail("all threads wait");
  Fiber& from = current();
  self = &fibers[fiber];
  if (self != &from) gpu_switch(&from.stack, current().stack);
}
void pass(Gate& gate, int count) {
  if (++gate.arrived == count) return release(gate);
  gate.waiting.push_back(current().number);
  pause();
}
void run_fiber() {
  body();
  if (--left) pause();
  gpu_switch(&current().stack, scheduler);
}

// The sums of N products of one block of rows with N blocks of columns, wherever the lanes have them.
template <int N>
void multiply(const Slots& slots, float* const* sums) {
  using Row = float __attribute__((vector_size(32)));  // 8 columns
  auto number = [](unsigned v, int e) { return __uint_as_float(e ? v & 0xffff0000u : v << 16); };
  static float a[16][16];  // too large for the stack of a fiber
  static Row b[16][N], c[16][N];
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, j = lane % 4;
    for (int half = 0; half < 2; half++)
      for (int e = 0; e < 2; e++) {
        const int k = 8 * half + 2 * j + e;
        for (int low = 0; low < 2; low++) a[g + 8 * low][k] = number(slots[lane][2 * half + low], e);
        for (int i = 0; i < N; i++) b[k][i][g] = number(slots[lane][4 + 2 * i + half], e);
      }
    for (int i = 0; i < N; i++)  // row g or g + 8, column 2 j or 2 j + 1
      for (int e = 0; e < 4; e++) c[g + 8 * (e / 2)][i][2 * j + e % 2] = sums[lane][4 * i + e];
  }
  for (int row = 0; row < 16; row++)
    for (int i = 0; i < N; i++) {
      Row sum = c[row][i];
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][i];
      c[row][i] = sum;
    }
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < N; i++)
      for (int e = 0; e < 4; e++) sums[lane][4 * i + e] = c[lane / 4 + 8 * (e / 2)][i][2 * (lane % 4) + e % 2];
}

}  // namespace

void pass_warp() { pass(current().warp->gate, 32); }
void pass_program() { pass(current().program->gate, threads_of_program); }
void arrive() {
  pass_program();
  current().phase = phase + 1;
  if (++cluster.arrived == (int)fibers.size()) phase++, release(cluster);
}
void wait() {
  exchanged();
  if (phase >= current().phase) return;
  cluster.waiting.push_back(current().number);
  pause();
}

void products(int tiles, float* sum) {
  Warp& warp = *current().warp;
  const Slots& slots = warp.slots[self->parity];
  warp.sums[self->lane] = sum;
  self->parity ^= 1;
  if (warp.gate.arrived == 31) {  // the lane that comes last computes the sums of all
    if (tiles == 1) multiply<1>(slots, warp.sums);
    else if (tiles == 3) multiply<3>(slots, warp.sums);
    else if (tiles == 4) multiply<4>(slots, warp.sums);
    else if (tiles == 6) multiply<6>(slots, warp.sums);
    else if (tiles == 8) multiply<8>(slots, warp.sums);
    else fail("a wgmma of another width");
  }
  pass(warp.gate, 32);
}

void copy(uint4* to, uint4 y) { current().copies.push_back({to, y}); }
void copies_end() {
  for (auto& [to, y] : current().copies) *to = y;
  current().copies.clear();
}

void run(void (*body)(), int programs, int threads, int clusters, int layers, int shared_bytes, int order, uint64_t seed,
         int count, const void* const* starts, const size_t* sizes) {
  gpu::body = body, gpu::order = order, gpu::seed = seed, threads_of_program = threads;
  ranges.clear();
  for (int i = 0; i < count; i++) ranges[(const char*)starts[i]] = (const char*)starts[i] + sizes[i];
  grid = {unsigned(programs), unsigned(clusters), unsigned(layers)};
  const int all = programs * threads, warps = all / 32;

  auto memory = [](size_t bytes) {
    return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  char* stacks = memory(STACK * all);
  madvise(stacks, STACK * all, MADV_HUGEPAGE);
  constexpr size_t GUARD = 64 << 20;  // no access before and after a program's shared memory
  const size_t pages = (shared_bytes + 4095) / 4096 * 4096;
  std::vector<char*> shared(programs);
  for (char*& y : shared) {
    y = memory(2 * GUARD + pages);
    mprotect(y, GUARD, PROT_NONE), mprotect(y + GUARD + pages, GUARD, PROT_NONE);
  }

  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++) {
      fibers.assign(all, {});
      gpu::programs.assign(programs, {});
      ready.clear();
      of_warps.assign(warps, {});
      first_rank = 0;
      ranks.resize(warps);
      for (int i = 0; i < warps; i++) {  // a random permutation
        const int other = random_below(i + 1);
        ranks[i] = ranks[other], ranks[other] = i;
      }
      cluster = {};
      phase = 0;
      left = all;
      for (int c = 0; c < programs; c++) {
        Program& program = gpu::programs[c];
        program.shared = shared[c] + GUARD + pages - shared_bytes;
        memset(program.shared, 0xff, shared_bytes);
        program.warps.assign(threads / 32, {});
      }
      for (int i = 0; i < all; i++) {
        const int c = i / threads, t = i % threads;
        Fiber& fiber = fibers[i];
        fiber.program = &gpu::programs[c], fiber.warp = &fiber.program->warps[t / 32], fiber.number = i;
        fiber.thread = {unsigned(t), 0, 0}, fiber.block = {unsigned(c), y, z}, fiber.lane = t % 32;
        fiber.shared = fiber.program->shared, fiber.slots = fiber.warp->slots;
        void** top = (void**)(stacks + STACK * (i + 1)) - 2;  // as after a call
        *top = (void*)run_fiber;
        fiber.stack = top - 6;
        make_ready(i);
      }
      self = &fibers[next()];
      gpu_switch(&scheduler, current().stack);
    }
  for (char* y : shared) munmap(y, 2 * GUARD + pages);
  munmap(stacks, STACK * all);
}

}  // namespace gpu
