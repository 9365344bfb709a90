/* Vectors of the processor that the code is compiled for. Compile with -DDOUBLE for float64 in place of float32. */

#ifdef DOUBLE
#define REAL double
#else
#define REAL float
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

#define LANES ((int64_t)(BYTES / sizeof(REAL)))

typedef REAL vector __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

static vector load(const REAL *y) { return *(const vector *)y; }
static void store(REAL *y, vector value) { *(vector *)y = value; }

static REAL sum_of(vector y) {
    for (int64_t n = LANES / 2; n > 0; n /= 2)
        for (int64_t i = 0; i < n; i++) y[i] += y[i + n];
    return y[0];
}

static REAL dot(const REAL *a, const REAL *b, int64_t count) {
    vector sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(a + i) * load(b + i);
    REAL sum = sum_of(sums);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* Numbers too small for a full mantissa, which slow a processor down tenfold, are zeros from now on in this thread;
   returns what `restore` takes to count them again. */
static unsigned flush_subnormals(void) {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static void restore(unsigned before) {
#ifdef __SSE__
    _mm_setcsr(before);
#endif
}
