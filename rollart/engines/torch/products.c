// Products of tokens [tokens, inputs] with weights [outputs, inputs] in float32. A weight is stored in panels: COLUMNS
// outputs side by side, input by input, so that every product reads it once and in order. A tile of ROWS tokens and one
// panel is summed in registers; while the first tokens meet a panel, the next panel is fetched into the cache.
#include "numbers.h"

#define VECTORS 3
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROWS 4  // 12 sums, 3 vectors of the weight and a token's number are all 16 registers
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 8
#else
#define LANES 0
#endif
#define COLUMNS (VECTORS * LANES)
#define LINE 16  // floats of a cache line

int32_t panel_columns(void) { return COLUMNS; }  // 0: no tile for this processor

#if LANES
typedef float lanes __attribute__((vector_size(LANES * 4)));

// Panel p of the weight goes to panel first + p * step; missing columns are 0.
void pack_panels(const float *weight, int64_t outputs, int64_t inputs, float *panels, int64_t first, int64_t step) {
    for (int64_t from = 0; from < outputs; from += COLUMNS) {
        float *panel = panels + (first + from / COLUMNS * step) * inputs * COLUMNS;
        for (int64_t i = 0; i < inputs; i++)
            for (int c = 0; c < COLUMNS; c++)
                panel[i * COLUMNS + c] = from + c < outputs ? weight[(from + c) * inputs + i] : 0;
    }
}

// The sums of `rows` tokens over one panel, plus `bias`, in out [rows, COLUMNS]. Inlined for each constant `rows`.
static inline __attribute__((always_inline)) void tile(int rows, int ahead, const float *x, int64_t inputs,
                                                       const float *panel, const float *bias, float *out) {
    lanes sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = (lanes){0};
    const float *next = panel + inputs * COLUMNS;
    for (int64_t i = 0; i < inputs; i++) {
        lanes weight[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) memcpy(&weight[v], panel + i * COLUMNS + v * LANES, sizeof weight[v]);
        if (ahead)
#pragma GCC unroll 3
            for (int f = 0; f < COLUMNS; f += LINE) __builtin_prefetch(next + i * COLUMNS + f, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float token = x[r * inputs + i];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sums[r][v] += token * weight[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            lanes offset = {0};
            if (bias) memcpy(&offset, bias + v * LANES, sizeof offset);
            sums[r][v] += offset;
            memcpy(out + r * COLUMNS + v * LANES, &sums[r][v], sizeof(lanes));
        }
}

struct product {
    const float *x, *panels, *bias;  // `bias` in panels too, or NULL
    const float *total;              // [tokens, outputs] to add, or NULL; may be `out`
    float *out;                      // [tokens, outputs]
    int64_t tokens, outputs, inputs;
    int32_t threads, gated;
};

// Tokens from `row` on. Few of them are bound by memory, which the processor reads ahead best by itself.
static void sum_block(const struct product *p, int64_t row, int rows, int64_t number, float *out) {
    const float *x = p->x + row * p->inputs, *panel = p->panels + number * p->inputs * COLUMNS;
    const float *bias = p->bias ? p->bias + number * COLUMNS : NULL;
#define TILE(count, ahead) tile(count, ahead, x, p->inputs, panel, bias, out)
    switch (rows) {
        case 1: TILE(1, 0); break;
        case 2: TILE(2, 0); break;
        case 3: TILE(3, 0); break;
#if ROWS == 8
        case 4: TILE(4, 0); break;
        case 5: TILE(5, 0); break;
        case 6: TILE(6, 0); break;
        case 7: TILE(7, 0); break;
#endif
        default:
            if (row == 0) TILE(ROWS, 1);
            else TILE(ROWS, 0);
    }
}

static inline __attribute__((always_inline)) void add_row(const float *sums, const float *total, float *out, int width) {
    for (int c = 0; c < width; c++) out[c] = total ? sums[c] + total[c] : sums[c];
}

static inline __attribute__((always_inline)) void gate_row(const float *gate, const float *up, float *out, int width) {
    for (int c = 0; c < width; c++) out[c] = gate[c] / (1.0f + exp_(-gate[c])) * up[c];
}

static void panel_product(const struct product *p, int64_t number) {
    int64_t first = number * COLUMNS;
    int width = p->outputs - first < COLUMNS ? (int)(p->outputs - first) : COLUMNS;
    float sums[ROWS * COLUMNS], gate[ROWS * COLUMNS];
    for (int64_t row = 0; row < p->tokens; row += ROWS) {
        int rows = p->tokens - row < ROWS ? (int)(p->tokens - row) : ROWS;
        for (int r = 0; r < rows; r++)
            for (int f = 0; f < width; f += LINE) __builtin_prefetch(p->out + (row + r) * p->outputs + first + f, 1);
        if (p->gated) sum_block(p, row, rows, 2 * number, gate);
        sum_block(p, row, rows, p->gated ? 2 * number + 1 : number, sums);
        for (int r = 0; r < rows; r++) {
            int64_t at = (row + r) * p->outputs + first;
            const float *total = p->total ? p->total + at : NULL, *from = sums + r * COLUMNS;
            if (p->gated && width == COLUMNS) gate_row(gate + r * COLUMNS, from, p->out + at, COLUMNS);
            else if (p->gated) gate_row(gate + r * COLUMNS, from, p->out + at, width);
            else if (width == COLUMNS) add_row(from, total, p->out + at, COLUMNS);
            else add_row(from, total, p->out + at, width);
        }
    }
}

// Gated: the panels of a gate and an up projection by turns, out = silu(gate) * up.
void multiply(const struct product *p) {
    int64_t panels = (p->outputs + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t number = 0; number < panels; number++) panel_product(p, number);
}
#endif
