// The vectors of AVX2 (with FMA): eight numbers each. What they can do has the names of vectors_avx512.h, and does the
// same to the bit but for sums over a vector's lanes and products of bfloat16.

namespace {

constexpr int LANES = 8;

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
using Lanes = Ints;  // some of a vector: all bits of those

constexpr int TOGETHER = 2;  // queries whose sums share registers, each of four vectors

// Sums that registers hold, of which there are half as many as in AVX-512.
constexpr int MANY = 5;
constexpr int NARROW = 2;
constexpr int wide(int tokens, int) { return tokens == 1 ? 8 : tokens == 2 ? 4 : 2; }

Floats each(float x) { return (Floats)_mm256_set1_ps(x); }
Ints each(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
Ints counting() { return (Ints)_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

Lanes lanes_of(unsigned bits) {
    const Ints own = {1, 2, 4, 8, 16, 32, 64, 128};
    return (each(int32_t(bits)) & own) == own;
}
Lanes first_lanes(int count) { return counting() < each(int32_t(count)); }
Lanes both(Lanes a, Lanes b) { return a & b; }

Floats load(const float* from) { return (Floats)_mm256_loadu_ps(from); }
Floats load(const float* from, Lanes lanes) { return (Floats)_mm256_maskload_ps(from, (__m256i)lanes); }
void store(float* to, Floats x) { _mm256_storeu_ps(to, (__m256)x); }
void store(float* to, Floats x, Lanes lanes) { _mm256_maskstore_ps(to, (__m256i)lanes, (__m256)x); }

Floats load_bf16(const uint16_t* from) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
Floats load_bf16(const uint16_t* from, int count) {
    if (count >= LANES) return load_bf16(from);
    uint16_t some[LANES] = {};
    for (int i = 0; i < count; i++) some[i] = from[i];
    return load_bf16(some);
}
// To the nearest, the even one of two; what is no number stays none, and a denormal number becomes zero.
void store_bf16(uint16_t* to, Floats x, int count) {
    const Ints bits = (Ints)x, odd = bits >> 16 & 1, sign = bits & each(int32_t(0x80000000));
    Ints near = bits + 0x7fff + odd;
    near = (x != x) ? bits | 0x400000 : near;
    near = ((bits & 0x7f800000) == 0) ? sign : near;
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32((__m256i)near, 16), _mm256_setzero_si256());
    const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    if (count >= LANES) {
        _mm_storeu_si128((__m128i*)to, halves);
        return;
    }
    alignas(16) uint16_t some[LANES];
    _mm_store_si128((__m128i*)some, halves);
    for (int i = 0; i < count; i++) to[i] = some[i];
}
// Pairs of bfloat16.
Ints load_pairs(const uint16_t* from, Lanes lanes) {
    return (Ints)_mm256_maskload_epi32((const int*)from, (__m256i)lanes);
}

Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
// b where either is no number.
Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
Floats negative(Floats x) { return (Floats)((Ints)x | each(int32_t(0x80000000))); }  // -|x|
Floats rounded(Floats x) {
    return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
Ints to_ints(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
// x * 2^n, for whole n from -126 on and results that are no denormal numbers.
Floats scaled(Floats x, Floats n) { return x * (Floats)((to_ints(n) + 127) << 23); }

Lanes is_less(Floats a, Floats b) { return (Lanes)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ); }
Lanes is_equal(Floats a, Floats b) { return (Lanes)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_EQ_OQ); }
Floats choose(Lanes lanes, Floats there, Floats elsewhere) {
    return (Floats)_mm256_blendv_ps((__m256)elsewhere, (__m256)there, (__m256)lanes);
}
Ints choose(Lanes lanes, Ints there, Ints elsewhere) {
    return (Ints)choose(lanes, (Floats)there, (Floats)elsewhere);
}

float sum_of(Floats x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
float largest_of(Floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}
int32_t largest_of(Ints x) {
    const __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    const __m128i two = _mm_max_epi32(half, _mm_unpackhi_epi64(half, half));
    return std::max(_mm_extract_epi32(two, 0), _mm_extract_epi32(two, 1));
}
int32_t least_of(Lanes lanes, Ints x) {
    int32_t least = INT32_MAX;
    for (int i = 0; i < LANES; i++)
        if (lanes[i]) least = std::min(least, x[i]);
    return least;
}

// To 16 bits, the nearest where that is too few.
void store_fixed(uint16_t* to, Ints x) {
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x),
                                                   _mm256_extracti128_si256((__m256i)x, 1)));
}
// Pairs of 8 bits as pairs of 16.
Ints load_int8(const char* from) { return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }
Ints load_pairs(const char* from) { return (Ints)_mm256_loadu_si256((const __m256i*)from); }
// Adds the products of pairs: of 16-bit integers, and of bfloat16.
Ints add_products(Ints sum, Ints a, Ints b) {
    return (Ints)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
}
Floats add_products(Floats sum, Ints a, Ints b) {
    const Ints upper = each(int32_t(0xffff0000));
    sum = fused((Floats)(a & upper), (Floats)(b & upper), sum);
    return fused((Floats)(a << 16), (Floats)(b << 16), sum);
}
Floats to_floats(Ints x) { return (Floats)_mm256_cvtepi32_ps((__m256i)x); }

// LANES vectors, columns for rows.
void transpose(Ints* rows) {
    __m256i v[8], w[8];
    for (int i = 0; i < 8; i += 2) {
        w[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
        w[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_unpacklo_epi64(w[i + j], w[i + j + 2]);
            v[i + 2 * j + 1] = _mm256_unpackhi_epi64(w[i + j], w[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = (Ints)_mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        rows[i + 4] = (Ints)_mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
}

}  // namespace
