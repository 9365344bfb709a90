// Backward of a chunk: what Backward.compute does once a block, for all 16 positions in one launch. After common.cuh.
//
// Grid: (C, clusters of a layer, layers), in clusters of C programs. Clusters of a layer share its tiles of sequences.
//
// A position, last first, has five steps, each followed by a barrier of the cluster. A program
//   1. pulls the gradients of ROWS pairs from the chunk's later queries, and takes
//      them through the norm of keys:                                                     dkv of whole rows
//   2. multiplies all rows by its columns of ``kv``, and adds to d through the norm:      dy
//   3. multiplies by its hidden columns of ``down``, takes them through GELU, and
//      multiplies by its hidden columns of ``up``:                                        parts of all columns
//   4. adds up the parts of its columns, and adds to d through the norm:                  du
//   5. multiplies by its columns of ``out``:                                              da
// The right-hand side is what it gives to the other programs. What pairs get from all queries but that of the next
// position is computed while programs wait, for the next pair. What lies in memory is brought into the second-level
// cache a position before it is read.
//
// The gradient through n = x r needs the sum of n dn over a row. If y = W n, and dn = W^T dy, that is the sum of y dy,
// which is known before the product: sum n_z dn_z = sum k_raw dk_raw + sum v dv, the first of which the norm of keys
// makes zero; and sum n_u dn_u = sum h dh.

struct Arguments {  // pointers to the first layer at work, and to the chunk's first position; see buffers.py
  const float *dk, *dv, *slopes;                         // dk, dv: (layers, group, B, D)
  const bf16 *out, *up, *down, *kv;                      // transposed matrices (layers, inputs, outputs)
  const bf16 *q, *k, *v, *a, *n_u, *n_z;                 // this and the following: (layers, T, B, ..)
  const float *lse, *r_u, *r_z, *r_k;
  bf16* da;
  float* delta;
  float* d;                                              // this and the following: (layers, group, B, ..)
  bf16 *dkv, *dy, *h, *dh, *du;
  char* room;                                            // for what programs exchange
  i64 kept_stride, group_stride, kv_stride, room_stride;  // rows between layers, elements, bytes between clusters
  int B, tiles;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_backward(const __grid_constant__ Arguments args) {
  const int B = args.B, c = blockIdx.x, layer = blockIdx.z;
  const int lane = threadIdx.x % 32, j = lane % 4;
  const int warp = uniform(threadIdx.x / 32), m = warp % MT, p = warp / MT;

  // Shared memory: slices of the matrices, parts of sums, hidden columns, sums of units, means of rows.
  extern __shared__ uint4 shared[];
  uint4* const kv_w = shared;
  uint4* const down_w = kv_w + NT * 2 * DB * 32;
  uint4* const up_w = down_w + HT * DB * 32;
  uint4* const out_w = up_w + (D / 8) * HB * 32;
  float4* const part_room = (float4*)(out_w + NT * DB * 32);
  uint2* const hidden = (uint2*)(part_room + ROUND * MT * (NP - 1) * 32);
  uint2* const after_gelu = (uint2*)part_room;  // between its uses for parts
  float2* const unit_sums = (float2*)(hidden + MT * HB * 128);
  float* const h_means = (float*)(unit_sums + ROWS * BLOCKS);

  load_slice(kv_w, args.kv + layer * args.kv_stride, 2 * D, c * COLS, NT, 0, 2 * DB);
  load_slice(down_w, args.down + (i64)layer * F * D, D, c * HID, HT, 0, DB);
  load_slice(up_w, args.up + (i64)layer * D * F, F, 0, D / 8, c * HID, HB);
  load_slice(out_w, args.out + (i64)layer * D * D, D, c * COLS, NT, 0, DB);

  // What the cluster's programs exchange, besides da.
  char* const room = args.room + (i64)(blockIdx.z * gridDim.y + blockIdx.y) * args.room_stride;
  uint2* const dkv_rows = (uint2*)room;
  uint2 *const dy_rows = dkv_rows + M * 2 * D / 4, *const du_rows = dy_rows + M * D / 4;
  float *const z_means = (float*)(du_rows + M * D / 4), *const h_sums = z_means + M;
  uint2* const parts = (uint2*)(h_sums + M * PARTS_OF_F);

  for (int tile = blockIdx.y; tile < args.tiles; tile += gridDim.y) {
    const int first = tile * M;  // sequence
    const Rows<Arguments> rows{args, first, B, layer, m, lane};
    const Units units{first, B, c, warp, lane};

    // Attention: a lane takes the queries 4 i + quarter after the next one. Of the sums over queries it keeps 4 of its
    // channels, of dk (quarters 0 and 1) or dv.
    const unsigned quarter = units.quarter, eight = units.eight, half = quarter % 2, four = eight + 4 * half;
    const bool is_value = quarter >= 2;
    const unsigned on_query = quarter * B * D, on_head = quarter * B * H;  // ``quarter`` positions on
    float pulled[UNITS][4], next_weight[UNITS];

    // What the pair at t gets from later chunks and from the queries after t + 1, and the weight of query t + 1.
    auto pull_early = [&](int u, int t) {
      if (!units.exists(u)) return;
      const int later = CHUNK - 2 - t;
      const unsigned at = units.at(u), at_head = units.at_head(u);
      const float slope = args.slopes[units.head(u)] * LOG2E;
      const uint4 k = ldcg4(args.k + rows.kept(t) * D + at), v = ldcg4(args.v + rows.kept(t) * D + at);
      const uint4 past = ldcg4((is_value ? args.dv : args.dk) + rows.group(t) * D + (at + 4 * half));

      uint4 q[4], da[4], next = make_uint4(0, 0, 0, 0);
      float lse[4], delta[4], next_lse = 0.f;
      if (later >= 0) {
        next = ldcg4(args.q + rows.kept(t + 1) * D + at);
        next_lse = ldcgf(args.lse + rows.kept(t + 1) * H + at_head);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        q[i] = da[i] = make_uint4(0, 0, 0, 0);
        lse[i] = delta[i] = 0.f;
        if (4 * i + (int)quarter < later) {
          const i64 row = rows.kept(t + 2 + 4 * i);
          q[i] = ldcg4(args.q + row * D + (at + on_query));
          da[i] = ldcg4(args.da + row * D + (at + on_query));
          lse[i] = ldcgf(args.lse + row * H + (at_head + on_head));
          delta[i] = ldcgf(args.delta + row * H + (at_head + on_head));
        }
      }

      // Weights, gradients of logits, and sums over queries.
      float dk[8] = {0, 0, 0, 0, 0, 0, 0, 0}, dv[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (4 * i < later) {
          const float qk = sum_lanes<1, K / 8>(dot(q[i], k)), dav = sum_lanes<1, K / 8>(dot(da[i], v));
          float weight = exp2_(qk * (LOGIT_SCALE * LOG2E) - slope * (2 + 4 * i + (int)quarter) - lse[i]);
          if (4 * i + (int)quarter >= later) weight = 0.f;
          add_scaled(dk, weight * (dav - delta[i]), q[i]);
          add_scaled(dv, weight, da[i]);
        }
      next_weight[u] = 0.f;
      if (later >= 0) {
        const float qk = sum_lanes<1, K / 8>(dot(next, k));
        next_weight[u] = exp2_(qk * (LOGIT_SCALE * LOG2E) - slope - next_lse);
      }

      // Sums over the quarters: dk stays in the lower two, dv in the upper two; then channels 4 half .. 4 half + 3.
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float other = __shfl_xor_sync(~0u, is_value ? dk[e] : dv[e], 16);
        dk[e] = (is_value ? dv[e] : dk[e]) + other;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float other = __shfl_xor_sync(~0u, half ? dk[e] : dk[4 + e], 8);
        pulled[u][e] = (half ? dk[4 + e] : dk[e]) + other;
      }
      pulled[u][0] += __uint_as_float(past.x), pulled[u][1] += __uint_as_float(past.y);
      pulled[u][2] += __uint_as_float(past.z), pulled[u][3] += __uint_as_float(past.w);
    };
    // Every third unit from ``start`` on.
    auto pull_thirds = [&](int start, int t) {
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (u % 3 == start && t >= 0) pull_early(u, t);
    };

    // What the last step of attention needs: of query t + 1 its channels and attention outputs, of pair t its values
    // and its key's reciprocal root.
    uint4 next_a[UNITS], values[UNITS];
    uint2 next_q[UNITS], pair[UNITS];  // 4 channels; those of the key or of the value
    float pair_r[UNITS];
    auto load_next = [&](int t) {
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (units.exists(u)) {
          if (t >= 0) {
            values[u] = ldcg4(args.v + rows.kept(t) * D + units.at(u));
            if (QK_NORM) pair_r[u] = ldcgf(args.r_k + rows.kept(t) + units.sequence(u));
            pair[u] = ldcg2((is_value ? args.v : args.k) + rows.kept(t) * D + (units.at(u) + 4 * half));
          }
          if (t + 1 < CHUNK) {
            next_a[u] = ldcg4(args.a + rows.kept(t + 1) * D + units.at(u));
            next_q[u] = ldcg2(args.q + rows.kept(t + 1) * D + (units.at(u) + 4 * half));
          }
        }
    };

    // da of the query at t, and its delta, from it and ``next_a``.
    auto load_da = [&](int u, int t) {
      return ldcg4(args.da + rows.kept(t) * D + units.at(u));
    };
    auto put_delta = [&](int u, int t, uint4 da) {
      const float delta = sum_lanes<1, K / 8>(dot(da, next_a[u]));
      if (units.live(u) && quarter == 0 && eight % K == 0)
        stcgf(args.delta + rows.kept(t) * H + units.at_head(u), delta);
      return delta;
    };

    // Bring the program's rows of what position t reads into the second-level cache.
    auto read_ahead = [&](int t) {
      if (t >= 0 && threadIdx.x == THREADS - 32) {  // of the last warp
        units.prefetch_rows(args.q + rows.kept(t) * D, D);
        units.prefetch_rows(args.k + rows.kept(t) * D, D);
        units.prefetch_rows(args.v + rows.kept(t) * D, D);
        units.prefetch_rows(args.a + rows.kept(t) * D, D);
        units.prefetch_rows(args.n_z + rows.kept(t) * D, D);
        units.prefetch_rows(args.n_u + rows.kept(t) * D, D);
        units.prefetch_rows(args.dk + rows.group(t) * D, D);
        units.prefetch_rows(args.dv + rows.group(t) * D, D);
        units.prefetch_rows(args.d + rows.group(t) * D, D);
        units.prefetch_rows(args.h + rows.group(t) * F, F);
      }
    };

    float d[own_tiles(NT)][4];  // own columns: gradient of the residual stream
    const Columns columns{rows.sequence_g, rows.sequence_g8, c, p, lane};

    // Own columns of rows: for other programs, and row by row.
    auto put_rows = [&](uint2* to, float by, const float (&y)[own_tiles(NT)][4]) {
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i))
          stcg2(to + order_of_products(DB, m, c * NT + p + NP * i),
                make_uint2(pack(by * y[i][0], by * y[i][1]), pack(by * y[i][2], by * y[i][3])));
    };
    auto keep_rows = [&](bf16* to, float by, const float (&y)[own_tiles(NT)][4]) {
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          if (rows.live_g) stcg1(to + columns.at_g + columns.step * i, pack(by * y[i][0], by * y[i][1]));
          if (rows.live_g8) stcg1(to + columns.at_g8 + columns.step * i, pack(by * y[i][2], by * y[i][3]));
        }
    };
    // Normed rows of own columns, and reciprocal roots.
    unsigned n[own_tiles(NT)][2];
    float r_g, r_g8;
    auto load_normed = [&](const bf16* from, const float* r, int t) {
      from += rows.kept(t) * D, r += rows.kept(t);
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          n[i][0] = ldcg1(from + columns.at_g + columns.step * i);
          n[i][1] = ldcg1(from + columns.at_g8 + columns.step * i);
        }
      r_g = ldcgf(r + rows.sequence_g), r_g8 = ldcgf(r + rows.sequence_g8);
    };
    // Add the gradient through a norm, dn its gradient and mean_g, mean_g8 the means of n dn.
    auto add_through_norm = [&](const float (&dn)[own_tiles(NT)][4], float mean_g, float mean_g8) {
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++) {
        d[i][0] += r_g * (dn[i][0] - mean_g * low(n[i][0])), d[i][1] += r_g * (dn[i][1] - mean_g * high(n[i][0]));
        d[i][2] += r_g8 * (dn[i][2] - mean_g8 * low(n[i][1])), d[i][3] += r_g8 * (dn[i][3] - mean_g8 * high(n[i][1]));
      }
    };

    read_ahead(CHUNK - 2);
#pragma unroll
    for (int start = 0; start < 3; start++) pull_thirds(start, CHUNK - 1);
    load_next(CHUNK - 1);
    if (tile == blockIdx.y) arrange_slices(shared);  // on their way until now

#pragma unroll 1
    for (int t = CHUNK - 1; t >= 0; t--) {
      read_ahead(t - 2);

      // 1. Pair t: query t + 1, then the norm of its key.
      uint2 dkv[UNITS];
      {
        uint4 da[UNITS];
        if (t + 1 < CHUNK) {
#pragma unroll
          for (int u = 0; u < UNITS; u++)
            if (units.exists(u)) da[u] = load_da(u, t + 1);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++)
          if (units.exists(u)) {
            if (t + 1 < CHUNK) {
              const float dav = sum_lanes<1, K / 8>(dot(da[u], values[u])), delta = put_delta(u, t + 1, da[u]);
              const float by = is_value ? next_weight[u] : next_weight[u] * (dav - delta);
              const unsigned y0 = is_value ? (half ? da[u].z : da[u].x) : next_q[u].x;
              const unsigned y1 = is_value ? (half ? da[u].w : da[u].y) : next_q[u].y;
              pulled[u][0] += by * low(y0), pulled[u][1] += by * high(y0);
              pulled[u][2] += by * low(y1), pulled[u][3] += by * high(y1);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) pulled[u][e] *= is_value ? 1.f : LOGIT_SCALE;
            const float sum = sum_lanes<1, 16>(pulled[u][0] * low(pair[u].x) + pulled[u][1] * high(pair[u].x) +
                                               pulled[u][2] * low(pair[u].y) + pulled[u][3] * high(pair[u].y));
            const float of_values = __shfl_xor_sync(~0u, sum, 16);
            if (lane == 0) unit_sums[units.number(u)] = make_float2(sum, of_values);  // k dk and v dv
          }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < UNITS; u++)
          if (units.exists(u)) {
            const int unit = units.number(u), row = units.row(u);
            float mean_k = 0.f, mean_v = 0.f;
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
              const float2 sums = unit_sums[unit / BLOCKS * BLOCKS + i];
              mean_k += sums.x * (1.f / D), mean_v += sums.y * (1.f / D);
            }
            if (QK_NORM && !is_value) {
              const float r = pair_r[u];
              pulled[u][0] = r * (pulled[u][0] - mean_k * low(pair[u].x));
              pulled[u][1] = r * (pulled[u][1] - mean_k * high(pair[u].x));
              pulled[u][2] = r * (pulled[u][2] - mean_k * low(pair[u].y));
              pulled[u][3] = r * (pulled[u][3] - mean_k * high(pair[u].y));
            }
            dkv[u] = make_uint2(pack(pulled[u][0], pulled[u][1]), pack(pulled[u][2], pulled[u][3]));
            unsigned* const to =
                (unsigned*)dkv_rows + order_of_products_of_row(2 * DB, row, is_value * D + units.block(u) + four);
            stcg1(to, dkv[u].x), stcg1(to + 2, dkv[u].y);
            if (lane == 0 && unit % BLOCKS == 0) stcgf(z_means + row, QK_NORM ? mean_v : mean_k + mean_v);
          }
      }
      arrive();
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (units.exists(u) && units.live(u))
          stcg2(args.dkv + ((rows.group(t) + units.sequence(u)) * 2 + is_value) * D + units.block(u) + four, dkv[u]);
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          const float2 y_g = ldcgf2(args.d + rows.group(t) * D + columns.at_g + columns.step * i);
          const float2 y_g8 = ldcgf2(args.d + rows.group(t) * D + columns.at_g8 + columns.step * i);
          d[i][0] = y_g.x, d[i][1] = y_g.y, d[i][2] = y_g8.x, d[i][3] = y_g8.y;
        }
      if (PERSISTENT_NORM) load_normed(args.n_z, args.r_z, t);
      pull_thirds(0, t - 1);
      wait();

      // 2. d += gradient through n_z; dy = scale d
      {
        Part<2 * DB> part;
        part.load(dkv_rows, m, p);
        const float mean_g = PERSISTENT_NORM ? ldcgf(z_means + rows.g) : 0.f;
        const float mean_g8 = PERSISTENT_NORM ? ldcgf(z_means + rows.g8) : 0.f;
        float sum[NT][4], own[own_tiles(NT)][4];
        zero(sum);
        part.multiply(sum, kv_w, p);
        add_parts<NT>(own, sum, part_room, m, p);
        if (PERSISTENT_NORM) {
          add_through_norm(own, mean_g, mean_g8);
        } else {
#pragma unroll
          for (int i = 0; i < own_tiles(NT); i++)
#pragma unroll
            for (int e = 0; e < 4; e++) d[i][e] += own[i][e];
        }
        put_rows(dy_rows, args.scale, d);
      }
      arrive();
      keep_rows(args.dy + rows.group(t) * D, args.scale, d);
      constexpr int ROUNDS = HT / ROUND;
      unsigned h[ROUNDS][own_tiles(ROUND)][2];  // own tiles of the hidden layer, before and after GELU
      auto hidden_tile = [&](int round, int i) { return round * ROUND + p + NP * i; };
      const unsigned hidden_g = rows.sequence_g * F + c * HID + 8 * p + 2 * j;
      const unsigned hidden_g8 = rows.sequence_g8 * F + c * HID + 8 * p + 2 * j;
      auto hidden_step = [&](int round, int i) { return 8 * (round * ROUND + NP * i); };
      const bf16* const h_rows = args.h + rows.group(t) * F;
      auto hidden_owned = [&](int i) { return p + NP * i < ROUND; };
#pragma unroll
      for (int round = 0; round < ROUNDS; round++)
#pragma unroll
        for (int i = 0; i < own_tiles(ROUND); i++)
          if (hidden_owned(i)) {
            h[round][i][0] = ldcg1(h_rows + hidden_g + hidden_step(round, i));
            h[round][i][1] = ldcg1(h_rows + hidden_g8 + hidden_step(round, i));
          }
      wait();

      // 3. Parts of the gradient of n_u
      {
        Part<DB> part;
        part.load(dy_rows, m, p);
        float sum_g = 0.f, sum_g8 = 0.f;  // h dh
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          float sum[ROUND][4], own[own_tiles(ROUND)][4];
          zero(sum);
          part.multiply(sum, down_w + round * ROUND * DB * 32, p);
          if (round) __syncthreads();
          add_parts<ROUND>(own, sum, part_room, m, p);
#pragma unroll
          for (int i = 0; i < own_tiles(ROUND); i++)
            if (hidden_owned(i)) {
              const float before[4] = {low(h[round][i][0]), high(h[round][i][0]), low(h[round][i][1]),
                                       high(h[round][i][1])};
              float after[4];
#pragma unroll
              for (int e = 0; e < 4; e++) {
                float bell;
                const float below = normal_cdf(before[e], bell);
                after[e] = before[e] * below;
                own[i][e] *= below + before[e] * bell * 0.3989422804014327f;
              }
              sum_g += own[i][0] * before[0] + own[i][1] * before[1];
              sum_g8 += own[i][2] * before[2] + own[i][3] * before[3];
              h[round][i][0] = pack(after[0], after[1]), h[round][i][1] = pack(after[2], after[3]);
              hidden[order_of_products(HB, m, hidden_tile(round, i))] =
                  make_uint2(pack(own[i][0], own[i][1]), pack(own[i][2], own[i][3]));
            }
        }
        put_sums<PARTS_OF_F>(h_sums, sum_g, sum_g8, c, m, p);
        __syncthreads();
#pragma unroll
        for (int round = 0; round < ROUNDS; round++)
#pragma unroll
          for (int i = 0; i < own_tiles(ROUND); i++)
            if (hidden_owned(i))
              after_gelu[order_of_products(HB, m, hidden_tile(round, i))] = make_uint2(h[round][i][0], h[round][i][1]);
        multiply_hidden(parts, hidden, up_w, c);
      }
      arrive();
      keep_hidden(args.dh + rows.group(t) * F, hidden, first, B, c);
      keep_hidden(args.h + rows.group(t) * F, after_gelu, first, B, c);
      load_normed(args.n_u, args.r_u, t);
      pull_thirds(1, t - 1);
      wait();

      // 4. d += gradient through n_u; du = scale d
      {
        float own[own_tiles(NT)][4];
        Means<PARTS_OF_F> means;
        means.load(h_sums);
        add_hidden(own, parts, c, m, p);
        means.add<false>(h_means);
        __syncthreads();
        add_through_norm(own, h_means[rows.g], h_means[rows.g8]);
        put_rows(du_rows, args.scale, d);
      }
      arrive();
      keep_rows(args.du + rows.group(t) * D, args.scale, d);
#pragma unroll
      for (int i = 0; i < own_tiles(NT); i++)
        if (columns.owned(i)) {
          if (rows.live_g) stcgf2(args.d + rows.group(t) * D + columns.at_g + columns.step * i, d[i][0], d[i][1]);
          if (rows.live_g8) stcgf2(args.d + rows.group(t) * D + columns.at_g8 + columns.step * i, d[i][2], d[i][3]);
        }
      pull_thirds(2, t - 1);
      wait();

      // 5. da = out^T du
      {
        Part<DB> part;
        part.load(du_rows, m, p);
        float sum[NT][4], own[own_tiles(NT)][4];
        zero(sum);
        part.multiply(sum, out_w, p);
        add_parts<NT>(own, sum, part_room, m, p);
        keep_rows(args.da + rows.kept(t) * D, 1.f, own);
      }
      arrive();
      load_next(t - 1);
      wait();
    }

    // delta of the first query
#pragma unroll
    for (int u = 0; u < UNITS; u++)
      if (units.exists(u)) put_delta(u, 0, load_da(u, 0));
  }
}
