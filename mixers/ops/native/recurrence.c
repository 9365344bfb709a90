/* The recurrence of linear-attention layers and its gradients, for CPUs: `matrix_recurrence` in
   mixers/ops/linear_recurrence.py. A head of a sequence has a state of K rows of V numbers.

   R runs, B sequences, H heads, P pairs of key and value of a sequence, N of each position, G decays of a head: 0, 1, K,
   or K V, which go without factors a and b. Before the first pair of a position the state decays; after its last one the
   query reads it. The backward pass computes the states again from one that the forward pass keeps for every C pairs.

   Heads are independent: any number of threads may work on them, and the results are bitwise the same.

   Compile with -DDOUBLE for float64 in place of float32. */

#include "vectors.h"

/* Sizes and tensors of a call; tensors that a form does not have are null. The names and their order are those of
   `_Call` in recurrence.py. */
struct call {
    int64_t P, N, H, K, V, G, C;
    const REAL *q;      /* (R, B, P / N, H, K) queries */
    const REAL *k;      /* (R, B, P, H, K) keys */
    const REAL *v;      /* (R, B, P, H, V) values */
    const REAL *w;      /* (R, B, P / N, H, G) decays, factors at most 1 */
    const REAL *a;      /* (R, B, P, H, K) left factors */
    const REAL *b;      /* (R, B, P, H, K) right factors; without left ones, the delta rule's */
    const REAL *bonus;  /* (R, B, H, K) */
    REAL *o;            /* (R, B, P / N, H, V) outputs; forward pass */
    REAL *kept;         /* (R, B, H, ceil(P / C), K, V) states before every C pairs */
    REAL *states;       /* (workers, C + 2, K, V) scratch */
    const REAL *d_o;    /* (R, B, P / N, H, V) gradients of the outputs; backward pass, as all below */
    REAL *dq, *dk, *dv, *dw, *da, *db, *dbonus;
};

/* Rows of a pair, and whether it is the first or last of its position. */
struct pair {
    int64_t at, position;
    int first, last;
};

static struct pair pair_at(const struct call *s, int64_t head, int64_t p) {
    int64_t sequence = head / s->H, h = head % s->H;
    return (struct pair){
        .at = (sequence * s->P + p) * s->H + h,
        .position = (sequence * (s->P / s->N) + p / s->N) * s->H + h,
        .first = p % s->N == 0,
        .last = p % s->N == s->N - 1,
    };
}

static void add(REAL *restrict y, REAL scale, const REAL *restrict x, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] += scale * x[i];
}

/* y = S^T x */
static void columns(REAL *restrict y, const REAL *restrict S, const REAL *restrict x, int64_t K, int64_t V) {
    memset(y, 0, V * sizeof(REAL));
    for (int64_t i = 0; i < K; i++) add(y, x[i], S + i * V, V);
}

/* Decay of row i, if the row has a single one. */
static REAL decay(const struct call *s, struct pair p, int64_t i) {
    return s->G && p.first ? s->w[p.position * s->G + (s->G > 1 ? i : 0)] : 1;
}

/* Decays of row i, if each number has its own. */
static const REAL *decays(const struct call *s, struct pair p, int64_t i) {
    return s->G > s->K && p.first ? s->w + p.position * s->G + i * s->V : 0;
}

/* The state after a pair from the one before it, and u: what the pair writes beside k v^T, or with the delta rule in
   place of v. */
static void advance(const struct call *s, struct pair p, const REAL *restrict S, REAL *restrict next, REAL *restrict u) {
    int64_t K = s->K, V = s->V;
    const REAL *k = s->k + p.at * K, *v = s->v + p.at * V, *a = s->a ? s->a + p.at * K : 0;
    const REAL *b = s->b ? s->b + p.at * K : 0;

    if (a) columns(u, S, b, K, V);
    for (int64_t i = 0; i < K; i++) {
        const REAL *each = decays(s, p, i), *S_i = S + i * V;
        REAL w = decay(s, p, i), *next_i = next + i * V;
        if (each)
            for (int64_t j = 0; j < V; j++) next_i[j] = each[j] * S_i[j];
        else
            for (int64_t j = 0; j < V; j++) next_i[j] = w * S_i[j];
    }
    if (b && !a) {
        columns(u, next, b, K, V);
        for (int64_t j = 0; j < V; j++) u[j] = v[j] - u[j];
        v = u;
    }
    for (int64_t i = 0; i < K; i++) add(next + i * V, k[i], v, V);
    if (a)
        for (int64_t i = 0; i < K; i++) add(next + i * V, a[i], u, V);
}

static REAL of_bonus(const struct call *s, int64_t head, struct pair p) {
    REAL sum = 0;
    for (int64_t i = 0; i < s->K; i++)
        sum += s->bonus[head * s->K + i] * s->k[p.at * s->K + i] * s->q[p.position * s->K + i];
    return sum;
}

/* Outputs of heads `head` to `end`. */
void forward(const struct call *s, int64_t head, int64_t end, int64_t worker) {
    int64_t K = s->K, V = s->V, size = K * V, parts = (s->P + s->C - 1) / s->C;
    REAL *S = s->states + worker * (s->C + 2) * size, *next = S + size;
    REAL u[V];
    unsigned before_call = flush_subnormals();

    for (; head < end; head++) {
        memset(S, 0, size * sizeof(REAL));
        for (int64_t n = 0; n < s->P; n++) {
            struct pair p = pair_at(s, head, n);
            if (n % s->C == 0) memcpy(s->kept + (head * parts + n / s->C) * size, S, size * sizeof(REAL));
            advance(s, p, S, next, u);
            if (p.last) {
                columns(s->o + p.position * V, s->bonus ? S : next, s->q + p.position * K, K, V);
                if (s->bonus) add(s->o + p.position * V, of_bonus(s, head, p), s->v + p.at * V, V);
            }
            REAL *before = S;
            S = next, next = before;
        }
    }
    restore(before_call);
}

/* Gradients of a pair. dS is the gradient of the state after it, and becomes that of the state before it. */
static void retreat(const struct call *s, int64_t head, struct pair p, const REAL *restrict S, const REAL *restrict next,
                    REAL *restrict dS) {
    int64_t K = s->K, V = s->V;
    const REAL *k = s->k + p.at * K, *v = s->v + p.at * V, *q = s->q + p.position * K, *d_o = s->d_o + p.position * V;
    const REAL *a = s->a ? s->a + p.at * K : 0, *b = s->b ? s->b + p.at * K : 0;
    REAL *dk = s->dk + p.at * K, *dv = s->dv + p.at * V, *dq = s->dq + p.position * K;
    REAL u[V], du[V];
    int delta = b && !a;

    /* The read, but with a bonus. */
    if (p.last && !s->bonus)
        for (int64_t i = 0; i < K; i++) {
            dq[i] = dot(next + i * V, d_o, V);
            add(dS + i * V, q[i], d_o, V);
        }

    /* What the pair writes. */
    columns(dv, dS, k, K, V);
    if (delta) {
        for (int64_t j = 0; j < V; j++) u[j] = v[j];
        for (int64_t i = 0; i < K; i++) add(u, -b[i] * decay(s, p, i), S + i * V, V);
    }
    for (int64_t i = 0; i < K; i++) dk[i] = dot(dS + i * V, delta ? u : v, V);
    if (a) {
        columns(u, S, b, K, V);
        columns(du, dS, a, K, V);
        for (int64_t i = 0; i < K; i++) s->da[p.at * K + i] = dot(dS + i * V, u, V);
    }

    /* Right factors, decays, and the state before. */
    for (int64_t i = 0; i < K; i++) {
        const REAL *each = decays(s, p, i), *S_i = S + i * V;
        REAL *dS_i = dS + i * V, w = decay(s, p, i);
        if (delta) {
            s->db[p.at * K + i] = -w * dot(S_i, dv, V);
            add(dS_i, -b[i], dv, V);
        }
        REAL *to = s->dw + p.position * s->G;
        if (each) {
            for (int64_t j = 0; j < V; j++) to[i * V + j] = S_i[j] * dS_i[j];
            for (int64_t j = 0; j < V; j++) dS_i[j] *= each[j];
        } else if (s->G && p.first) {
            REAL dw = dot(S_i, dS_i, V), *sum = to + (s->G > 1 ? i : 0);
            *sum = s->G > 1 || i == 0 ? dw : *sum + dw;
            for (int64_t j = 0; j < V; j++) dS_i[j] *= w;
        }
        if (a) {
            s->db[p.at * K + i] = dot(S_i, du, V);
            add(dS_i, b[i], du, V);
        }
    }

    /* The read with a bonus. */
    if (s->bonus) {
        const REAL *bonus = s->bonus + head * K;
        REAL shared = dot(v, d_o, V);
        add(dv, of_bonus(s, head, p), d_o, V);
        for (int64_t i = 0; i < K; i++) {
            dq[i] = dot(S + i * V, d_o, V) + bonus[i] * k[i] * shared;
            dk[i] += bonus[i] * q[i] * shared;
            s->dbonus[head * K + i] += k[i] * q[i] * shared;
            add(dS + i * V, q[i], d_o, V);
        }
    }
}

/* Gradients of heads `head` to `end`. */
void backward(const struct call *s, int64_t head, int64_t end, int64_t worker) {
    int64_t size = s->K * s->V, parts = (s->P + s->C - 1) / s->C;
    REAL *S = s->states + worker * (s->C + 2) * size, *dS = S + (s->C + 1) * size;
    REAL u[s->V];
    unsigned before_call = flush_subnormals();

    for (; head < end; head++) {
        memset(dS, 0, size * sizeof(REAL));
        if (s->bonus) memset(s->dbonus + head * s->K, 0, s->K * sizeof(REAL));
        for (int64_t part = parts - 1; part >= 0; part--) {
            int64_t first = part * s->C, count = s->P - first < s->C ? s->P - first : s->C;
            memcpy(S, s->kept + (head * parts + part) * size, size * sizeof(REAL));
            for (int64_t n = 0; n < count; n++)
                advance(s, pair_at(s, head, first + n), S + n * size, S + (n + 1) * size, u);
            for (int64_t n = count - 1; n >= 0; n--)
                retreat(s, head, pair_at(s, head, first + n), S + n * size, S + (n + 1) * size, dS);
        }
    }
    restore(before_call);
}
