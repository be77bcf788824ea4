// Vectors of sixteen floats: bfloat16 in and out, and functions of them.

namespace {

// Sums that a loop keeps in registers: for arrays of __m512 gcc 12 writes all of them to memory at every turn.
typedef float Floats __attribute__((vector_size(64)));

__mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : __mmask16((1u << std::max(count, 0)) - 1); }

__m512 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

__m512 load_bf16(const uint16_t* from, int count) { return widen(_mm256_maskz_loadu_epi16(first_lanes(count), from)); }

void store_bf16(uint16_t* to, const float* from, int count) {
    for (int i = 0; i < count; i += 16) {
        const __mmask16 lanes = first_lanes(count - i);
        _mm256_mask_storeu_epi16(to + i, lanes, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, from + i)));
    }
}

// e^x for x up to 0, within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Never less than
// e^-87, the least that is no denormal number: those take a processor a hundred times as long.
__m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // the order of these lets what is no number through
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(sum, n);
}

__m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exponential(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));  // e^-|x|
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_div_ps(_mm512_mul_ps(x, _mm512_mask_blend_ps(negative, one, e)), _mm512_add_ps(one, e));
}

float square_sum(const float* x, int count) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

}  // namespace
