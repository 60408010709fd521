// What a decoder layer computes besides matrix products, forwards and backwards, for CPUs. Compiled by `kernels.py` for
// the machine, one dtype (BFLOAT16) and one size of a head (DIM, a multiple of 16). Tensors are row-major and
// contiguous; `threads` share the tokens, or the sequences that have a prompt in common.
#include <stdlib.h>

#include "numbers.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROWS 4
#else
#define LANES 4
#define ROWS 4
#endif
typedef float lanes __attribute__((vector_size(LANES * 4)));

static inline float inverse_rms(const number *x, int size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; i++) sum += get(x[i]) * get(x[i]);
    return 1.0f / sqrtf(sum / size + eps);
}

// ---- RMS norm

// `scales` keeps the inverse root mean square of every token.
void norm_forward(const number *x, const number *weight, number *out, float *scales, int64_t tokens, int size,
                  float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *from = x + t * size;
        number *to = out + t * size;
        float scale = scales[t] = inverse_rms(from, size, eps);
#pragma omp simd
        for (int i = 0; i < size; i++) to[i] = put(get(weight[i]) * rounded(get(from[i]) * scale));
    }
}

// The gradient of `x`, with `more` added: that of the residual connection around it. `to_weight` has a row for every
// thread, which the gradient of the weight is added to.
void norm_backward(const number *grad, const number *x, const number *weight, const float *scales, const number *more,
                   number *to_x, float *to_weight, int64_t tokens, int size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *g = grad + t * size, *from = x + t * size, *and = more + t * size;
        number *to = to_x + t * size;
        float *sums = to_weight + omp_get_thread_num() * size, scale = scales[t], along = 0;
#pragma omp simd reduction(+ : along)
        for (int i = 0; i < size; i++) {
            float product = get(g[i]) * get(from[i]) * scale;
            along += product * get(weight[i]);
            sums[i] += product;
        }
        along *= scale / size;
#pragma omp simd
        for (int i = 0; i < size; i++)
            to[i] = put(scale * (get(g[i]) * get(weight[i]) - get(from[i]) * along) + get(and[i]));
    }
}

// ---- gate of an MLP: gate_up is [tokens, 2 * size], inner [tokens, size] = silu(gate) * up

void gate_forward(const number *gate_up, number *inner, int64_t tokens, int size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *gate = gate_up + 2 * t * size, *up = gate + size;
        number *to = inner + t * size;
#pragma omp simd
        for (int i = 0; i < size; i++) to[i] = put(get(gate[i]) / (1.0f + exp_(-get(gate[i]))) * get(up[i]));
    }
}

// Also computes `inner` again, which is not kept between the passes.
void gate_backward(const number *gate_up, const number *grad, number *to_gate_up, number *inner, int64_t tokens,
                   int size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *gate = gate_up + 2 * t * size, *up = gate + size, *g = grad + t * size;
        number *to_gate = to_gate_up + 2 * t * size, *to_up = to_gate + size, *again = inner + t * size;
#pragma omp simd
        for (int i = 0; i < size; i++) {
            float x = get(gate[i]), share = 1.0f / (1.0f + exp_(-x)), open = x * share;
            to_gate[i] = put(get(g[i]) * get(up[i]) * (share + open * (1.0f - share)));
            to_up[i] = put(get(g[i]) * open);
            again[i] = put(open * get(up[i]));
        }
    }
}

// ---- attention within sequences

// A product of small matrices in float: c [m, n] (+)= a [m, k] b [k, n]. Elements of `a` are `down` and `along` apart;
// rows of `b` and `c` are `bs` and `cs` apart. n is a multiple of LANES.
static inline __attribute__((always_inline)) void tile(int rows, int vectors, int k, const float *a, int64_t down,
                                                       int64_t along, const float *b, int64_t bs, float *c, int64_t cs,
                                                       int add) {
    lanes sums[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = (lanes){0};
            if (add) memcpy(&sums[r][v], c + r * cs + v * LANES, sizeof(lanes));
        }
    for (int i = 0; i < k; i++) {
        lanes row[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) memcpy(&row[v], b + i * bs + v * LANES, sizeof(lanes));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float one = a[r * down + i * along];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sums[r][v] += one * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) memcpy(c + r * cs + v * LANES, &sums[r][v], sizeof(lanes));
}

static inline __attribute__((always_inline)) void tile_of(int rows, int vectors, int k, const float *a, int64_t down,
                                                          int64_t along, const float *b, int64_t bs, float *c,
                                                          int64_t cs, int add) {
#define TILE(count)                                                       \
    case count:                                                           \
        tile(count, vectors, k, a, down, along, b, bs, c, cs, add); \
        break;
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if ROWS == 8
        TILE(5) TILE(6) TILE(7) TILE(8)
#endif
    }
}

static void multiply(int m, int n, int k, const float *a, int64_t down, int64_t along, const float *b, int64_t bs,
                     float *c, int64_t cs, int add) {
    for (int row = 0; row < m; row += ROWS) {
        int rows = m - row < ROWS ? m - row : ROWS, column = 0;
        for (; column + 2 * LANES <= n; column += 2 * LANES)
            tile_of(rows, 2, k, a + row * down, down, along, b + column, bs, c + row * cs + column, cs, add);
        if (column < n) tile_of(rows, 1, k, a + row * down, down, along, b + column, bs, c + row * cs + column, cs, add);
    }
}

// A sequence: its own tokens first..last - 1 of the flat layout, after those of a prompt that another one has, if
// `before` is not 0. Those of one `family` share a prompt.
struct span {
    int64_t first, last, prompt, before, family;
};

struct attention {
    const number *qkv;                         // [tokens, heads + 2 * kv_heads, DIM]
    const float *cos, *sin;                    // [tokens, DIM / 2]
    const number *q_norm, *k_norm;             // [DIM], or NULL
    const struct span *spans;                  // families one after the other
    number *out;                               // [tokens, heads, DIM]
    float *rotated;                            // [tokens, heads + kv_heads, DIM], scratch
    float *totals;                             // [tokens, heads], the logarithm of the sum of weights
    const number *grad;                        // from here on for the backward pass; as `out`
    number *to_qkv;                            // as `qkv`
    float *to_rotated;                         // as `rotated`, zero
    float *to_values;                          // [tokens, kv_heads, DIM], zero
    float *to_norms;                           // [threads, 2, DIM], zero
    int64_t tokens, sequences, longest;
    int32_t heads, kv_heads, threads;
    float eps, scale;
};

#define HALF (DIM / 2)
#define QUERIES 64  // of a block; their weights are kept while keys and values get their gradients

static inline int padded(int64_t count) { return (int)((count + LANES - 1) / LANES * LANES); }

// Rows of transposed keys must not fall into the same lines of the cache.
static inline int64_t key_stride(int64_t longest) {
    int64_t stride = padded(longest);
    return stride % 128 ? stride : stride + LANES;
}

static void rotate(const struct attention *s, int64_t token) {
    const int heads = s->heads + s->kv_heads;
    const number *from = s->qkv + token * (heads + s->kv_heads) * DIM;
    const float *cos = s->cos + token * HALF, *sin = s->sin + token * HALF;
    float *to = s->rotated + token * heads * DIM;
    for (int h = 0; h < heads; h++, from += DIM, to += DIM) {
        const number *norm = h < s->heads ? s->q_norm : s->k_norm;
        float x[DIM], scale = norm ? inverse_rms(from, DIM, s->eps) : 1.0f;
#pragma omp simd
        for (int i = 0; i < DIM; i++) x[i] = get(from[i]);
        if (norm)
#pragma omp simd
            for (int i = 0; i < DIM; i++) x[i] *= scale * get(norm[i]);
#pragma omp simd
        for (int i = 0; i < HALF; i++) {
            to[i] = x[i] * cos[i] - x[HALF + i] * sin[i];
            to[HALF + i] = x[HALF + i] * cos[i] + x[i] * sin[i];
        }
    }
}

static void rotate_back(const struct attention *s, int64_t token, float *to_norms) {
    const int heads = s->heads + s->kv_heads;
    const number *from = s->qkv + token * (heads + s->kv_heads) * DIM;
    number *to = s->to_qkv + token * (heads + s->kv_heads) * DIM;
    const float *cos = s->cos + token * HALF, *sin = s->sin + token * HALF;
    const float *grad = s->to_rotated + token * heads * DIM, *value = s->to_values + token * s->kv_heads * DIM;
    for (int h = 0; h < heads; h++, from += DIM, to += DIM, grad += DIM) {
        const number *norm = h < s->heads ? s->q_norm : s->k_norm;
        float g[DIM];
#pragma omp simd
        for (int i = 0; i < HALF; i++) {
            g[i] = grad[i] * cos[i] + grad[HALF + i] * sin[i];
            g[HALF + i] = grad[HALF + i] * cos[i] - grad[i] * sin[i];
        }
        if (norm) {
            float *sums = to_norms + (h < s->heads ? 0 : DIM), scale = inverse_rms(from, DIM, s->eps), along = 0;
#pragma omp simd reduction(+ : along)
            for (int i = 0; i < DIM; i++) {
                float product = g[i] * get(from[i]) * scale;
                sums[i] += product;
                along += product * get(norm[i]);
            }
            along *= scale / DIM;
#pragma omp simd
            for (int i = 0; i < DIM; i++) g[i] = scale * (g[i] * get(norm[i]) - get(from[i]) * along);
        }
#pragma omp simd
        for (int i = 0; i < DIM; i++) to[i] = put(g[i]);
    }
#pragma omp simd
    for (int i = 0; i < s->kv_heads * DIM; i++) to[i] = put(value[i]);
}

static inline int64_t token_of(const struct span *p, int64_t place) {
    return place < p->before ? p->prompt + place : p->first + place - p->before;
}

// The keys (rows and columns of a matrix) and values of one head; NULL for what is not wanted.
static void gather(const struct attention *s, const struct span *p, int head, int64_t stride, float *keys,
                   float *keys_t, float *values, float *values_t) {
    int64_t count = p->before + p->last - p->first, wide = padded(count);
    for (int64_t j = 0; j < count; j++) {
        int64_t token = token_of(p, j);
        const float *key = s->rotated + (token * (s->heads + s->kv_heads) + s->heads + head) * DIM;
        const number *value = s->qkv + (token * (s->heads + 2 * s->kv_heads) + s->heads + s->kv_heads + head) * DIM;
        for (int i = 0; i < DIM; i++) keys_t[i * stride + j] = key[i];
        if (keys) memcpy(keys + j * DIM, key, DIM * sizeof(float));
        if (values)
            for (int i = 0; i < DIM; i++) values[j * DIM + i] = get(value[i]);
        if (values_t)
            for (int i = 0; i < DIM; i++) values_t[i * stride + j] = get(value[i]);
    }
    for (int i = 0; i < DIM; i++)
        for (int64_t j = count; j < wide; j++) {
            keys_t[i * stride + j] = 0;
            if (values_t) values_t[i * stride + j] = 0;
        }
}

static void forward_sequence(const struct attention *s, const struct span *p, float *scratch) {
    int64_t stride = key_stride(s->longest), own = p->last - p->first;
    float *keys_t = scratch, *values = keys_t + DIM * stride, *scores = values + s->longest * DIM;
    const int64_t apart = (s->heads + s->kv_heads) * DIM;
    int group = s->heads / s->kv_heads;
    for (int head = 0; head < s->kv_heads; head++) {
        gather(s, p, head, stride, NULL, keys_t, values, NULL);
        for (int h = head * group; h < (head + 1) * group; h++)
            for (int64_t i = 0; i < own; i += ROWS) {
                int rows = own - i < ROWS ? (int)(own - i) : ROWS;
                int64_t seen = p->before + i + rows, wide = padded(seen);
                float sums[ROWS * DIM], inverse[ROWS];
                multiply(rows, (int)wide, DIM, s->rotated + (p->first + i) * apart + h * DIM, apart, 1, keys_t, stride,
                         scores, stride, 0);
                for (int r = 0; r < rows; r++) {
                    float *row = scores + r * stride, top = -INFINITY, total = 0;
                    int64_t last = p->before + i + r + 1;
                    for (int64_t j = last; j < wide; j++) row[j] = -INFINITY;
#pragma omp simd reduction(max : top)
                    for (int64_t j = 0; j < wide; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd reduction(+ : total)
                    for (int64_t j = 0; j < wide; j++) {
                        row[j] = exp_((row[j] - top) * s->scale);
                        total += row[j];
                    }
                    inverse[r] = 1.0f / total;
                    s->totals[(p->first + i + r) * s->heads + h] = top * s->scale + logf(total);
                }
                multiply(rows, DIM, (int)seen, scores, stride, 1, values, DIM, sums, DIM, 0);
                for (int r = 0; r < rows; r++) {
                    number *out = s->out + ((p->first + i + r) * s->heads + h) * DIM;
#pragma omp simd
                    for (int d = 0; d < DIM; d++) out[d] = put(sums[r * DIM + d] * inverse[r]);
                }
            }
    }
}

// Weights of a block of queries, and the gradients of their scores, both [QUERIES, stride]; adds to those of queries.
static void block_backward(const struct attention *s, const struct span *p, int h, int64_t from, int count,
                           int64_t stride, const float *keys, const float *keys_t, const float *values_t,
                           const float *grads, float *weights, float *slopes) {
    const int64_t apart = (s->heads + s->kv_heads) * DIM;
    for (int i = 0; i < count; i += ROWS) {
        int rows = count - i < ROWS ? count - i : ROWS;
        int64_t first = p->first + from + i, seen = p->before + from + i + rows, wide = padded(seen);
        float *w = weights + i * stride, *g = slopes + i * stride;
        multiply(rows, (int)wide, DIM, s->rotated + first * apart + h * DIM, apart, 1, keys_t, stride, w, stride, 0);
        multiply(rows, (int)wide, DIM, grads + i * DIM, DIM, 1, values_t, stride, g, stride, 0);
        for (int r = 0; r < rows; r++) {
            const number *out = s->out + ((first + r) * s->heads + h) * DIM;
            const float *grad = grads + (i + r) * DIM, total = s->totals[(first + r) * s->heads + h];
            int64_t last = p->before + from + i + r + 1;
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (int d = 0; d < DIM; d++) along += grad[d] * get(out[d]);
            float *row = w + r * stride, *slope = g + r * stride;
            for (int64_t j = last; j < wide; j++) row[j] = -INFINITY;
#pragma omp simd
            for (int64_t j = 0; j < wide; j++) {
                row[j] = exp_(row[j] * s->scale - total);
                slope[j] = row[j] * (slope[j] - along) * s->scale;
            }
        }
        multiply(rows, DIM, (int)seen, g, stride, 1, keys, DIM, s->to_rotated + first * apart + h * DIM, apart, 0);
    }
}

static void backward_sequence(const struct attention *s, const struct span *p, float *scratch) {
    int64_t stride = key_stride(s->longest), own = p->last - p->first, count = p->before + own;
    float *keys_t = scratch, *values_t = keys_t + DIM * stride, *keys = values_t + DIM * stride;
    float *to_keys = keys + s->longest * DIM, *to_values = to_keys + s->longest * DIM;
    float *weights = to_values + s->longest * DIM, *slopes = weights + QUERIES * stride;
    const int64_t apart = (s->heads + s->kv_heads) * DIM;
    int group = s->heads / s->kv_heads;
    for (int head = 0; head < s->kv_heads; head++) {
        gather(s, p, head, stride, keys, keys_t, NULL, values_t);
        memset(to_keys, 0, 2 * s->longest * DIM * sizeof(float));
        for (int h = head * group; h < (head + 1) * group; h++)
            for (int64_t from = 0; from < own; from += QUERIES) {
                int block = own - from < QUERIES ? (int)(own - from) : QUERIES;
                float grads[QUERIES * DIM];
                for (int i = 0; i < block; i++)
#pragma omp simd
                    for (int d = 0; d < DIM; d++)
                        grads[i * DIM + d] = get(s->grad[((p->first + from + i) * s->heads + h) * DIM + d]);
                block_backward(s, p, h, from, block, stride, keys, keys_t, values_t, grads, weights, slopes);
                const float *queries = s->rotated + (p->first + from) * apart + h * DIM;
                for (int64_t j = 0; j < p->before + from + block; j += ROWS) {
                    // Only queries that see a key have written to its column: those before are skipped by whole tiles.
                    int64_t skipped = j < p->before + from ? 0 : (j - p->before - from) / ROWS * ROWS;
                    int rows = p->before + from + block - j < ROWS ? (int)(p->before + from + block - j) : ROWS;
                    int left = block - (int)skipped;
                    multiply(rows, DIM, left, weights + skipped * stride + j, 1, stride, grads + skipped * DIM, DIM,
                             to_values + j * DIM, DIM, 1);
                    multiply(rows, DIM, left, slopes + skipped * stride + j, 1, stride, queries + skipped * apart,
                             apart, to_keys + j * DIM, DIM, 1);
                }
            }
        for (int64_t j = 0; j < count; j++) {
            int64_t token = token_of(p, j);
            float *key = s->to_rotated + token * apart + (s->heads + head) * DIM;
            float *value = s->to_values + (token * s->kv_heads + head) * DIM;
#pragma omp simd
            for (int d = 0; d < DIM; d++) key[d] += to_keys[j * DIM + d], value[d] += to_values[j * DIM + d];
        }
    }
}

typedef void (*on_sequence)(const struct attention *, const struct span *, float *);

// Returns 0, or 1 if there is no memory.
static int each_sequence(const struct attention *s, on_sequence work) {
    int64_t stride = key_stride(s->longest), size = (2 * DIM + 2 * QUERIES) * stride + 3 * s->longest * DIM;
    int failed = 0;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        int mine = omp_get_thread_num();
        float *scratch = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64);
        if (!scratch) failed = 1;
        for (int64_t i = 0; scratch && i < s->sequences; i++)
            if (s->spans[i].family % s->threads == mine) work(s, s->spans + i, scratch);
        free(scratch);
    }
    return failed;
}

int attention_forward(const struct attention *s) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t t = 0; t < s->tokens; t++) rotate(s, t);
    return each_sequence(s, forward_sequence);
}

int attention_backward(const struct attention *s) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t t = 0; t < s->tokens; t++) rotate(s, t);
    int failed = each_sequence(s, backward_sequence);
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t t = 0; t < s->tokens; t++) rotate_back(s, t, s->to_norms + omp_get_thread_num() * 2 * DIM);
    return failed;
}
