// Products of tokens and weights.
//
// A weight matrix is kept in groups of 128 outputs, each group pair of inputs by pair of inputs:
//
//     [group][pair][8 vectors][16 outputs][2 inputs]        of int8 or bfloat16
//
// so that one instruction (vpdpwssd, vdpbf16ps) adds two inputs' products to sixteen outputs, and a step reads weights
// in the order in which they lie. int8 weights are multiplied as integers: a row of inputs becomes 16-bit fixed point
// with a scale for each BLOCK inputs, finer than bfloat16 is (a bfloat16 has 8 bits, the largest value of a block here
// has 15), and sums of integers are exact. Registers hold the sums of three tokens by 128 outputs, which read weights
// once and as they lie, or of six by 64, which multiply more for each weight that they load: the first for steps of up
// to three tokens, where reading weights is what takes the time, the second for others.
//
// AVX2 takes two instructions or more for eight outputs, and its registers hold the sums of one token by 64 outputs, of
// two by 32, or of three to five by 16. Sums are the same in all.

namespace {

// Rows of inputs as products take them: 16 bits each, bfloat16 or fixed point with a scale for each block; for tiles a
// row's upper bytes come first, then the lower ones.
struct Inputs {
    uint16_t* values;  // (tokens, padded inputs)
    float* scales;     // (tokens, blocks)
};

// One token's inputs x, times `factor` and `weight` (null: neither), in the form that `matrix` takes.
void prepare(const Matrix& matrix, const Inputs& in, int token, const float* x, float factor, const float* weight) {
    alignas(64) float y[BLOCK];
    for (int first = 0; first < matrix.inputs; first += BLOCK) {
        const int count = std::min(BLOCK, matrix.inputs - first);
        uint16_t* to = in.values + size_t(token) * matrix.inputs + first;
        Ints bits = each(0);  // of the largest as whole numbers, of which one that is no number is the largest
        for (int i = 0; i < count; i += LANES) {
            Floats v = load(x + first + i);
            if (weight) v = v * each(factor) * load(weight + first + i);
            store(y + i, v);
            bits = larger(bits, (Ints)magnitude(v));
        }
        if (matrix.form == BFLOAT16) {
            store_bf16(to, y, count);
            continue;
        }
        const int32_t most_bits = largest_of(bits);
        float most;
        std::memcpy(&most, &most_bits, sizeof most);
        const Floats up = each(most > 0 ? 32767.0f / most : 0.0f);
        in.scales[token * blocks_of(matrix.inputs) + first / BLOCK] = most / 32767.0f;
        for (int i = 0; i < count; i += LANES) {
            const Ints fixed = to_ints(load(y + i) * up);
            if (matrix.form == INT8) store_fixed(to + i, fixed);
#if WITH_TILES
            if (matrix.form != TILED) continue;
            const __m256i half = _mm512_cvtsepi32_epi16((__m512i)fixed);
            char* upper = (char*)(in.values + size_t(token) * matrix.inputs) + first + i;
            _mm_storeu_si128((__m128i*)upper, _mm256_cvtepi16_epi8(_mm256_srai_epi16(half, 8)));
            _mm_storeu_si128((__m128i*)(upper + matrix.inputs), _mm256_cvtepi16_epi8(half));
#endif
        }
    }
}

void prepare_normed(const Matrix& matrix, const Inputs& in, int token, const float* x, const float* weight,
                    const Model& model) {
    const float mean = square_sum(x, model.hidden) / model.hidden;
    prepare(matrix, in, token, x, 1.0f / std::sqrt(mean + model.eps), weight);
}

struct Int8 {
    using Sum = Ints;
    static constexpr int BYTES = 2 * LANES;
    static Ints load(const char* from) { return load_int8(from); }
    static Floats value(Ints sum, float scale) { return to_floats(sum) * each(scale); }
};

struct Bf16 {
    using Sum = Floats;
    static constexpr int BYTES = 4 * LANES;
    static Ints load(const char* from) { return load_pairs(from); }
    static Floats value(Floats sum, float) { return sum; }
};

constexpr int WHOLE = GROUP / LANES;  // vectors

// COUNT rows of x by LANES * VECTORS outputs, over `pairs` pairs of inputs: added to `result` (tokens, GROUP), or put
// there. `ahead` goes with `weights` from pair to pair, and what it points to is fetched: into the first cache where a
// step has so few tokens that reading weights is what takes the time, else into the second.
template <class Weight, int COUNT, int VECTORS>
void tile(const char* weights, const char* ahead, const uint16_t* x, size_t stride, int pairs, const float* scales,
          int num_scales, bool is_first, float* result) {
    constexpr int LOADED = std::min(4, VECTORS);  // vectors of weights at once, or registers would not do
    typename Weight::Sum sum[COUNT][VECTORS];
    for (int t = 0; t < COUNT; t++)
        for (int v = 0; v < VECTORS; v++) sum[t][v] = typename Weight::Sum{};
    for (int pair = 0; pair < pairs; pair++, weights += WHOLE * Weight::BYTES, ahead += WHOLE * Weight::BYTES) {
        for (int line = 0; line < VECTORS * Weight::BYTES; line += 64)
            _mm_prefetch(ahead + line, COUNT <= FEW ? _MM_HINT_T0 : _MM_HINT_T1);
        for (int some = 0; some < VECTORS; some += LOADED) {
            Ints w[LOADED];
            for (int v = 0; v < LOADED; v++) w[v] = Weight::load(weights + (some + v) * Weight::BYTES);
            for (int t = 0; t < COUNT; t++) {
                int32_t two;
                std::memcpy(&two, x + t * stride + 2 * pair, sizeof two);
                for (int v = 0; v < LOADED; v++)
                    sum[t][some + v] = add_products(sum[t][some + v], w[v], each(two));
            }
        }
    }
    for (int t = 0; t < COUNT; t++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = result + t * GROUP + LANES * v;
            const Floats value = Weight::value(sum[t][v], scales[t * num_scales]);
            store(to, is_first ? value : load(to) + value);
        }
}

// Tiles of tokens [first, first + count) by a group of outputs (VECTORS is WHOLE) or one half of it.
template <class Weight, int VECTORS>
void tiles(const Matrix& matrix, int half, const Inputs& in, int first, int count, float* result) {
    using Tile = decltype(&tile<Weight, 1, NARROW>);
    static constexpr Tile FLAT[FEW] = {tile<Weight, 1, wide(1, VECTORS)>, tile<Weight, 2, wide(2, VECTORS)>,
                                       tile<Weight, 3, wide(3, VECTORS)>};
    static constexpr Tile TALL[] = {tile<Weight, 1, NARROW>, tile<Weight, 2, NARROW>, tile<Weight, 3, NARROW>,
                                    tile<Weight, 4, NARROW>, tile<Weight, 5, NARROW>, tile<Weight, 6, NARROW>};
    static_assert(MANY <= 6 && VECTORS % NARROW == 0);
    constexpr int PAIR = WHOLE * Weight::BYTES;
    const int num_scales = blocks_of(matrix.inputs);
    const size_t stride = matrix.inputs;
    for (int input = 0; input < matrix.inputs; input += BLOCK) {
        const char* w = matrix.weights + (half / 2 * stride + input) / 2 * PAIR + half % 2 * (PAIR / 2);
        const int pairs = std::min(BLOCK, matrix.inputs - input) / 2;
        const uint16_t* x = in.values + first * stride + input;
        const float* scales = in.scales + first * num_scales + input / BLOCK;
        if (count <= FEW) {
            const int width = wide(count, VECTORS);
            for (int v = 0; v < VECTORS; v += width, w += width * Weight::BYTES)
                FLAT[count - 1](w, w + AHEAD * PAIR, x, stride, pairs, scales, num_scales, input == 0,
                                result + LANES * v);
            continue;
        }
        for (int v = 0; v < VECTORS; v += NARROW, w += NARROW * Weight::BYTES) {  // which the first cache holds
            const char* next = v + NARROW < VECTORS ? w + NARROW * Weight::BYTES : w + pairs * PAIR - v * Weight::BYTES;
            for (int t = 0, now; t < count; t += now) {
                const int num_tiles = (count - t + MANY - 1) / MANY;
                now = (count - t + num_tiles - 1) / num_tiles;  // tiles alike: 4 and 3 are quicker than 6 and 1
                TALL[now - 1](w, t ? w : next, x + t * stride, stride, pairs, scales + t * num_scales, num_scales,
                              input == 0, result + t * GROUP + LANES * v);
            }
        }
    }
}

#if WITH_TILES
// The same of halves [half, half + num) where weights lie in tiles.
void tiled(const Matrix& matrix, int half, int num, const Inputs& in, int first, int count, float* result) {
    const int num_scales = blocks_of(matrix.inputs);
    const size_t stride = matrix.inputs;
    alignas(64) int32_t sums[4 * TILE_TOKENS * 16];
    for (int output = 0; output < num * HALF; output += TILE_OUTPUTS)
        for (int input = 0; input < matrix.inputs; input += BLOCK) {
            const int inputs = std::min(BLOCK, matrix.inputs - input);
            const char* w = matrix.weights + (half * HALF + output) * stride + input * TILE_OUTPUTS;
            for (int t = 0; t < count; t += TILE_TOKENS) {
                const int rows = std::min(TILE_TOKENS, count - t);
                use_tiles(rows);
                add_tiles(w, (const char*)(in.values + (first + t) * stride) + input, matrix.inputs,
                          inputs / TILE_INPUTS, t == 0, sums);
                for (int row = 0; row < rows; row++) {
                    const float scale = in.scales[(first + t + row) * num_scales + input / BLOCK];
                    float* to = result + (t + row) * GROUP + output;
                    for (int v = 0; v < 2; v++) {
                        const int32_t* own = sums + v * 2 * TILE_TOKENS * 16 + row * 16;
                        const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(own), 8);
                        const __m512i sum = _mm512_add_epi32(upper, _mm512_load_si512(own + TILE_TOKENS * 16));
                        const Floats value = Int8::value((Ints)sum, scale);
                        store(to + LANES * v, input ? load(to + LANES * v) + value : value);
                    }
                }
            }
        }
}
#endif

// All outputs of all tokens: `take(token, half, y)` gets 64 of them at a time, vectors y[] with scales and biases
// applied.
template <class Take>
void multiply(const Crew& crew, const Matrix& matrix, const Inputs& in, int num_tokens, const Take& take) {
    const int halves = padded(matrix.outputs) / HALF, chunks = (num_tokens + TOKENS - 1) / TOKENS;
    const int wide = crew.count() == 1 || halves * chunks >= 8 * crew.count() ? 2 : 1;
    crew.run((halves + wide - 1) / wide * chunks, [&](int item) {
        alignas(64) float result[TOKENS * GROUP];
        const int first = item % chunks * TOKENS, count = std::min(TOKENS, num_tokens - first);
        const int half = item / chunks * wide, num = std::min(wide, halves - half);
        const auto compute = matrix.form == BFLOAT16 ? (num == 2 ? tiles<Bf16, WHOLE> : tiles<Bf16, WHOLE / 2>)
                                                     : (num == 2 ? tiles<Int8, WHOLE> : tiles<Int8, WHOLE / 2>);
#if WITH_TILES
        if (matrix.form == TILED)
            tiled(matrix, half, num, in, first, count, result);
        else
#endif
            compute(matrix, half, in, first, count, result);
        for (int h = half; h < half + num; h++) {
            const float *scale = matrix.scales + h * HALF, *bias = matrix.bias + h * HALF;
            for (int t = 0; t < count; t++) {
                Floats y[WHOLE / 2];
                for (int v = 0; v < WHOLE / 2; v++)
                    y[v] = fused(load(result + t * GROUP + (h - half) * HALF + LANES * v), load(scale + LANES * v),
                                 load(bias + LANES * v));
                take(first + t, h, y);
            }
        }
    });
}

}  // namespace
