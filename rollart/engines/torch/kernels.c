// What a decoding step does besides matrix products, for CPUs. Compiled by `kernels.py` for the machine and one dtype.
// Given at compilation, so that loops unroll: DIM, the size of a head; GROUP, the query heads that share a KV head;
// BFLOAT16 for that dtype. Arithmetic is in float; tensors are row-major and contiguous; `threads` share the tokens.
#include "numbers.h"

#define KEYS 256  // numbers of one block of attention or sampling

static inline float inverse_rms(const number *x, int count, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += get(x[i]) * get(x[i]);
    return 1.0f / sqrtf(sum / count + eps);
}

void rms_norm(const number *x, const number *weight, number *out, int64_t tokens, int size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *from = x + t * size;
        number *to = out + t * size;
        float scale = inverse_rms(from, size, eps);
        for (int i = 0; i < size; i++) to[i] = put(get(weight[i]) * get(put(get(from[i]) * scale)));
    }
}

// gate_up is [tokens, 2 * size]; out [tokens, size] = silu(gate) * up.
void silu_mul(const number *gate_up, number *out, int64_t tokens, int size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *gate = gate_up + 2 * t * size, *up = gate + size;
        number *to = out + t * size;
        for (int i = 0; i < size; i++) to[i] = put(get(put(get(gate[i]) / (1.0f + exp_(-get(gate[i]))))) * get(up[i]));
    }
}

// `cos` and `sin` hold dim / 2 numbers per position.
static inline void rotate(const number *from, number *to, const number *norm, const float *cos, const float *sin,
                          float eps) {
    const int half = DIM / 2;
    float x[DIM];
    for (int i = 0; i < DIM; i++) x[i] = get(from[i]);
    if (norm) {
        float scale = inverse_rms(from, DIM, eps);
        for (int i = 0; i < DIM; i++) x[i] = get(norm[i]) * get(put(x[i] * scale));
    }
    for (int i = 0; i < half; i++) {
        to[i] = put(x[i] * cos[i] - x[half + i] * sin[i]);
        to[half + i] = put(x[half + i] * cos[i] + x[i] * sin[i]);
    }
}

struct shape {
    int32_t kv_heads, threads;
    int64_t capacity;  // positions of a row of KV
    int64_t window;    // 0: none
    float eps, scale;
};

// Normalises and rotates queries (in place) and keys of qkv [tokens, heads + 2 * kv_heads, dim]; stores keys and values
// at their rows and positions in tensors [rows, kv_heads, capacity, dim].
void store(const struct shape *s, number *qkv, int64_t tokens, const int64_t *positions, const int64_t *rows,
           const float *cos, const float *sin, const number *q_norm, const number *k_norm, number *keys,
           number *values) {
    int heads = s->kv_heads * GROUP;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        number *q = qkv + t * (heads + 2 * s->kv_heads) * DIM, *k = q + heads * DIM, *v = k + s->kv_heads * DIM;
        const float *c = cos + positions[t] * (DIM / 2), *n = sin + positions[t] * (DIM / 2);
        for (int h = 0; h < heads; h++) rotate(q + h * DIM, q + h * DIM, q_norm, c, n, s->eps);
        for (int h = 0; h < s->kv_heads; h++) {
            int64_t at = ((rows[t] * s->kv_heads + h) * s->capacity + positions[t]) * DIM;
            rotate(k + h * DIM, keys + at, k_norm, c, n, s->eps);
            memcpy(values + at, v + h * DIM, DIM * sizeof(number));
        }
    }
}

// The lanes of a vector. FOR_LANES lists M(lane, w) of each lane.
#if DIM % 16 == 0
#define LANES 16
#define FOR_LANES(M, w)                                                                                            \
    {M(0, w), M(1, w), M(2, w),  M(3, w),  M(4, w),  M(5, w),  M(6, w),  M(7, w),                                  \
     M(8, w), M(9, w), M(10, w), M(11, w), M(12, w), M(13, w), M(14, w), M(15, w)}
#elif DIM % 8 == 0
#define LANES 8
#define FOR_LANES(M, w) {M(0, w), M(1, w), M(2, w), M(3, w), M(4, w), M(5, w), M(6, w), M(7, w)}
#else
#define LANES 2
#define FOR_LANES(M, w) {M(0, w), M(1, w)}
#endif
#define PARTS (DIM / LANES)
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t indices __attribute__((vector_size(LANES * 4)));

static inline lanes load(const number *from) {
#ifdef BFLOAT16
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    typedef uint32_t words __attribute__((vector_size(LANES * 4)));
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (lanes)(__builtin_convertvector(bits, words) << 16);
#else
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
#endif
}

static inline void save(number *to, lanes x) {
#ifdef BFLOAT16
    for (int l = 0; l < LANES; l++) to[l] = put(x[l]);
#else
    memcpy(to, &x, sizeof x);
#endif
}

static inline void fetch(const number *from) {
    for (size_t byte = 0; byte < DIM * sizeof(number); byte += 64) __builtin_prefetch((const char *)from + byte);
}

#define BLOCK (4 * LANES)

// A weight [rows, size] times one token, plus `bias` and `total` where they are given; `out` may be `total`. The weight is
// read once, row by row: one stream of memory is faster than several.
void matvec(const number *x, const number *weight, const number *bias, const number *total, number *out, int64_t rows,
            int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const number *row = weight + r * size;
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        int64_t i = 0;
        for (; i + BLOCK <= size; i += BLOCK) {
            a += load(row + i) * load(x + i);
            b += load(row + i + LANES) * load(x + i + LANES);
            c += load(row + i + 2 * LANES) * load(x + i + 2 * LANES);
            d += load(row + i + 3 * LANES) * load(x + i + 3 * LANES);
        }
        lanes sums = (a + b) + (c + d);
        float value = bias ? get(bias[r]) : 0;
        for (int l = 0; l < LANES; l++) value += sums[l];
        for (; i < size; i++) value += get(row[i]) * get(x[i]);
        out[r] = put(total ? value + get(total[r]) : value);
    }
}

// Lane i of the result is the sum of the lanes of x[i].
static inline __attribute__((always_inline)) lanes sums_of(lanes *x) {
#ifdef __clang__
    lanes sums;
    for (int i = 0; i < LANES; i++) {
        float sum = 0;
        for (int l = 0; l < LANES; l++) sum += x[i][l];
        sums[i] = sum;
    }
    return sums;
#else
// Adds the halves of x[i] and x[i + w]: those of x[i + w] go to the lanes with bit w.
#define SAME(l, w) ((l) & (w) ? LANES + (l) : (l))
#define OTHER(l, w) ((l) & (w) ? LANES + ((l) ^ (w)) : (l) ^ (w))
#define FOLD(w)                                                                                                    \
    if (LANES > w) {                                                                                               \
        const indices same = FOR_LANES(SAME, w), other = FOR_LANES(OTHER, w);                                      \
        _Pragma("GCC unroll 8") for (int i = 0; i < w; i++) x[i] =                                                 \
            __builtin_shuffle(x[i], x[i + w], same) + __builtin_shuffle(x[i], x[i + w], other);                    \
    }
    FOLD(8) FOLD(4) FOLD(2) FOLD(1)
    return x[0];
#endif
}

// The query heads of one token that share a KV head, over its keys first..last, block by block (online softmax). `next`
// are the keys of the next head. Values are fetched while keys are read, and those keys while values are.
static void attend_head(const number *q, const number *keys, const number *values, const number *next, number *out,
                        int64_t first, int64_t last, float scale) {
    lanes query[GROUP][PARTS], sums[GROUP][PARTS];
    float scores[GROUP][KEYS], best[GROUP], total[GROUP];
    for (int g = 0; g < GROUP; g++) {
        best[g] = -INFINITY, total[g] = 0;
        for (int p = 0; p < PARTS; p++) query[g][p] = load(q + g * DIM + p * LANES) * scale, sums[g][p] = (lanes){0};
    }
    for (int64_t from = first; from <= last; from += KEYS) {
        int size = last + 1 - from < KEYS ? (int)(last + 1 - from) : KEYS, whole = (size + LANES - 1) / LANES * LANES;
        for (int j = 0; j < size; j += LANES) {
            for (int l = 0; l < LANES && j + l < size; l++) fetch(values + (from + j + l) * DIM);
            for (int g = 0; g < GROUP; g++) {
                lanes dots[LANES];
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) {
                    // Beyond the last key, that one again: its scores are not used.
                    const number *key = keys + (from + (j + l < size ? j + l : size - 1)) * DIM;
                    dots[l] = query[g][0] * load(key);
                    for (int p = 1; p < PARTS; p++) dots[l] += query[g][p] * load(key + p * LANES);
                }
                lanes scored = sums_of(dots);
                memcpy(scores[g] + j, &scored, sizeof scored);
            }
        }
        for (int g = 0; g < GROUP; g++) {
            float top = best[g], sum = 0;
            for (int j = size; j < whole; j++) scores[g][j] = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int j = 0; j < whole; j++) top = scores[g][j] > top ? scores[g][j] : top;
            float kept = exp_(best[g] - top);
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < whole; j++) {
                scores[g][j] = exp_(scores[g][j] - top);
                sum += scores[g][j];
            }
            best[g] = top, total[g] = total[g] * kept + sum;
            for (int p = 0; p < PARTS; p++) sums[g][p] *= kept;
        }
        for (int j = 0; j < size; j++) {
            const number *value = values + (from + j) * DIM;
            fetch(next + (from + j) * DIM);
            for (int p = 0; p < PARTS; p++) {
                lanes part = load(value + p * LANES);
                for (int g = 0; g < GROUP; g++) sums[g][p] += scores[g][j] * part;
            }
        }
    }
    for (int g = 0; g < GROUP; g++)
        for (int p = 0; p < PARTS; p++) save(out + g * DIM + p * LANES, sums[g][p] * (1.0f / total[g]));
}

// Each token attends to its row up to its own position. `qkv` as `store` leaves it; out is [tokens, heads, dim].
void attend(const struct shape *s, const number *qkv, int64_t tokens, const int64_t *positions, const int64_t *rows,
            const number *keys, const number *values, number *out) {
    int heads = s->kv_heads * GROUP;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(dynamic, 1)
    for (int64_t t = 0; t < tokens; t++) {
        const number *q = qkv + t * (heads + 2 * s->kv_heads) * DIM;
        int64_t last = positions[t];
        int64_t first = s->window && last >= s->window ? last - s->window + 1 : 0;
        for (int h = 0; h < s->kv_heads; h++) {
            int64_t head = s->capacity * DIM, row = (rows[t] * s->kv_heads + h) * head;
            attend_head(q + h * GROUP * DIM, keys + row, values + row, keys + row + head,
                        out + (t * heads + h * GROUP) * DIM, first, last, s->scale);
        }
    }
}

// Copies `bytes` of each head of one row, of all tensors. Offsets and strides of heads are in bytes.
void copy_heads(char *const *from, int64_t from_offset, int64_t from_stride, char *const *to, int64_t to_offset,
                int64_t to_stride, int64_t tensors, int64_t heads, int64_t bytes) {
    for (int64_t t = 0; t < tensors; t++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(to[t] + to_offset + h * to_stride, from[t] + from_offset + h * from_stride, bytes);
}

// One token per row of logits, by inverse CDF at `uniform` in [0, 1), and its log probability. `scratch` has room for
// `vocabulary` floats.
void draw(const number *logits, int64_t rows, int64_t vocabulary, const float *uniform, float *scratch,
          int64_t *tokens, float *logprobs) {
    for (int64_t r = 0; r < rows; r++) {
        const number *x = logits + r * vocabulary;
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < vocabulary; i++) top = get(x[i]) > top ? get(x[i]) : top;
        double total = 0, before = 0;
        for (int64_t from = 0; from < vocabulary; from += KEYS) {
            int size = vocabulary - from < KEYS ? (int)(vocabulary - from) : KEYS;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < size; i++) {
                scratch[from + i] = exp_(get(x[from + i]) - top);
                sum += scratch[from + i];
            }
            total += sum;
        }
        double target = uniform[r] * total;
        int64_t from = 0, token = 0;
        for (; from + KEYS < vocabulary; from += KEYS) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < KEYS; i++) sum += scratch[from + i];
            if (before + sum > target) break;
            before += sum;
        }
        // Blocks are added up in another order than their numbers, so the end may be reached: then the last that can be.
        for (int64_t i = from; i < vocabulary && before <= target; i++)
            if (scratch[i] > 0) before += scratch[i], token = i;
        for (int64_t i = from; !(scratch[token] > 0) && i-- > 0;) token = i;
        tokens[r] = token;
        logprobs[r] = (float)(get(x[token]) - top - log(total));
    }
}
