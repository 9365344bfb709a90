// Forward of a chunk: what Forward.compute does once a block, for all 16 positions in one launch. After common.cuh.
//
// Grid: (C, clusters of a layer, layers), in clusters of C programs. Clusters of a layer share its tiles of sequences.
//
// A position has five steps, each followed by a barrier of the cluster. A program
//   1. lets ROWS queries attend to the chunk's earlier pairs:                             a of whole rows
//   2. multiplies all rows by its columns of ``out``, and adds the branch to x:           u, sums of u^2
//   3. normalises, multiplies by its hidden columns of ``up``, applies GELU, and
//      multiplies by its hidden columns of ``down``:                                      parts of all columns
//   4. adds up the parts of its columns, and adds the branch to u:                        z, sums of z^2
//   5. normalises, multiplies by its columns of ``kv``:                                   raw keys, values
// The right-hand side is what it gives to the other programs. A row is normalised after its product, because it is the
// product's only factor that needs the whole row. While they wait, programs store what the backward needs, and let the
// next queries attend to all pairs but the newest one. What lies in memory is brought into the second-level cache a
// position before it is read.

struct Arguments {  // pointers to the first layer at work, and to the chunk's first position; see buffers.py
  const float *x, *m, *l, *o, *slopes;                   // x, m, l, o: (layers, group, B, ..)
  const bf16 *out, *up, *down, *kv;                      // matrices (layers, outputs, inputs)
  const bf16* q;                                         // this and the following: (layers, T, B, ..)
  bf16 *k, *v, *a, *n_u, *n_z;
  float *lse, *r_u, *r_z, *r_k;
  float* z;                                              // (layers, group, B, D)
  char* room;                                            // for what programs exchange
  i64 kept_stride, group_stride, kv_stride, room_stride;  // rows between layers, elements, bytes between clusters
  int B, tiles;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_forward(const __grid_constant__ Arguments args) {
  const int B = args.B, c = blockIdx.x, layer = blockIdx.z;
  const int lane = threadIdx.x % 32, j = lane % 4;
  const int warp = uniform(threadIdx.x / 32), m = warp % MT, p = warp / MT;

  // Shared memory: slices of the matrices, parts of sums, hidden columns, reciprocal roots of rows.
  extern __shared__ uint4 shared[];
  uint4* const out_w = shared;
  uint4* const up_w = out_w + NT * DB * 32;
  uint4* const down_w = up_w + HT * DB * 32;
  uint4* const kv_w = down_w + (D / 8) * HB * 32;
  float4* const part_room = (float4*)(kv_w + 2 * NT * DB * 32);
  uint2* const hidden = (uint2*)(part_room + ROUND * MT * (NP - 1) * 32);
  float* const r_u = (float*)(hidden + MT * HB * 128);
  float *const r_z = r_u + M, *const r_k = r_z + M;

  load_slice(out_w, args.out + (i64)layer * D * D, D, c * COLS, NT, 0, DB);
  load_slice(up_w, args.up + (i64)layer * F * D, D, c * HID, HT, 0, DB);
  load_slice(down_w, args.down + (i64)layer * D * F, F, 0, D / 8, c * HID, HB);
  load_slice(kv_w, args.kv + layer * args.kv_stride, D, c * COLS, NT, 0, DB);
  load_slice(kv_w + NT * DB * 32, args.kv + layer * args.kv_stride, D, D + c * COLS, NT, 0, DB);

  // What the cluster's programs exchange.
  char* const room = args.room + (i64)(blockIdx.z * gridDim.y + blockIdx.y) * args.room_stride;
  uint2 *const a_rows = (uint2*)room, *const u_rows = a_rows + M * D / 4, *const z_rows = u_rows + M * D / 4;
  bf16* const key_rows = (bf16*)(z_rows + M * D / 4);
  float* const u_sums = (float*)(key_rows + M * D);
  float *const z_sums = u_sums + M * PARTS_OF_D, *const k_sums = z_sums + M * PARTS_OF_D;
  uint2* const parts = (uint2*)(k_sums + M * PARTS_OF_D);

  for (int tile = blockIdx.y; tile < args.tiles; tile += gridDim.y) {
    const int first = tile * M;  // sequence
    const Rows<Arguments> rows{args, first, B, layer, m, lane};
    const Units units{first, B, c, warp, lane};

    // Attention: a lane takes the chunk's positions 4 i + quarter. Of the sums over positions it keeps the channels
    // 2 quarter and 2 quarter + 1 of its own.
    const unsigned quarter = units.quarter, eight = units.eight;
    const unsigned on_pair = quarter * B * D;  // ``quarter`` positions on
    float top[UNITS], weight[UNITS], value[UNITS][2];  // softmax state: m, l and o
    float slope[UNITS];                                // of the lane's head
#pragma unroll
    for (int u = 0; u < UNITS; u++) slope[u] = units.exists(u) ? args.slopes[units.head(u)] * LOG2E : 0.f;

    // Softmax state of the query at t over all pairs but the newest one, that of t - 1.
    auto attend_early = [&](int u, int t) {
      if (!units.exists(u)) return;
      const int earlier = t - 1;
      const i64 state = rows.group(t);
      const unsigned at = units.at(u), at_head = units.at_head(u);
      const uint4 q = ldcg4(args.q + rows.kept(t) * D + at);
      const float before = ldcgf(args.m + state * H + at_head);
      float most = before, l = ldcgf(args.l + state * H + at_head), o[8];
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const uint4 y = ldcg4(args.o + state * D + at + e);
        o[e] = __uint_as_float(y.x), o[e + 1] = __uint_as_float(y.y);
        o[e + 2] = __uint_as_float(y.z), o[e + 3] = __uint_as_float(y.w);
      }
      uint4 k[4], v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        k[i] = v[i] = make_uint4(0, 0, 0, 0);
        if (4 * i + (int)quarter < earlier) {
          k[i] = ldcg4(args.k + rows.kept(4 * i) * D + (at + on_pair));
          v[i] = ldcg4(args.v + rows.kept(4 * i) * D + (at + on_pair));
        }
      }

      // Logits.
      float s[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[i] = -1e30f;
        if (4 * i < earlier) {
          const float qk = sum_lanes<1, K / 8>(dot(q, k[i]));
          if (4 * i + (int)quarter < earlier) s[i] = qk * (LOGIT_SCALE * LOG2E) + slope[u] * (4 * i + (int)quarter - t);
          most = fmaxf(most, s[i]);
        }
      }
      most = max_lanes<8, 32>(most);

      // Weights and sums; the state before counts once.
      const float shrink = quarter ? 0.f : exp2_(before - most);
      l *= shrink;
#pragma unroll
      for (int e = 0; e < 8; e++) o[e] *= shrink;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (4 * i < earlier) {
          const float weight_i = exp2_(s[i] - most);
          l += weight_i;
          add_scaled(o, weight_i, v[i]);
        }
      top[u] = most;
      weight[u] = sum_lanes<8, 32>(l);
#pragma unroll
      for (int e = 0; e < 4; e++) {  // halves of the channels, then quarters of them
        const float other = __shfl_xor_sync(~0u, quarter < 2 ? o[4 + e] : o[e], 16);
        o[e] = (quarter < 2 ? o[e] : o[4 + e]) + other;
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float other = __shfl_xor_sync(~0u, quarter % 2 ? o[e] : o[2 + e], 8);
        value[u][e] = (quarter % 2 ? o[2 + e] : o[e]) + other;
      }
    };
    // Every third unit from ``start`` on.
    auto attend_thirds = [&](int start, int t) {
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (u % 3 == start && t < CHUNK) attend_early(u, t);
    };
    uint4 query[UNITS];
    auto load_queries = [&](int t) {
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (units.exists(u)) query[u] = ldcg4(args.q + rows.kept(t) * D + units.at(u));
    };

    // Bring the program's rows of what position t reads into the second-level cache.
    auto read_ahead = [&](int t) {
      if (t < CHUNK && threadIdx.x == THREADS - 32) {  // of the last warp
        units.prefetch_rows(args.q + rows.kept(t) * D, D);
        units.prefetch_rows(args.x + rows.group(t) * D, D);
        units.prefetch_rows(args.o + rows.group(t) * D, D);
      }
    };

    // Own columns: residual stream, and keys before their norm.
    float x[own_tiles(NT)][4], key[own_tiles(ROUND)][4];
    const Columns columns{rows.sequence_g, rows.sequence_g8, c, p, lane};

    // Rows y of own columns for other programs, and sums of squares.
    auto put_rows = [&](uint2* to, float* sums, const float (&y)[own_tiles(NT)][4]) {
      float square_g = 0.f, square_g8 = 0.f;
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          stcg2(to + order_of_products(DB, m, c * NT + p + NP * i),
                make_uint2(pack(y[i][0], y[i][1]), pack(y[i][2], y[i][3])));
          square_g += y[i][0] * y[i][0] + y[i][1] * y[i][1];
          square_g8 += y[i][2] * y[i][2] + y[i][3] * y[i][3];
        }
      put_sums<PARTS_OF_D>(sums, square_g, square_g8, c, m, p);
    };
    // Normed rows of own columns, and their reciprocal roots (r null: rows without a norm), for the backward.
    auto keep_rows = [&](bf16* n, float* r, const float (&y)[own_tiles(NT)][4], const float* roots, int t) {
      const float by_g = r ? roots[rows.g] : 1.f, by_g8 = r ? roots[rows.g8] : 1.f;
      n += rows.kept(t) * D;
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          if (rows.live_g) stcg1(n + columns.at_g + columns.step * i, pack(by_g * y[i][0], by_g * y[i][1]));
          if (rows.live_g8) stcg1(n + columns.at_g8 + columns.step * i, pack(by_g8 * y[i][2], by_g8 * y[i][3]));
        }
      if (r && c == 0 && p == 0 && j == 0) {
        if (rows.live_g) stcgf(r + rows.kept(t) + rows.sequence_g, by_g);
        if (rows.live_g8) stcgf(r + rows.kept(t) + rows.sequence_g8, by_g8);
      }
    };
    // Keys of position t, whose sums of squares are complete.
    auto keep_keys = [&](int t) {
      if (QK_NORM) {
        Means<PARTS_OF_D> means;
        means.load(k_sums);
        means.add<true>(r_k);
      }
      __syncthreads();
      float keys[own_tiles(NT)][4];
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
#pragma unroll
        for (int e = 0; e < 4; e++) keys[i][e] = key[i][e];
      keep_rows(args.k, QK_NORM ? args.r_k : nullptr, keys, r_k, t);
    };

    read_ahead(1);
#pragma unroll
    for (int start = 0; start < 3; start++) attend_thirds(start, 0);
    if (tile == blockIdx.y) arrange_slices(shared);  // on their way until now

#pragma unroll 1
    for (int t = 0; t < CHUNK; t++) {
      read_ahead(t + 2);

      // 1. Attention to the newest pair, whose key is not normalised yet.
      uint4 k[UNITS];
      unsigned v[UNITS];
      if (t > 0) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
          if (units.exists(u)) {
            k[u] = ldcg4(key_rows + units.row(u) * D + units.block(u) + eight);
            v[u] = ldcg1(args.v + rows.kept(t - 1) * D + (units.at(u) + 2 * quarter));
          }
        keep_keys(t - 1);
      }
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (units.exists(u)) {
          float most = top[u], l = weight[u], o[2] = {value[u][0], value[u][1]};
          if (t > 0) {
            const float by = (QK_NORM ? r_k[units.row(u)] : 1.f) * (LOGIT_SCALE * LOG2E);
            const float s = by * sum_lanes<1, K / 8>(dot(query[u], k[u])) - slope[u];
            most = fmaxf(most, s);
            const float shrink = exp2_(top[u] - most), weight_s = exp2_(s - most);
            l = l * shrink + weight_s;
            o[0] = o[0] * shrink + weight_s * low(v[u]);
            o[1] = o[1] * shrink + weight_s * high(v[u]);
          }
          const unsigned a = pack(o[0] / l, o[1] / l), column = units.block(u) + eight + 2 * quarter;
          stcg1((unsigned*)a_rows + order_of_products_of_row(DB, units.row(u), column), a);
          if (units.live(u)) {
            stcg1(args.a + rows.kept(t) * D + (units.at(u) + 2 * quarter), a);
            if (quarter == 0 && eight % K == 0) stcgf(args.lse + rows.kept(t) * H + units.at_head(u), most + log2f(l));
          }
        }
      arrive();
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          const float2 y_g = ldcgf2(args.x + rows.group(t) * D + columns.at_g + columns.step * i);
          const float2 y_g8 = ldcgf2(args.x + rows.group(t) * D + columns.at_g8 + columns.step * i);
          x[i][0] = y_g.x, x[i][1] = y_g.y, x[i][2] = y_g8.x, x[i][3] = y_g8.y;
        }
      wait();

      // 2. u = x + scale out a
      {
        Part<DB> part;
        part.load(a_rows, m, p);
        float sum[NT][4], own[own_tiles(NT)][4];
        zero(sum);
        part.multiply(sum, out_w, p);
        add_parts<NT>(own, sum, part_room, m, p);
#pragma unroll
        for (int i = 0; i < own_tiles(NT); i++)
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][e] += args.scale * own[i][e];
        put_rows(u_rows, u_sums, x);
      }
      arrive();
      attend_thirds(0, t + 1);
      wait();

      // 3. Parts of down GELU(up n_u)
      {
        Means<PARTS_OF_D> means;
        means.load(u_sums);
        Part<DB> part;
        part.load(u_rows, m, p);
#pragma unroll
        for (int first_tile = 0; first_tile < HT; first_tile += ROUND) {
          float sum[ROUND][4], own[own_tiles(ROUND)][4], bell;
          zero(sum);
          part.multiply(sum, up_w + first_tile * DB * 32, p);
          if (first_tile)
            __syncthreads();
          else
            means.add<true>(r_u);  // add_parts has the barrier
          add_parts<ROUND>(own, sum, part_room, m, p);
#pragma unroll
          for (int i = 0; i < own_tiles(ROUND); i++)
            if (p + NP * i < ROUND) {
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const float h = r_u[e < 2 ? rows.g : rows.g8] * own[i][e];
                own[i][e] = h * normal_cdf(h, bell);
              }
              hidden[order_of_products(HB, m, first_tile + p + NP * i)] =
                  make_uint2(pack(own[i][0], own[i][1]), pack(own[i][2], own[i][3]));
            }
        }
        __syncthreads();
        multiply_hidden(parts, hidden, down_w, c);
      }
      arrive();
      keep_rows(args.n_u, args.r_u, x, r_u, t);
      attend_thirds(1, t + 1);
      wait();

      // 4. z = u + scale (sum of the parts)
      {
        float own[own_tiles(NT)][4];
        add_hidden(own, parts, c, m, p);
#pragma unroll
        for (int i = 0; i < own_tiles(NT); i++)
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][e] += args.scale * own[i][e];
        put_rows(z_rows, z_sums, x);
      }
      arrive();
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          if (rows.live_g) stcgf2(args.z + rows.group(t) * D + columns.at_g + columns.step * i, x[i][0], x[i][1]);
          if (rows.live_g8) stcgf2(args.z + rows.group(t) * D + columns.at_g8 + columns.step * i, x[i][2], x[i][3]);
        }
      attend_thirds(2, t + 1);
      wait();

      // 5. Pair. Of a warp's tiles, those below NT are keys, the others values.
      {
        Means<PARTS_OF_D> means;
        if (PERSISTENT_NORM) means.load(z_sums);
        Part<DB> part;
        part.load(z_rows, m, p);
        float sum[2 * NT][4], square_g = 0.f, square_g8 = 0.f;
        zero(sum);
        part.multiply(sum, kv_w, p);
        if (PERSISTENT_NORM) means.add<true>(r_z);
        add_parts<2 * NT>(key, sum, part_room, m, p);
        const float by_g = PERSISTENT_NORM ? r_z[rows.g] : 1.f, by_g8 = PERSISTENT_NORM ? r_z[rows.g8] : 1.f;
#pragma unroll
        for (int i = 0; i < own_tiles(2 * NT); i++) {
          key[i][0] *= by_g, key[i][1] *= by_g, key[i][2] *= by_g8, key[i][3] *= by_g8;
          const unsigned y_g = pack(key[i][0], key[i][1]), y_g8 = pack(key[i][2], key[i][3]);
          if (columns.owned(i)) {
            stcg1(key_rows + rows.g * D + columns.first + columns.step * i, y_g);
            stcg1(key_rows + rows.g8 * D + columns.first + columns.step * i, y_g8);
            square_g += key[i][0] * key[i][0] + key[i][1] * key[i][1];
            square_g8 += key[i][2] * key[i][2] + key[i][3] * key[i][3];
          } else if (p + NP * i < 2 * NT) {
            if (rows.live_g) stcg1(args.v + rows.kept(t) * D + columns.at_g + columns.step * i - COLS, y_g);
            if (rows.live_g8) stcg1(args.v + rows.kept(t) * D + columns.at_g8 + columns.step * i - COLS, y_g8);
          }
        }
        if (QK_NORM) put_sums<PARTS_OF_D>(k_sums, square_g, square_g8, c, m, p);
      }
      arrive();
      keep_rows(args.n_z, PERSISTENT_NORM ? args.r_z : nullptr, x, r_z, t);
      if (t + 1 < CHUNK) load_queries(t + 1);
      wait();
    }
    keep_keys(CHUNK - 1);
  }
}
