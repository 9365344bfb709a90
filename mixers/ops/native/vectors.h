/* Vectors of the processor that the code is compiled for. Compile with -DDOUBLE for float64 in place of float32. */

#ifdef DOUBLE
#define REAL double
#else
#define REAL float
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

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
