// The vectors of AVX-512 (with VNNI and BF16): sixteen numbers each. What they can do has the same names in
// vectors_avx2.h; all that is computed is written in these.

namespace {

constexpr int LANES = 16;

// Not __m512: for arrays of that, which hold the sums of a loop, gcc 12 writes all of them to memory at every turn.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
using Lanes = __mmask16;  // some of a vector

constexpr int TOGETHER = 6;  // queries whose sums share registers, each of four vectors

// Sums that registers hold: of so many tokens at most, each of so many vectors.
constexpr int MANY = 6;
constexpr int NARROW = 4;
constexpr int wide(int, int all_vectors) { return all_vectors; }  // of up to FEW tokens

Lanes lanes_of(unsigned bits) { return Lanes(bits); }
Lanes first_lanes(int count) { return count >= LANES ? 0xffff : Lanes((1u << std::max(count, 0)) - 1); }
Lanes both(Lanes a, Lanes b) { return a & b; }

Floats each(float x) { return (Floats)_mm512_set1_ps(x); }
Ints each(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
Ints counting() { return (Ints)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

Floats load(const float* from) { return (Floats)_mm512_loadu_ps(from); }
Floats load(const float* from, Lanes lanes) { return (Floats)_mm512_maskz_loadu_ps(lanes, from); }
void store(float* to, Floats x) { _mm512_storeu_ps(to, (__m512)x); }
void store(float* to, Floats x, Lanes lanes) { _mm512_mask_storeu_ps(to, lanes, (__m512)x); }

Floats widen(__m256i bf16) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16); }
Floats load_bf16(const uint16_t* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }
Floats load_bf16(const uint16_t* from, int count) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
void store_bf16(uint16_t* to, Floats x, int count) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
// Pairs of bfloat16.
Ints load_pairs(const uint16_t* from, Lanes lanes) { return (Ints)_mm512_maskz_loadu_epi32(lanes, from); }

Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
// b where either is no number.
Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
Floats magnitude(Floats x) { return (Floats)_mm512_abs_ps((__m512)x); }
Floats negative(Floats x) { return (Floats)_mm512_or_ps((__m512)x, _mm512_set1_ps(-0.0f)); }  // -|x|
Floats rounded(Floats x) { return (Floats)_mm512_roundscale_ps((__m512)x, 0); }
Ints to_ints(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
// x * 2^n, for whole n from -126 on and results that are no denormal numbers.
Floats scaled(Floats x, Floats n) { return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n); }

Lanes is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
Lanes is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
Floats choose(Lanes lanes, Floats there, Floats elsewhere) {
    return (Floats)_mm512_mask_mov_ps((__m512)elsewhere, lanes, (__m512)there);
}
Ints choose(Lanes lanes, Ints there, Ints elsewhere) {
    return (Ints)_mm512_mask_mov_epi32((__m512i)elsewhere, lanes, (__m512i)there);
}

float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
float largest_of(Floats x) { return _mm512_reduce_max_ps((__m512)x); }
int32_t largest_of(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
int32_t least_of(Lanes lanes, Ints x) { return _mm512_mask_reduce_min_epi32(lanes, (__m512i)x); }

// To 16 bits, the nearest where that is too few.
void store_fixed(uint16_t* to, Ints x) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16((__m512i)x));
}
// Pairs of 8 bits as pairs of 16.
Ints load_int8(const char* from) { return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)); }
Ints load_pairs(const char* from) { return (Ints)_mm512_loadu_si512(from); }
// Adds the products of pairs: of 16-bit integers, and of bfloat16.
Ints add_products(Ints sum, Ints a, Ints b) {
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
Floats add_products(Floats sum, Ints a, Ints b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
Floats to_floats(Ints x) { return (Floats)_mm512_cvtepi32_ps((__m512i)x); }

// LANES vectors, columns for rows.
void transpose(Ints* rows) {
    __m512i v[16], w[16];
    for (int i = 0; i < 16; i++) v[i] = (__m512i)rows[i];
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(w[i + j], w[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(w[i + j], w[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            w[8 * j + i] = _mm512_shuffle_i32x4(v[8 * j + i], v[8 * j + i + 4], 0x88);
            w[8 * j + i + 4] = _mm512_shuffle_i32x4(v[8 * j + i], v[8 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = (Ints)_mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
        rows[i + 8] = (Ints)_mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    }
}

}  // namespace
