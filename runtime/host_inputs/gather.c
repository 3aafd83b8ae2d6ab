/* A decode step's rows of a mapped n-gram table: their numbers, their bytes, their values.

   A row at a random place waits for its address: the processor walks page tables, for several rows
   at a time only where little stands between them. So all rows of a piece are asked for first and
   decoded then. Values are looked up in the caller's tables, who knows what codes mean. */

#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDE
#endif

enum { LINE = 64, PIECE = 128, BLOCK = 16 };

/* The same in `compiled.py`. */
struct table {
    const uint8_t *codes;   /* [rows, row_bytes], a row every code_stride bytes */
    const uint8_t *scales;  /* [rows, blocks] of NVFP4, every scale_stride bytes; else null */
    const uint16_t *values; /* of codes [256], of NVFP4 [256 scales, 16 codes]; null: rows are copied */
    int64_t rows, row_bytes, code_stride, blocks, scale_stride;
    const int64_t *multipliers; /* [orders + 1], newest token first */
    const int64_t *sizes;       /* [orders, heads] */
    const int64_t *offsets;     /* [orders, heads] */
    int64_t orders, heads, eos;
};

/* The definition is `plugins.ngram.row_ids`. `rows` [batch, columns, orders, heads], -1 from a
   sequence's length on. */
void hash_rows(const struct table *t, const int64_t *tokens, const int64_t *context,
               const int64_t *lengths, int64_t batch, int64_t columns, int64_t *rows) {
    for (int64_t b = 0; b < batch; b++, tokens += columns, context += t->orders) {
        for (int64_t at = 0; at < columns; at++) {
            int outside = at >= lengths[b], ended = 0;
            uint64_t mixed = (uint64_t)tokens[at] * (uint64_t)t->multipliers[0];
            for (int64_t order = 1; order <= t->orders; order++) {
                int64_t older = at >= order ? tokens[at - order] : context[t->orders + at - order];
                ended |= older == t->eos;
                mixed ^= (uint64_t)(ended ? t->eos : older) * (uint64_t)t->multipliers[order];
                for (int64_t head = 0; head < t->heads; head++) {
                    int64_t of = (order - 1) * t->heads + head;
                    int64_t rest = (int64_t)mixed % t->sizes[of];
                    if (rest < 0) rest += t->sizes[of];
                    *rows++ = outside ? -1 : rest + t->offsets[of];
                }
            }
        }
    }
}

static void ask(const uint8_t *table, int64_t stride, int64_t bytes, const int64_t *rows,
                int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0) continue;
        const uint8_t *row = table + rows[i] * stride;
        const uint8_t *line = row - (uintptr_t)row % LINE;
        for (; line < row + bytes; line += LINE) __builtin_prefetch(line);
    }
}

/* Four values by the four lowest bit fields of `codes`. */
static inline uint64_t four(uint64_t codes, int bits, const uint16_t *values) {
    uint64_t mask = (1u << bits) - 1, found = 0;
    for (int i = 0; i < 4; i++) found |= (uint64_t)values[codes >> i * bits & mask] << 16 * i;
    return found;
}

static inline void decode_fp8(const uint8_t *codes, int64_t width, const uint16_t *values,
                              uint16_t *out) {
    int64_t at = 0;
#ifdef WIDE
    __m512i part[8];
    for (int i = 0; i < 8; i++) part[i] = _mm512_loadu_si512(values + 32 * i);
    for (; at + 32 <= width; at += 32) {
        /* Each lookup takes the lowest six bits; the two above choose among four of them. */
        __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + at)));
        __mmask32 odd = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
        __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(128));
        __m512i low = _mm512_mask_blend_epi16(
            odd, _mm512_permutex2var_epi16(part[0], code, part[1]),
            _mm512_permutex2var_epi16(part[2], code, part[3]));
        __m512i high = _mm512_mask_blend_epi16(
            odd, _mm512_permutex2var_epi16(part[4], code, part[5]),
            _mm512_permutex2var_epi16(part[6], code, part[7]));
        _mm512_storeu_si512(out + at, _mm512_mask_blend_epi16(upper, low, high));
    }
#endif
    for (; at + 4 <= width; at += 4) {
        uint32_t code;
        memcpy(&code, codes + at, 4);
        uint64_t found = four(code, 8, values);
        memcpy(out + at, &found, 8);
    }
    for (; at < width; at++) out[at] = values[codes[at]];
}

static inline void decode_block(const uint8_t *codes, const uint16_t *values, uint16_t *out) {
#ifdef WIDE
    /* The lookup takes the lowest four bits of each 16: those of the byte, and those above them. */
    __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    __m256i code = _mm256_or_si256(byte, _mm256_slli_epi32(byte, 12));
    __m256i table = _mm256_loadu_si256((const __m256i *)values);
    _mm256_storeu_si256((__m256i *)out, _mm256_permutexvar_epi16(code, table));
#else
    for (int at = 0; at < BLOCK; at += 4) {
        uint16_t code;
        memcpy(&code, codes + at / 2, 2);
        uint64_t found = four(code, 4, values);
        memcpy(out + at, &found, 8);
    }
#endif
}

static void decode(const struct table *t, int64_t row, uint8_t *out, int64_t out_bytes) {
    const uint8_t *codes = t->codes + row * t->code_stride;
    if (row < 0)
        memset(out, 0, out_bytes);
    else if (!t->values)
        memcpy(out, codes, out_bytes);
    else if (!t->scales)
        decode_fp8(codes, t->row_bytes, t->values, (uint16_t *)out);
    else {
        const uint8_t *scales = t->scales + row * t->scale_stride;
        for (int64_t block = 0; block < t->blocks; block++)
            decode_block(codes + block * BLOCK / 2, t->values + BLOCK * scales[block],
                         (uint16_t *)out + block * BLOCK);
    }
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Values of `rows` to `out`, zeros for -1. Returns how many rows are done: all, or fewer after a
   piece that took longer than `limit` nanoseconds, or -1, with nothing read, where a number is no
   row. */
int64_t gather_rows(const struct table *t, const int64_t *rows, int64_t count, int64_t limit,
                    uint8_t *out, int64_t out_bytes) {
    int wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong |= rows[i] < -1 || rows[i] >= t->rows;
    if (wrong) return -1;
    int64_t first = 0, before = nanoseconds();
    while (first < count) {
        int64_t last = first + PIECE < count ? first + PIECE : count;
        if (t->scales) ask(t->scales, t->scale_stride, t->blocks, rows + first, last - first);
        ask(t->codes, t->code_stride, t->row_bytes, rows + first, last - first);
        for (; first < last; first++) decode(t, rows[first], out + first * out_bytes, out_bytes);
        int64_t now = nanoseconds();
        if (now - before > limit) break;
        before = now;
    }
    return first;
}
