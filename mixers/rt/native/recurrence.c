/* The recurrence of the Recurrent Transformer and its gradient, for CPUs (Oncescu et al. 2026, arXiv:2604.21215,
   section 2.2).

   One call computes all positions of a group of sequences of one run. The weights are read from a cache of the core.
   Groups are independent: any number of threads may work on them, and the result is the same to the last bit.

   Dimensions: R runs, B sequences of a run, T positions, D = H K channels, F hidden channels of the MLP, S slots of
   persistent pairs (T rounded up to whole vectors), G sequences of a group. Constant factors are in the matrices.
   Slots are vectors of the processor: (D, S) stands for (H, S / LANES, K, LANES).

   Compile with -DK= the number of channels of a head, and with -DDOUBLE for float64 in place of float32. */

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
#define PANEL (2 * LANES) /* outputs, and */
#define ROWS 6            /* sequences, whose sums a product keeps in registers */

typedef REAL vector __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

#ifdef DOUBLE
typedef int64_t integers __attribute__((vector_size(BYTES)));
#define MANTISSA 52 /* bits */
#define BIAS 1023
#define ROUNDER 0x1.8p52 /* a sum with it is rounded to an integer, which is in its lowest bits */
#define LOWEST_EXPONENT -708
#define LOG2_HIGH 0x1.62e42feep-1
#define LOG2_LOW 1.90821492927058770e-10
#define DEGREE 13
#define TAIL /* coefficients of f in gelu_of_vector */ \
    0.094410641301968939,    -0.17039772154845437,    0.12437925533926371,     -0.071707407337829959, \
    0.030864804106291201,    -0.0084920954797056761,  0.00050756207578086967,  0.00063881382296513258, \
    -0.00018718427862232952, -4.5554703668377396e-05, 2.8648405412411718e-05,  4.630787652129803e-06, \
    -4.3037963543616207e-06, -8.274112247863845e-07,  6.6209661887235012e-07,  2.0259905246566012e-07, \
    -9.5107761352884726e-08, -4.9027250131047174e-08, 1.0302583659889131e-08,  9.2511658644856584e-09, \
    -3.8403679567913895e-10, -9.5270234527852415e-10, -6.1144827175297999e-11
#else
typedef int32_t integers __attribute__((vector_size(BYTES)));
#define MANTISSA 23
#define BIAS 127
#define ROUNDER 0x1.8p23f
#define LOWEST_EXPONENT -87
#define LOG2_HIGH 0x1.62e4p-1f
#define LOG2_LOW 1.42860682030941723e-6f
#define DEGREE 7
#define TAIL /* coefficients of f in gelu_of_vector */ \
    0.0944106413f, -0.170397689f, 0.124379224f, -0.0717080706f, 0.0308654263f, -0.00848831045f, \
    0.000504007636f, 0.000629820793f, -0.000178728355f, -3.57537725e-05f, 1.94310299e-05f
#endif

/* Tensors and sizes of a call. The names and their order are those of `TENSORS` and `SIZES` in passes.py. */
struct call {
    /* Read by both passes. */
    const REAL *q;        /* (R, B, T, D) queries, scaled */
    const REAL *k, *v;    /* (R, B, T, D) temporary pairs */
    const REAL *slopes;   /* (H) of ALiBi */
    const REAL *gain;     /* (R, D) of the persistent keys' norm; NULL without it */

    /* Matrices in panels: (R, outputs / PANEL, inputs, PANEL); in the backward pass they are transposed. */
    const REAL *out, *up, *down, *pairs;

    /* Kept by the forward pass for the backward pass. */
    REAL *a;              /* (R, T, B, D) attention outputs */
    REAL *n, *n_scale;    /* (R, T, B, D), (R, T, B) normed inputs of the MLP, inverse root mean squares */
    REAL *g, *g_slope;    /* (R, T, B, F) outputs of the GELU, and its derivative */
    REAL *m, *m_scale;    /* (R, T, B, D), (R, T, B) normed outputs, inverse root mean squares */
    REAL *c, *c_scale;    /* (R, T, B, D), (R, T, B) normed persistent keys before their gain */
    REAL *keys, *values;  /* (R, B, D, S) persistent pairs, zero before the forward pass */
    REAL *top, *share;    /* (R, B, T, H) largest logit, and inverse of the softmax's denominator */

    /* Forward pass. */
    const REAL *x;        /* (R, B, T, D) inputs */
    REAL *z;              /* (R, B, T, D) outputs */

    /* Backward pass. */
    const REAL *dz;       /* (R, B, T, D) gradients of the outputs */
    REAL *dq, *dk, *dv;   /* (R, B, T, D) gradients of queries and temporary pairs */
    REAL *dkeys, *dvalues; /* (R, B, D, S) zero; of persistent pairs */
    REAL *dgain;          /* (R, T, B, D) of the keys after their gain */
    REAL *dpairs;         /* (R, T, B, 2 D) of the outputs of `pairs` */
    REAL *dy;             /* (R, T, B, D) of the layer's outputs, all parts */
    REAL *dh;             /* (R, T, B, F) of the GELU's inputs */
    REAL *du;             /* (R, T, B, D) of the layer's inputs */

    int64_t B, T, D, H, F, S, kv_norm;
    double eps;
};

int64_t panel(void) { return PANEL; }
int64_t lanes(void) { return LANES; }

/* Numbers that a matrix in panels takes. */
static int64_t size_in_panels(int64_t inputs, int64_t outputs) {
    return inputs * ((outputs + PANEL - 1) / PANEL * PANEL);
}

static vector load(const REAL *y) { return *(const vector *)y; }
static void store(REAL *y, vector value) { *(vector *)y = value; }

static void add(REAL *y, vector value) { store(y, load(y) + value); }

static vector numbers(void) { /* 0, 1, 2, ... */
    vector y = {};
    for (int64_t i = 0; i < LANES; i++) y[i] = i;
    return y;
}

static REAL largest(vector y) {
    for (int64_t n = LANES / 2; n > 0; n /= 2)
        for (int64_t i = 0; i < n; i++) y[i] = y[i] > y[i + n] ? y[i] : y[i + n];
    return y[0];
}

/* Lanes of `yes` where `mask` is set, of `no` elsewhere. */
static vector choose(integers mask, vector yes, vector no) {
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
}

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

/* e^x for x <= 0: 2^n e^r with |r| <= log(2) / 2. Zero where the result is no normal number. */
static vector exponential(vector x) {
    static const REAL inverse_factorials[] = {
        1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040,
        1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};

    integers normal = x > LOWEST_EXPONENT;
    vector y = choose(normal, x, (vector){});
    vector shifted = y * (REAL)1.44269504088896341 + ROUNDER;
    vector n = shifted - ROUNDER;
    vector r = y - n * LOG2_HIGH - n * LOG2_LOW;

    vector power = {};
    for (int i = DEGREE; i >= 0; i--) power = power * r + inverse_factorials[i];
    integers scale = ((integers)shifted + BIAS) << MANTISSA;
    return choose(normal, power * (vector)scale, (vector){});
}

/* GELU and its derivative, by P(X < -t) = e^(-t^2 / 2) f((t - 4) / (t + 4)) for a standard normal X.
   The polynomial f interpolates at Chebyshev's nodes; its relative error is 2e-15, in float32 4e-8. */
static void gelu_of_vector(vector x, vector *g, vector *slope) {
    static const REAL f[] = {TAIL};
    integers negative = x < 0;
    vector t = choose(negative, -x, x);
    vector y = (t - 4) / (t + 4);
    vector density = exponential((REAL)-0.5 * t * t);

    vector tail = {};
    for (int i = sizeof(f) / sizeof(f[0]) - 1; i >= 0; i--) tail = tail * y + f[i];
    tail *= density;

    vector below = choose(negative, tail, 1 - tail);
    *g = x * below;
    *slope = below + x * density * (REAL)0.398942280401432678;
}

static void gelu(int64_t count, const REAL *h, REAL *g, REAL *slope) {
    int64_t i = 0;
    vector y, dy;
    for (; i + LANES <= count; i += LANES) {
        gelu_of_vector(load(h + i), &y, &dy);
        store(g + i, y);
        store(slope + i, dy);
    }
    if (i < count) {
        vector last = {};
        memcpy(&last, h + i, (count - i) * sizeof(REAL));
        gelu_of_vector(last, &y, &dy);
        memcpy(g + i, &y, (count - i) * sizeof(REAL));
        memcpy(slope + i, &dy, (count - i) * sizeof(REAL));
    }
}

/* out = in W for `rows` rows, where `panels` hold the matrix W (inputs, outputs). */
static void product(int64_t rows, int64_t inputs, int64_t outputs, const REAL *restrict in, const REAL *restrict panels,
                    REAL *restrict out) {
    for (int64_t o = 0; o < outputs; o += PANEL, panels += inputs * PANEL)
        for (int64_t b = 0; b < rows; b += ROWS) {
            const REAL *row[ROWS]; /* the last one again where there are fewer */
            for (int64_t i = 0; i < ROWS; i++) row[i] = in + (b + i < rows ? b + i : rows - 1) * inputs;

            vector sum[ROWS][2] = {};
            for (int64_t j = 0; j < inputs; j++) {
                vector left = load(panels + j * PANEL), right = load(panels + j * PANEL + LANES);
                for (int64_t i = 0; i < ROWS; i++) {
                    sum[i][0] += row[i][j] * left;
                    sum[i][1] += row[i][j] * right;
                }
            }

            for (int64_t i = 0; i < ROWS && b + i < rows; i++) {
                REAL *to = out + (b + i) * outputs + o;
                if (o + PANEL <= outputs) {
                    store(to, sum[i][0]);
                    store(to + LANES, sum[i][1]);
                } else
                    memcpy(to, sum[i], (outputs - o) * sizeof(REAL));
            }
        }
}

/* RMS norm of a vector; returns the inverse root mean square. */
static REAL norm(int64_t D, double eps, const REAL *y, REAL *out) {
    REAL scale = 1 / (REAL)sqrt(dot(y, y, D) / D + eps);
    for (int64_t d = 0; d < D; d++) out[d] = scale * y[d];
    return scale;
}

/* Adds the gradient of the vector of which `n` is the RMS norm: scale (dn - n mean(n dn)). */
static void norm_backward(int64_t D, REAL scale, const REAL *n, const REAL *dn, REAL *add) {
    REAL mean = dot(n, dn, D) / D;
    for (int64_t d = 0; d < D; d++) add[d] += scale * (dn[d] - n[d] * mean);
}

/* Inner product of vectors of one head. */
static REAL inner(const REAL *a, const REAL *b) {
    REAL sum = 0;
    for (int64_t c = 0; c < K; c++) sum += a[c] * b[c];
    return sum;
}

/* Logits of a query at position t and the vector of slots that begins with j; -inf for slots that are empty. */
static vector logits(int64_t t, int64_t j, REAL slope, const REAL *q, const REAL *keys) {
    vector sum = {};
    for (int64_t c = 0; c < K; c++) sum += q[c] * load(keys + c * LANES);

    vector distance = numbers() + (REAL)(j - t);
    return choose(distance < 0, sum + slope * distance, (vector){} - INFINITY);
}

/* Attention output of a query at position t: to the slots before t, and to its own temporary pair `k`, `v`. */
static void attend(const struct call *s, int64_t t, const REAL *q, const REAL *k, const REAL *v, const REAL *keys,
                   const REAL *values, REAL *restrict p, REAL *restrict a, REAL *restrict top, REAL *restrict share) {
    int64_t H = s->H, next = K * s->S;
    const REAL *slopes = s->slopes;

    for (int64_t h = 0; h < H; h++, q += K, k += K, v += K, a += K, keys += next, values += next) {
        REAL own = inner(q, k);
        vector most = (vector){} + own;
        for (int64_t j = 0; j < t; j += LANES) {
            vector logit = logits(t, j, slopes[h], q, keys + j * K);
            most = choose(logit > most, logit, most);
            store(p + j, logit);
        }
        REAL highest = largest(most);

        vector all = {}, sums[K] = {};
        for (int64_t j = 0; j < t; j += LANES) {
            vector part = exponential(load(p + j) - highest);
            all += part;
            for (int64_t c = 0; c < K; c++) sums[c] += part * load(values + j * K + c * LANES);
        }
        REAL mine = exponential((vector){} + (own - highest))[0];
        REAL scale = 1 / (sum_of(all) + mine);
        for (int64_t c = 0; c < K; c++) a[c] = scale * (sum_of(sums[c]) + mine * v[c]);
        top[h] = highest;
        share[h] = scale;
    }
}

/* Gradients of a query, its temporary pair, and the pairs in all slots before t, from `da` of its attention output. */
static void attend_backward(const struct call *s, int64_t t, const REAL *q, const REAL *k, const REAL *v,
                            const REAL *keys, const REAL *values, const REAL *top, const REAL *share, const REAL *a,
                            const REAL *da, REAL *restrict dq, REAL *restrict dk, REAL *restrict dv,
                            REAL *restrict dkeys, REAL *restrict dvalues) {
    int64_t H = s->H, next = K * s->S;
    const REAL *slopes = s->slopes;

    for (int64_t h = 0; h < H; h++) {
        REAL delta = inner(a, da);
        REAL mine = share[h] * exponential((vector){} + (inner(q, k) - top[h]))[0];
        REAL dmine = mine * (inner(v, da) - delta);

        vector sums[K] = {};
        for (int64_t j = 0; j < t; j += LANES) {
            vector p = share[h] * exponential(logits(t, j, slopes[h], q, keys + j * K) - top[h]);
            vector dp = {};
            for (int64_t c = 0; c < K; c++) dp += da[c] * load(values + j * K + c * LANES);
            vector dlogit = p * (dp - delta);

            for (int64_t c = 0; c < K; c++) {
                int64_t i = j * K + c * LANES;
                sums[c] += dlogit * load(keys + i);
                add(dkeys + i, q[c] * dlogit);
                add(dvalues + i, da[c] * p);
            }
        }

        for (int64_t c = 0; c < K; c++) {
            dq[c] = sum_of(sums[c]) + dmine * k[c];
            dk[c] = dmine * q[c];
            dv[c] = mine * da[c];
        }
        q += K, k += K, v += K, a += K, da += K, dq += K, dk += K, dv += K;
        keys += next, values += next, dkeys += next, dvalues += next;
    }
}

/* Writes a vector of D numbers into slot t. */
static void put(const struct call *s, int64_t t, const REAL *from, REAL *slots) {
    int64_t H = s->H, next = K * s->S;
    slots += t / LANES * LANES * K + t % LANES;
    for (int64_t h = 0; h < H; h++, from += K, slots += next)
        for (int64_t c = 0; c < K; c++) slots[c * LANES] = from[c];
}

/* Reads a vector of D numbers from slot t. */
static void take(const struct call *s, int64_t t, const REAL *slots, REAL *to) {
    int64_t H = s->H, next = K * s->S;
    slots += t / LANES * LANES * K + t % LANES;
    for (int64_t h = 0; h < H; h++, to += K, slots += next)
        for (int64_t c = 0; c < K; c++) to[c] = slots[c * LANES];
}

/* Numbers that a call needs for itself, for a group of G sequences. */
int64_t scratch_size(const struct call *s, int64_t G) { return G * (3 * s->D + s->F) + s->S; }

/* Forward pass of all positions of sequences [first, first + G) of run r:

   1. a = attention to earlier persistent pairs and the own temporary one.
   2. u = x + s Wo a.
   3. z = u + s MLP(RMS(u)).
   4. k = RMS[K RMS(z)], v = V RMS(z), into slot t. */
void forward(const struct call *s, int64_t r, int64_t first, int64_t G, REAL *scratch) {
    int64_t B = s->B, T = s->T, D = s->D, F = s->F, H = s->H, S = s->S;
    REAL *u = scratch, *kv = u + G * D, *h = kv + 2 * G * D, *p = h + G * F;
    const REAL *out = s->out + r * size_in_panels(D, D);
    const REAL *up = s->up + r * size_in_panels(D, F);
    const REAL *down = s->down + r * size_in_panels(F, D);
    const REAL *pairs = s->pairs + r * size_in_panels(D, 2 * D);

    for (int64_t t = 0; t < T; t++) {
        int64_t here = (r * T + t) * B + first; /* of the group's first sequence, positions first */
        REAL *a = s->a + here * D, *n = s->n + here * D, *m = s->m + here * D, *c = s->c + here * D;
        REAL *g = s->g + here * F;

        for (int64_t b = 0; b < G; b++) { /* 1 */
            int64_t sequence = r * B + first + b, i = sequence * T + t, of = sequence * D * S;
            attend(s, t, s->q + i * D, s->k + i * D, s->v + i * D, s->keys + of, s->values + of, p, a + b * D,
                   s->top + i * H, s->share + i * H);
        }

        product(G, D, D, a, out, u);
        for (int64_t b = 0; b < G; b++) { /* 2 */
            const REAL *x = s->x + ((r * B + first + b) * T + t) * D;
            for (int64_t d = 0; d < D; d++) u[b * D + d] += x[d];
            s->n_scale[here + b] = norm(D, s->eps, u + b * D, n + b * D);
        }

        product(G, D, F, n, up, h);
        gelu(G * F, h, g, s->g_slope + here * F);
        product(G, F, D, g, down, kv);
        for (int64_t b = 0; b < G; b++) { /* 3 */
            REAL *z = s->z + ((r * B + first + b) * T + t) * D;
            for (int64_t d = 0; d < D; d++) z[d] = u[b * D + d] + kv[b * D + d];
            if (s->kv_norm)
                s->m_scale[here + b] = norm(D, s->eps, z, m + b * D);
            else
                memcpy(m + b * D, z, D * sizeof(REAL));
        }

        product(G, D, 2 * D, m, pairs, kv);
        for (int64_t b = 0; b < G; b++) { /* 4 */
            int64_t sequence = r * B + first + b;
            REAL *key = kv + 2 * b * D;
            if (s->gain) {
                s->c_scale[here + b] = norm(D, s->eps, key, c + b * D);
                for (int64_t d = 0; d < D; d++) key[d] = s->gain[r * D + d] * c[b * D + d];
            }
            put(s, t, key, s->keys + sequence * D * S);
            put(s, t, key + D, s->values + sequence * D * S);
        }
    }
}

/* Backward pass of all positions of sequences [first, first + G) of run r, last position first:

   1. Gradients of the persistent pair, which later queries have added up in slot t, and from them of K RMS(z).
   2. dy = dz + what the pair sends back.
   3. du = dy + what the MLP sends back.
   4. da = s Wo^T du.
   5. Gradients of the query, its temporary pair and all earlier persistent pairs. */
void backward(const struct call *s, int64_t r, int64_t first, int64_t G, REAL *scratch) {
    int64_t B = s->B, T = s->T, D = s->D, F = s->F, H = s->H, S = s->S;
    REAL *da = scratch, *dn = da + G * D, *dg = dn + 2 * G * D;
    const REAL *out = s->out + r * size_in_panels(D, D);
    const REAL *up = s->up + r * size_in_panels(F, D);
    const REAL *down = s->down + r * size_in_panels(D, F);
    const REAL *pairs = s->pairs + r * size_in_panels(2 * D, D);

    for (int64_t t = T - 1; t >= 0; t--) {
        int64_t here = (r * T + t) * B + first;
        const REAL *a = s->a + here * D, *n = s->n + here * D, *m = s->m + here * D, *c = s->c + here * D;
        const REAL *slope = s->g_slope + here * F;
        REAL *dpairs = s->dpairs + here * 2 * D, *dy = s->dy + here * D, *dh = s->dh + here * F, *du = s->du + here * D;

        for (int64_t b = 0; b < G; b++) { /* 1 */
            int64_t sequence = r * B + first + b;
            REAL *dkey = dpairs + 2 * b * D;
            take(s, t, s->dkeys + sequence * D * S, dkey);
            take(s, t, s->dvalues + sequence * D * S, dkey + D);
            if (s->gain) {
                REAL *dgain = s->dgain + (here + b) * D;
                for (int64_t d = 0; d < D; d++) {
                    dgain[d] = dkey[d] * c[b * D + d];
                    dn[d] = dkey[d] * s->gain[r * D + d];
                    dkey[d] = 0;
                }
                norm_backward(D, s->c_scale[here + b], c + b * D, dn, dkey);
            }
        }

        product(G, 2 * D, D, dpairs, pairs, dn);
        for (int64_t b = 0; b < G; b++) { /* 2 */
            memcpy(dy + b * D, s->dz + ((r * B + first + b) * T + t) * D, D * sizeof(REAL));
            if (s->kv_norm)
                norm_backward(D, s->m_scale[here + b], m + b * D, dn + b * D, dy + b * D);
            else
                for (int64_t d = 0; d < D; d++) dy[b * D + d] += dn[b * D + d];
        }

        product(G, D, F, dy, down, dg);
        for (int64_t i = 0; i < G * F; i++) dh[i] = dg[i] * slope[i];
        product(G, F, D, dh, up, dn);
        memcpy(du, dy, G * D * sizeof(REAL));
        for (int64_t b = 0; b < G; b++) /* 3 */
            norm_backward(D, s->n_scale[here + b], n + b * D, dn + b * D, du + b * D);

        product(G, D, D, du, out, da); /* 4 */

        for (int64_t b = 0; b < G; b++) { /* 5 */
            int64_t sequence = r * B + first + b, i = sequence * T + t, of = sequence * D * S;
            attend_backward(s, t, s->q + i * D, s->k + i * D, s->v + i * D, s->keys + of, s->values + of,
                            s->top + i * H, s->share + i * H, a + b * D, da + b * D, s->dq + i * D, s->dk + i * D,
                            s->dv + i * D, s->dkeys + of, s->dvalues + of);
        }
    }
}
