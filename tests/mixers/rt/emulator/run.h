// After a kernel: run it. KERNEL is its name.

inline void (*gpu_body)();
inline Arguments gpu_arguments;

extern "C" void gpu_fiber() {
  gpu_body();
  if (--gpu::left) gpu::pause();
  gpu::gpu_switch(&gpu::self->stack, gpu::scheduler);
}

extern "C" void run(const Arguments* arguments, int clusters, int layers, int shared_bytes, int order, uint64_t seed,
                    int count, const void* const* starts, const size_t* sizes) {
  using namespace gpu;
  gpu_arguments = *arguments;
  gpu_body = [] { KERNEL(gpu_arguments); };
  gpu::order = order, gpu::seed = seed, threads_of_program = THREADS;
  ranges.clear();
  for (int i = 0; i < count; i++) ranges[(const char*)starts[i]] = (const char*)starts[i] + sizes[i];
  grid = {unsigned(C), unsigned(clusters), unsigned(layers)};

  auto memory = [](size_t bytes) {
    return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  char* stacks = memory(STACK * C * THREADS);
  madvise(stacks, STACK * C * THREADS, MADV_HUGEPAGE);
  constexpr size_t GUARD = 64 << 20;  // no access before and after a program's shared memory
  const size_t pages = (shared_bytes + 4095) / 4096 * 4096;
  std::vector<char*> shared(C);
  for (char*& y : shared) {
    y = memory(2 * GUARD + pages);
    mprotect(y, GUARD, PROT_NONE), mprotect(y + GUARD + pages, GUARD, PROT_NONE);
  }

  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++) {
      fibers.assign(C * THREADS, {});
      programs.assign(C, {});
      ready.clear();
      of_warps.assign(C * WARPS, {});
      first_rank = 0;
      ranks.resize(C * WARPS);
      for (int i = 0; i < C * WARPS; i++) {  // a random permutation
        const int other = random_below(i + 1);
        ranks[i] = ranks[other], ranks[other] = i;
      }
      cluster = {};
      phase = 0;
      left = C * THREADS;
      for (int c = 0; c < C; c++) {
        programs[c].shared = shared[c] + GUARD + pages - shared_bytes;
        memset(programs[c].shared, 0xff, shared_bytes);
        programs[c].warps.assign(WARPS, {});
      }
      for (int i = 0; i < C * THREADS; i++) {
        const int c = i / THREADS, t = i % THREADS;
        Fiber& fiber = fibers[i];
        fiber.thread = {unsigned(t), 0, 0}, fiber.block = {unsigned(c), y, z};
        fiber.program = &programs[c], fiber.warp = &programs[c].warps[t / 32], fiber.lane = t % 32, fiber.number = i;
        // The stack is as after a call. Stacks begin in different lines of the processor's cache.
        void** top = (void**)(stacks + STACK * (i + 1) - i % 32 * 192) - 2;
        *top = (void*)gpu_fiber;
        fiber.stack = top - 6;
        make_ready(i);
      }
      self = &fibers[next()];
      gpu_switch(&scheduler, self->stack);
    }
  for (char* y : shared) munmap(y, 2 * GUARD + pages);
  munmap(stacks, STACK * C * THREADS);
}
