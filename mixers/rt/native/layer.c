/* A layer of the Recurrent Transformer and its gradient, for CPUs (Oncescu et al. 2026, arXiv:2604.21215, section 2.2).

   One call computes all positions of a group of sequences of one run, so that the weights stay in the core's cache.
   Groups are independent: any number of threads may work on them, and the results are bitwise the same.

   Dimensions: R runs, B sequences of a run, T positions, D = H K channels, F hidden channels of the MLP, G sequences of
   a group. Constant factors and gains are folded into the matrices. The gain of the keys' norm is applied to queries.

   In attention, a vector register holds one channel of several heads, so that no sum runs over its lanes. If there are
   too few heads to fill a vector, it holds one channel of several parts of each head, and zeros in the remaining
   places. In this order, queries and pairs have W numbers. The matrices map to and from this order.

   Compile with -DH= the number of heads, -DK= the channels of a head, and -DDOUBLE for float64 in place of float32. */

#include "../../ops/native/vectors.h"

#define PANEL (2 * LANES) /* outputs of a tile of a product, whose sums stay in registers */
#define ROWS 6            /* rows of such a tile */
#define CHUNK (8 * ROWS)  /* rows of a product over positions */

#define LARGEST_POWER(n, limit) (((n) & -(n)) < (limit) ? ((n) & -(n)) : (limit)) /* of two, that divides n */
#define HEADS LARGEST_POWER((int64_t)H, LANES)         /* heads of a vector */
#define PARTS LARGEST_POWER((int64_t)K, LANES / HEADS) /* parts of each of these heads */
#define CHANNELS (K / PARTS)                           /* vectors of a vector's heads */
#define BLOCK (CHANNELS * LANES)                       /* numbers of a vector's heads */
#define BLOCKS (H / HEADS)
#define W (BLOCKS * BLOCK)
#define D ((int64_t)H * K)

#ifdef DOUBLE
typedef int64_t integers __attribute__((vector_size(BYTES)));
#define MANTISSA 52 /* bits */
#define BIAS 1023
#define ROUNDER 0x1.8p52 /* adding it rounds to an integer, which is in the lowest bits of the sum */
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
    const REAL *slopes;     /* (H) of ALiBi */
    const REAL *gain;       /* (R, W) of queries: gains of their norm and of the keys' norm, and 1 / sqrt(K) */

    /* Matrices in panels: (R, outputs / PANEL, inputs, PANEL); in the backward pass they are transposed. */
    const REAL *project, *out, *up, *down, *pairs;

    /* Kept by the forward pass for the backward pass. A scale is the inverse root mean square of a norm. */
    REAL *x_norm, *x_scale; /* (R, B, T, D), (R, B, T) normed inputs */
    REAL *q, *q_scale;      /* (R, B, T, W), (R, B, T) normed queries */
    REAL *k, *k_scale, *v;  /* (R, B, T, W), (R, B, T), (R, B, T, W) temporary pairs, keys normed */
    REAL *keys, *keys_scale, *values; /* the same of persistent pairs */
    REAL *top, *share;      /* (R, B, T, BLOCKS, LANES) largest logit, and inverse of the softmax's denominator */
    REAL *a;                /* (R, T, B, W) attention outputs */
    REAL *n, *n_scale;      /* (R, T, B, D), (R, T, B) normed inputs of the MLP */
    REAL *g, *g_slope;      /* (R, T, B, F) outputs of the GELU, and its derivative */
    REAL *m, *m_scale;      /* (R, T, B, D), (R, T, B) normed outputs */

    /* Forward pass. */
    const REAL *x;          /* (R, B, T, D) inputs */
    REAL *z;                /* (R, B, T, D) outputs */

    /* Backward pass. */
    const REAL *dz;         /* (R, B, T, D) gradients of the outputs */
    REAL *dx;               /* (R, B, T, D) of the inputs */
    REAL *dgain;            /* (R, B, W) of the queries' gain, from each sequence */
    REAL *dproject;         /* (R, B, T, 3 W) of the outputs of `project` */
    REAL *dpairs;           /* (R, T, B, 2 W) of the outputs of `pairs` */
    REAL *dy;               /* (R, T, B, D) of the outputs, all parts */
    REAL *dh;               /* (R, T, B, F) of the GELU's inputs */
    REAL *du;               /* (R, T, B, D) of the residual stream behind the MLP */

    int64_t B, T, F, qk_norm, kv_norm;
    double eps;
};

int64_t panel(void) { return PANEL; }
int64_t pair_size(void) { return W; }
int64_t softmax_size(void) { return BLOCKS * LANES; }

/* Channel that place w of the order of attention holds, or -1. */
int64_t channel(int64_t w) {
    int64_t lane = w % LANES, part = lane / HEADS, head = w / BLOCK * HEADS + lane % HEADS;
    return part < PARTS ? head * K + part * CHANNELS + w % BLOCK / LANES : -1;
}

/* Size of a matrix in panels. */
static int64_t size_in_panels(int64_t inputs, int64_t outputs) {
    return inputs * ((outputs + PANEL - 1) / PANEL * PANEL);
}

static void add(REAL *y, vector value) { store(y, load(y) + value); }

/* Lanes of `yes` where `mask` is set, of `no` elsewhere. */
static vector choose(integers mask, vector yes, vector no) {
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
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
    vector size = choose(negative, -x, x);
    vector t = choose(size < 64, size, (vector){} + 64); /* beyond it density is 0; infinity has no y */
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
            const REAL *row[ROWS]; /* repeats the last row if there are fewer */
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

/* RMS norm of D channels in `count` numbers, where the other numbers are zero. Returns the inverse root mean square. */
static REAL norm(int64_t count, double eps, const REAL *y, REAL *out) {
    REAL scale = 1 / (REAL)sqrt(dot(y, y, count) / D + eps);
    for (int64_t i = 0; i < count; i++) out[i] = scale * y[i];
    return scale;
}

/* Adds the gradient of y for n = RMS norm of y, given dn: scale (dn - n mean(n dn)). */
static void norm_backward(int64_t count, REAL scale, const REAL *n, const REAL *dn, REAL *add) {
    REAL mean = dot(n, dn, count) / D;
    for (int64_t i = 0; i < count; i++) add[i] += scale * (dn[i] - n[i] * mean);
}

/* RMS norm of a query or key, or a copy without QK-norm. */
static REAL qk_norm(const struct call *s, const REAL *y, REAL *out) {
    if (s->qk_norm) return norm(W, s->eps, y, out);
    memcpy(out, y, W * sizeof(REAL));
    return 1;
}

/* Gradient of y for n = `qk_norm` of y. */
static void qk_norm_backward(const struct call *s, REAL scale, const REAL *n, const REAL *dn, REAL *dy) {
    if (s->qk_norm) {
        memset(dy, 0, W * sizeof(REAL));
        norm_backward(W, scale, n, dn, dy);
    } else
        memcpy(dy, dn, W * sizeof(REAL));
}

/* Writes the slopes in the order of vectors of heads. */
static void slopes_in_lanes(const REAL *slopes, REAL *to) {
    memset(to, 0, BLOCKS * LANES * sizeof(REAL));
    for (int64_t h = 0; h < H; h++)
        for (int64_t part = 0; part < PARTS; part++) to[h / HEADS * LANES + part * HEADS + h % HEADS] = slopes[h];
}

/* Inner products of the heads of a block, each in the lanes of all parts of its head. */
static vector inner(const REAL *a, const REAL *b) {
    vector sum = {};
    for (int64_t c = 0; c < BLOCK; c += LANES) sum += load(a + c) * load(b + c);
    for (int64_t n = HEADS; n < HEADS * PARTS; n *= 2) {
        vector other;
        for (int64_t i = 0; i < LANES; i++) other[i] = sum[i ^ n];
        sum += other;
    }
    return sum;
}

/* Attention output of a query at position t: to all pairs before t, and to its own temporary pair `k`, `v`. */
static void attend(int64_t t, const REAL *slopes, const REAL *q, const REAL *k, const REAL *v, const REAL *keys,
                   const REAL *values, REAL *restrict logits, REAL *restrict a, REAL *restrict top,
                   REAL *restrict share) {
    for (int64_t block = 0; block < BLOCKS; block++) {
        vector own = inner(q, k), most = own, slope = load(slopes);
        for (int64_t j = 0; j < t; j++) {
            vector logit = inner(q, keys + j * W) + slope * (REAL)(j - t);
            most = choose(logit > most, logit, most);
            store(logits + j * LANES, logit);
        }

        vector all = exponential(own - most), sums[CHANNELS];
        for (int64_t c = 0; c < CHANNELS; c++) sums[c] = all * load(v + c * LANES);
        for (int64_t j = 0; j < t; j++) {
            vector part = exponential(load(logits + j * LANES) - most);
            all += part;
            for (int64_t c = 0; c < CHANNELS; c++) sums[c] += part * load(values + j * W + c * LANES);
        }

        vector scale = 1 / all;
        for (int64_t c = 0; c < CHANNELS; c++) store(a + c * LANES, scale * sums[c]);
        store(top, most);
        store(share, scale);

        q += BLOCK, k += BLOCK, v += BLOCK, a += BLOCK, keys += BLOCK, values += BLOCK;
        slopes += LANES, top += LANES, share += LANES;
    }
}

/* Gradients of a query, its temporary pair, and all pairs before t, from `da` of its attention output. */
static void attend_backward(int64_t t, const REAL *slopes, const REAL *q, const REAL *k, const REAL *v,
                            const REAL *keys, const REAL *values, const REAL *top, const REAL *share, const REAL *a,
                            const REAL *da, REAL *restrict dq, REAL *restrict dk, REAL *restrict dv,
                            REAL *restrict dkeys, REAL *restrict dvalues) {
    for (int64_t block = 0; block < BLOCKS; block++) {
        vector most = load(top), scale = load(share), slope = load(slopes), delta = inner(a, da);
        vector mine = scale * exponential(inner(q, k) - most);
        vector dmine = mine * (inner(v, da) - delta);

        vector sums[CHANNELS];
        for (int64_t c = 0; c < CHANNELS; c++) {
            sums[c] = dmine * load(k + c * LANES);
            store(dk + c * LANES, dmine * load(q + c * LANES));
            store(dv + c * LANES, mine * load(da + c * LANES));
        }

        for (int64_t j = 0; j < t; j++) {
            const REAL *key = keys + j * W, *value = values + j * W;
            vector logit = inner(q, key) + slope * (REAL)(j - t);
            vector p = scale * exponential(logit - most);
            vector dlogit = p * (inner(value, da) - delta);

            for (int64_t c = 0; c < BLOCK; c += LANES) {
                sums[c / LANES] += dlogit * load(key + c);
                add(dkeys + j * W + c, dlogit * load(q + c));
                add(dvalues + j * W + c, p * load(da + c));
            }
        }
        for (int64_t c = 0; c < CHANNELS; c++) store(dq + c * LANES, sums[c]);

        q += BLOCK, k += BLOCK, v += BLOCK, a += BLOCK, da += BLOCK, dq += BLOCK, dk += BLOCK, dv += BLOCK;
        keys += BLOCK, values += BLOCK, dkeys += BLOCK, dvalues += BLOCK;
        slopes += LANES, top += LANES, share += LANES;
    }
}

/* Size of the scratch memory of a call for a group of G sequences. */
int64_t forward_scratch(const struct call *s, int64_t G) {
    return G * (D + 2 * W + s->F) + 3 * W * CHUNK + W + (s->T + BLOCKS) * LANES;
}
int64_t backward_scratch(const struct call *s, int64_t G) {
    return G * (D + W + s->F) + CHUNK * D + 4 * W + BLOCKS * LANES + 2 * G * s->T * W;
}

/* Queries and temporary pairs of `count` positions that begin with `first`, counted over all sequences. */
static void project(const struct call *s, int64_t r, int64_t first, int64_t count, REAL *scratch) {
    for (int64_t i = first; i < first + count; i++)
        s->x_scale[i] = norm(D, s->eps, s->x + i * D, s->x_norm + i * D);

    product(count, D, 3 * W, s->x_norm + first * D, s->project + r * size_in_panels(D, 3 * W), scratch);
    for (int64_t i = first; i < first + count; i++, scratch += 3 * W) {
        s->q_scale[i] = qk_norm(s, scratch, s->q + i * W);
        s->k_scale[i] = qk_norm(s, scratch + W, s->k + i * W);
        memcpy(s->v + i * W, scratch + 2 * W, W * sizeof(REAL));
    }
}

/* Forward pass of all positions of sequences [first, first + G) of run r:

   1. q, k, v = RMS[Q RMS(x)], RMS[K RMS(x)], V RMS(x): queries and temporary pairs.

   Then for each position:

   2. a = attention to earlier persistent pairs and the position's own temporary pair.
   3. u = x + s Wo a.
   4. z = u + s MLP(RMS(u)).
   5. k = RMS[K RMS(z)], v = V RMS(z), the persistent pair. */
void forward(const struct call *s, int64_t r, int64_t first, int64_t G, REAL *scratch) {
    int64_t B = s->B, T = s->T, F = s->F, begin = (r * B + first) * T, end = begin + G * T;
    REAL *u = scratch, *kv = u + G * D, *h = kv + 2 * G * W, *qkv = h + G * F, *q = qkv + 3 * W * CHUNK;
    REAL *slopes = q + W, *logits = slopes + BLOCKS * LANES;
    const REAL *out = s->out + r * size_in_panels(W, D);
    const REAL *up = s->up + r * size_in_panels(D, F);
    const REAL *down = s->down + r * size_in_panels(F, D);
    const REAL *pairs = s->pairs + r * size_in_panels(D, 2 * W);
    slopes_in_lanes(s->slopes, slopes);

    for (int64_t i = begin; i < end; i += CHUNK) project(s, r, i, i + CHUNK < end ? CHUNK : end - i, qkv); /* 1 */

    for (int64_t t = 0; t < T; t++) {
        int64_t here = (r * T + t) * B + first; /* of the group's first sequence, positions first */
        REAL *a = s->a + here * W, *n = s->n + here * D, *m = s->m + here * D, *g = s->g + here * F;

        for (int64_t b = 0; b < G; b++) { /* 2 */
            int64_t sequence = begin + b * T, i = sequence + t;
            for (int64_t w = 0; w < W; w++) q[w] = s->gain[r * W + w] * s->q[i * W + w];
            attend(t, slopes, q, s->k + i * W, s->v + i * W, s->keys + sequence * W, s->values + sequence * W, logits,
                   a + b * W, s->top + i * BLOCKS * LANES, s->share + i * BLOCKS * LANES);
        }

        product(G, W, D, a, out, u);
        for (int64_t b = 0; b < G; b++) { /* 3 */
            const REAL *x = s->x + (begin + b * T + t) * D;
            for (int64_t d = 0; d < D; d++) u[b * D + d] += x[d];
            s->n_scale[here + b] = norm(D, s->eps, u + b * D, n + b * D);
        }

        product(G, D, F, n, up, h);
        gelu(G * F, h, g, s->g_slope + here * F);
        product(G, F, D, g, down, kv);
        for (int64_t b = 0; b < G; b++) { /* 4 */
            REAL *z = s->z + (begin + b * T + t) * D;
            for (int64_t d = 0; d < D; d++) z[d] = u[b * D + d] + kv[b * D + d];
            if (s->kv_norm)
                s->m_scale[here + b] = norm(D, s->eps, z, m + b * D);
            else
                memcpy(m + b * D, z, D * sizeof(REAL));
        }

        product(G, D, 2 * W, m, pairs, kv);
        for (int64_t b = 0; b < G; b++) { /* 5 */
            int64_t i = begin + b * T + t;
            s->keys_scale[i] = qk_norm(s, kv + 2 * b * W, s->keys + i * W);
            memcpy(s->values + i * W, kv + (2 * b + 1) * W, W * sizeof(REAL));
        }
    }
}

/* Gradients of the inputs of `count` positions that begin with `first`, from those of `project` and of u. */
static void project_backward(const struct call *s, int64_t r, int64_t first, int64_t count, REAL *dn) {
    product(count, 3 * W, D, s->dproject + first * 3 * W, s->project + r * size_in_panels(3 * W, D), dn);
    for (int64_t i = first; i < first + count; i++, dn += D) {
        int64_t sequence = i / s->T, here = (r * s->T + i % s->T) * s->B + sequence - r * s->B;
        memcpy(s->dx + i * D, s->du + here * D, D * sizeof(REAL));
        norm_backward(D, s->x_scale[i], s->x_norm + i * D, dn, s->dx + i * D);
    }
}

/* Backward pass of all positions of sequences [first, first + G) of run r, last position first:

   1. Gradients of the persistent pair, accumulated by later queries, and from them those of K RMS(z) and V RMS(z).
   2. dy = dz + the gradient through the pair.
   3. du = dy + the gradient through the MLP.
   4. da = s Wo^T du.
   5. Gradients of the query, its temporary pair and all earlier persistent pairs.

   Then for all positions:

   6. dx = du + the gradient through queries and temporary pairs. */
void backward(const struct call *s, int64_t r, int64_t first, int64_t G, REAL *scratch) {
    int64_t B = s->B, T = s->T, F = s->F, begin = (r * B + first) * T, end = begin + G * T;
    REAL *da = scratch, *dn = da + G * W, *dg = dn + G * D, *dnx = dg + G * F;
    REAL *q = dnx + CHUNK * D, *dq = q + W, *dnq = dq + W, *dnk = dnq + W;
    REAL *slopes = dnk + W, *dkeys = slopes + BLOCKS * LANES, *dvalues = dkeys + G * T * W;
    const REAL *gain = s->gain + r * W;
    const REAL *out = s->out + r * size_in_panels(D, W);
    const REAL *up = s->up + r * size_in_panels(F, D);
    const REAL *down = s->down + r * size_in_panels(D, F);
    const REAL *pairs = s->pairs + r * size_in_panels(2 * W, D);
    slopes_in_lanes(s->slopes, slopes);
    memset(dkeys, 0, 2 * G * T * W * sizeof(REAL));
    memset(s->dgain + (r * B + first) * W, 0, G * W * sizeof(REAL));

    for (int64_t t = T - 1; t >= 0; t--) {
        int64_t here = (r * T + t) * B + first;
        const REAL *a = s->a + here * W, *n = s->n + here * D, *m = s->m + here * D, *slope = s->g_slope + here * F;
        REAL *dpairs = s->dpairs + here * 2 * W, *dy = s->dy + here * D, *dh = s->dh + here * F, *du = s->du + here * D;

        for (int64_t b = 0; b < G; b++) { /* 1 */
            int64_t i = begin + b * T + t, pair = (b * T + t) * W;
            qk_norm_backward(s, s->keys_scale[i], s->keys + i * W, dkeys + pair, dpairs + 2 * b * W);
            memcpy(dpairs + (2 * b + 1) * W, dvalues + pair, W * sizeof(REAL));
        }

        product(G, 2 * W, D, dpairs, pairs, dn);
        for (int64_t b = 0; b < G; b++) { /* 2 */
            memcpy(dy + b * D, s->dz + (begin + b * T + t) * D, D * sizeof(REAL));
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

        product(G, D, W, du, out, da); /* 4 */

        for (int64_t b = 0; b < G; b++) { /* 5 */
            int64_t sequence = begin + b * T, i = sequence + t;
            REAL *dqkv = s->dproject + i * 3 * W, *dgain = s->dgain + (r * B + first + b) * W;
            for (int64_t w = 0; w < W; w++) q[w] = gain[w] * s->q[i * W + w];
            attend_backward(t, slopes, q, s->k + i * W, s->v + i * W, s->keys + sequence * W, s->values + sequence * W,
                            s->top + i * BLOCKS * LANES, s->share + i * BLOCKS * LANES, a + b * W, da + b * W, dq, dnk,
                            dqkv + 2 * W, dkeys + b * T * W, dvalues + b * T * W);

            for (int64_t w = 0; w < W; w++) dgain[w] += dq[w] * s->q[i * W + w];
            for (int64_t w = 0; w < W; w++) dnq[w] = dq[w] * gain[w];
            qk_norm_backward(s, s->q_scale[i], s->q + i * W, dnq, dqkv);
            qk_norm_backward(s, s->k_scale[i], s->k + i * W, dnk, dqkv + W);
        }
    }

    for (int64_t i = begin; i < end; i += CHUNK) /* 6 */
        project_backward(s, r, i, i + CHUNK < end ? CHUNK : end - i, dnx);
}
