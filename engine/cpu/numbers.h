// Functions of vectors. A part of step.cpp, which takes it in twice: for AVX-512 and for AVX2.

namespace {

void store_bf16(uint16_t* to, const float* from, int count) {
    for (int i = 0; i < count; i += LANES) store_bf16(to + i, load(from + i, first_lanes(count - i)), count - i);
}

// e^x for x up to 0, within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Never less than
// e^-87, the least that is no denormal number: those take a processor a hundred times as long.
Floats exponential(Floats x) {
    x = larger(each(-87.0f), x);  // the order of these lets what is no number through
    const Floats n = rounded(x * each(1.44269504f));
    Floats r = fused(n, each(-0.693359375f), x);
    r = fused(n, each(2.12194440e-4f), r);
    Floats sum = each(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = fused(sum, r, each(c));
    return scaled(sum, n);
}

Floats silu(Floats x) {
    const Floats one = each(1.0f), e = exponential(negative(x));
    return x * choose(is_less(x, each(0.0f)), e, one) / (one + e);
}

float square_sum(const float* x, int count) {
    Floats sum = each(0.0f);
    for (int i = 0; i < count; i += LANES) {
        const Floats v = load(x + i, first_lanes(count - i));
        sum = fused(v, v, sum);
    }
    return sum_of(sum);
}

}  // namespace
