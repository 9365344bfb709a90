/* RMS norm of rows and its gradient, for CPUs: `rms_norm` in mixers/ops/norm.py.

   R runs, N rows of a run, D channels of a row, P parts of a run's rows. A call computes one part of one run. Parts are
   independent: any number of threads may work on them, and the results are bitwise the same.

   Compile with -DDOUBLE for float64 in place of float32. */

#include "vectors.h"

/* Sizes and tensors of a call. The names and their order are those of `_Call` in norm.py. */
struct call {
    int64_t N, D, P;
    double eps;
    const REAL *x;    /* (R, N, D) rows */
    const REAL *gain; /* (R, D) */
    REAL *scale;      /* (R, N) inverse root mean squares, kept by the forward pass for the backward pass */
    REAL *y;          /* (R, N, D) outputs; forward pass */
    const REAL *dy;   /* (R, N, D) gradients of the outputs; backward pass, as all below */
    REAL *dx;         /* (R, N, D) gradients of the rows */
    REAL *dgain;      /* (R, P, D) gradients of the gains, from each part */
};

/* y = gain x scale for the rows of part `part` of run `run`. */
void forward(const struct call *s, int64_t run, int64_t part) {
    int64_t N = s->N, D = s->D;
    const REAL *restrict gain = s->gain + run * D;

    for (int64_t row = run * N + N * part / s->P, end = run * N + N * (part + 1) / s->P; row < end; row++) {
        const REAL *restrict x = s->x + row * D;
        REAL *restrict y = s->y + row * D;

        REAL scale = 1 / (REAL)sqrt(dot(x, x, D) / D + s->eps);
        for (int64_t d = 0; d < D; d++) y[d] = scale * x[d] * gain[d];
        s->scale[row] = scale;
    }
}

/* Gradients of the rows of part `part` of run `run`, and of the gain. With n = x scale, for each row:

   1. dn = gain dy, and the mean of n dn over the channels.
   2. dgain += n dy.
   3. dx = scale (dn - n mean). */
void backward(const struct call *s, int64_t run, int64_t part) {
    int64_t N = s->N, D = s->D;
    const REAL *restrict gain = s->gain + run * D;
    REAL *restrict dgain = s->dgain + (run * s->P + part) * D;
    memset(dgain, 0, D * sizeof(REAL));

    for (int64_t row = run * N + N * part / s->P, end = run * N + N * (part + 1) / s->P; row < end; row++) {
        const REAL *restrict x = s->x + row * D, *restrict dy = s->dy + row * D;
        REAL *restrict dx = s->dx + row * D, scale = s->scale[row];

        for (int64_t d = 0; d < D; d++) dx[d] = gain[d] * dy[d]; /* 1: dn, where dx will be */
        REAL mean = scale * dot(x, dx, D) / D;

        for (int64_t d = 0; d < D; d++) dgain[d] += scale * x[d] * dy[d];               /* 2 */
        for (int64_t d = 0; d < D; d++) dx[d] = scale * (dx[d] - scale * x[d] * mean); /* 3 */
    }
}
