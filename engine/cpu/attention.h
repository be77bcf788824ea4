// Attention over slots of the KV pool, and what goes there.

namespace {

// Slots lie anywhere, so no prefetcher of the processor knows where the next is. A block of them is fetched whole, for
// all heads, which come one after the other.
void fetch(const uint16_t* pool, const int32_t* slots, size_t slot_size, int first, int end) {
    for (int k = first; k < std::min(end, first + KEYS); k++)
        for (size_t i = 0; i < slot_size; i += 32)
            _mm_prefetch((const char*)(pool + slots[k] * slot_size + i), _MM_HINT_T0);
}

constexpr int VECTORS_OF_KEYS = KEYS / LANES;

// Scores of COUNT queries, of `stride` pairs each, for LANES * VECTORS keys in columns (VECTORS, pairs, LANES).
template <int COUNT, int VECTORS>
void score(const int32_t* query, int stride, int pairs, const Ints* keys, float* scores) {
    Floats sum[COUNT][VECTORS];
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) sum[q][v] = Floats{};
    for (int pair = 0; pair < pairs; pair++)
        for (int q = 0; q < COUNT; q++) {
            const Ints two = each(query[q * stride + pair]);
            for (int v = 0; v < VECTORS; v++) sum[q][v] = add_products(sum[q][v], keys[v * COLUMNS + pair], two);
        }
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) store(scores + q * KEYS + LANES * v, sum[q][v]);
}

// Adds values of keys [first, last), LANES * VECTORS dimensions from `dim` on, to the sums of COUNT queries.
template <int COUNT, int VECTORS>
void add_values(const uint16_t* const* values, int first, int last, int dim, int dims, const float* weights,
                float* sums, int stride) {
    Floats sum[COUNT][VECTORS];
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) sum[q][v] = load(sums + q * stride + dim + LANES * v);
    for (int key = first; key < last; key++) {
        Floats value[VECTORS];
        for (int v = 0; v < VECTORS; v++) {  // a load under a mask would keep sums out of registers, in gcc 12
            const uint16_t* from = values[key] + dim + LANES * v;
            value[v] = VECTORS == 4 ? load_bf16(from) : load_bf16(from, dims - dim);
        }
        for (int q = 0; q < COUNT; q++)
            for (int v = 0; v < VECTORS; v++) sum[q][v] = fused(each(weights[q * KEYS + key]), value[v], sum[q][v]);
    }
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) store(sums + q * stride + dim + LANES * v, sum[q][v]);
}

#if WITH_TILES
// Elements 0 to 15 of two vectors of thirty-two side by side, and 16 to 31.
struct Pairs {
    alignas(64) uint16_t at[32];
    constexpr explicit Pairs(int first) : at() {
        for (int i = 0; i < 32; i++) at[i] = uint16_t(first + i / 2 + i % 2 * 32);
    }
};
constexpr Pairs FIRST(0), LAST(16);
#endif

using Score = decltype(&score<1, 1>);
using AddValues = decltype(&add_values<1, 1>);

// By queries less one (TOGETHER of them are used), and vectors of keys less one.
constexpr Score SCORE[6][4] = {
    {score<1, 1>, score<1, 2>, score<1, 3>, score<1, 4>}, {score<2, 1>, score<2, 2>, score<2, 3>, score<2, 4>},
    {score<3, 1>, score<3, 2>, score<3, 3>, score<3, 4>}, {score<4, 1>, score<4, 2>, score<4, 3>, score<4, 4>},
    {score<5, 1>, score<5, 2>, score<5, 3>, score<5, 4>}, {score<6, 1>, score<6, 2>, score<6, 3>, score<6, 4>},
};
// By queries less one, for one and for four vectors of dimensions.
constexpr AddValues ADD_VALUES[6][2] = {
    {add_values<1, 1>, add_values<1, 4>}, {add_values<2, 1>, add_values<2, 4>}, {add_values<3, 1>, add_values<3, 4>},
    {add_values<4, 1>, add_values<4, 4>}, {add_values<5, 1>, add_values<5, 4>}, {add_values<6, 1>, add_values<6, 4>},
};

// What attention is given and gives: queries bfloat16 (tokens, heads, query_stride), zeros behind head_dim, and
// attended (tokens, padded heads * head_dim).
struct Heads {
    uint16_t* query;
    int query_stride;
    float* attended;
};

// Room for tokens' queries, for what attention gives them, and for inputs of products as wide as `widest`.
void take_rows(Cutter& take, size_t tokens, int num_heads, int head_dim, size_t widest, Heads& heads, Inputs& inputs) {
    heads.query_stride = (head_dim + 31) / 32 * 32;
    heads.query = (uint16_t*)take(tokens * num_heads * heads.query_stride * 2);
    heads.attended = (float*)take(tokens * padded(num_heads * head_dim) * 4);
    inputs.values = (uint16_t*)take(tokens * widest * 2);
    inputs.scales = (float*)take(tokens * blocks_of(int(widest)) * 4);
}

// Consecutive tokens whose attention is computed together: tokens [from, from + count) of a row, or, where there are
// several rows, all of theirs. What precedes `common`, a multiple of KEYS, is in the same slots for all rows then.
struct Part {
    const Row* row;
    int num_rows, from, count, common;
};

// Attention of a part of a step for the heads that share one key head, block by block of keys: what a query has seen so
// far is in `sums`, `largest` and `total`. Softmax is taken block by block (arXiv:2205.14135): sums shrink whenever a
// larger score comes. Queries that see the same block share reading it, and nothing else.
class Attention {
  public:
    Attention(const Model& model, const Step& step, const Heads& heads, int layer, const Part& part, int kv_head)
        : dim_(model.head_dim),
          group_(model.num_heads / model.num_kv_heads),
          kv_head_(kv_head),
          slot_size_(size_t(2) * model.num_kv_heads * dim_),
          stride_((dim_ + 15) / 16 * 16),
          query_pairs_(heads.query_stride / 2),
          pool_(step.kv_pool + size_t(layer) * step.num_slots * slot_size_ + size_t(kv_head) * dim_),
          scale_(each(1.0f / std::sqrt(float(dim_)))),
          has_tiles_(WITH_TILES && model.has_tiles) {
        const int first_token = part.row->first + part.from;
        for (int t = 0; t < part.count; t++)
            std::memcpy(
                query_ + t * group_ * query_pairs_,
                heads.query + (size_t(first_token + t) * model.num_heads + kv_head * group_) * heads.query_stride,
                size_t(group_) * heads.query_stride * 2);
        const int num_queries = part.count * group_;
        for (int q = 0; q < num_queries; q++) {
            largest_[q] = -INFINITY;
            total_[q] = 0;
        }
        std::memset(sums_, 0, size_t(num_queries) * stride_ * sizeof(float));

        int query = 0;
        for (const Row* row = part.row; row < part.row + part.num_rows; row++) {
            const int from = row == part.row ? part.from : 0, count = part.num_rows == 1 ? part.count : row->length;
            for (int q = 0; q < count * group_; q++) position_[query++] = row->start + from + q / group_;
        }
        query = 0;
        for (const Row* row = part.row; row < part.row + part.num_rows; row++) {
            const int32_t* slots = step.slot_table + row->table_row * step.table_width;
            if (row == part.row) see(slots, 0, part.common, 0, num_queries);
            const int own = group_ * (part.num_rows == 1 ? part.count : row->length);
            see(slots, part.common, position_[query + own - 1] + 1, query, query + own);
            query += own;
        }

        for (int q = 0; q < num_queries; q++) {
            float* to = heads.attended + size_t(first_token + q / group_) * padded(model.num_heads * dim_) +
                        (kv_head * group_ + q % group_) * dim_;
            const Floats inverse = each(1.0f / total_[q]);
            for (int d = 0; d < dim_; d += LANES)
                store(to + d, load(sums_ + q * stride_ + d) * inverse, first_lanes(dim_ - d));
        }
    }

  private:
    // Queries [first_query, last_query) see the keys of positions [begin, end), each up to its own position.
    void see(const int32_t* slots, int begin, int end, int first_query, int last_query) {
        if (kv_head_ == 0) fetch(pool_, slots, slot_size_, begin, end);
        for (int first = begin; first < end; first += KEYS) {
            const int num_keys = std::min(KEYS, end - first);
            const uint16_t* values[KEYS];
            for (int k = 0; k < num_keys; k++) values[k] = pool_ + slots[first + k] * slot_size_ + slot_size_ / 2;
            if (kv_head_ == 0) fetch(pool_, slots, slot_size_, first + KEYS, end);
            compare(values, num_keys, first_query, last_query);
            for (int q = first_query; q < last_query; q++)
                weigh(q, std::min(num_keys, position_[q] + 1 - first));
#if WITH_TILES
            if (has_tiles_) {
                if (lay_out(values, num_keys, position_[first_query] + 1 - first)) {
                    add_in_tiles(num_keys, first_query, last_query);
                    continue;
                }
                for (int q = first_query; q < last_query; q++) {  // each for itself, what it does not see left out
                    const int seen = std::min(num_keys, position_[q] + 1 - first);
                    if (seen <= 0) continue;
                    lay_out(values, seen, seen);
                    add_in_tiles(seen, q, q + 1);
                }
                continue;
            }
#endif
            for (int q = first_query, num; q < last_query; q += num) {
                num = std::min(TOGETHER, last_query - q);
                add(values, num_keys, first, q, num);
            }
        }
    }

    void compare(const uint16_t* const* values, int num_keys, int first_query, int last_query) {
        const int pairs = (dim_ + 1) / 2, vectors = (num_keys + LANES - 1) / LANES;
        for (int v = 0; v < vectors; v++)
            for (int pair = 0; pair < pairs; pair += LANES) {
                Ints* columns = columns_ + v * COLUMNS + pair;
                for (int j = 0; j < LANES; j++)  // lanes beyond the last key repeat it; nobody looks at them
                    columns[j] = load_pairs(
                        values[std::min(LANES * v + j, num_keys - 1)] - slot_size_ / 2 + 2 * pair,
                        first_lanes(pairs - pair));
                transpose(columns);
            }
#if WITH_TILES
        if (has_tiles_) {
            each_tile(first_query, last_query, [&](int q) {
                score_tiles((const char*)(query_ + q * query_pairs_), 4 * query_pairs_, (pairs + 15) / 16,
                            (const char*)columns_, COLUMNS * sizeof(Ints), vectors, scores_ + q * KEYS);
            });
            return;
        }
#endif
        for (int q = first_query, num; q < last_query; q += num) {
            num = std::min(TOGETHER, last_query - q);
            for (int v = 0; v < vectors; v += 4)
                SCORE[num - 1][std::min(4, vectors - v) - 1](query_ + q * query_pairs_, query_pairs_, pairs,
                                                             columns_ + v * COLUMNS, scores_ + q * KEYS + LANES * v);
        }
    }

    // Scores of a query become weights of the values; what it has seen before shrinks.
    void weigh(int q, int seen) {
#if WITH_TILES
        if (has_tiles_) std::memset(upper_ + q * KEYS, 0, KEYS * 2), std::memset(lower_ + q * KEYS, 0, KEYS * 2);
#endif
        if (seen <= 0) return;
        const int vectors = (seen + LANES - 1) / LANES;
        float* s = scores_ + q * KEYS;
        Floats v[VECTORS_OF_KEYS], most = each(largest_[q]);
        for (int i = 0; i < vectors; i++) {
            v[i] = choose(first_lanes(seen - LANES * i), load(s + LANES * i) * scale_, each(-INFINITY));
            most = larger(most, v[i]);
        }
        const float now = largest_of(most);
        Floats sum = each(0.0f);
        for (int i = 0; i < vectors; i++) {
            v[i] = choose(first_lanes(seen - LANES * i), exponential(v[i] - each(now)), each(0.0f));
            sum = sum + v[i];
            store(s + LANES * i, v[i]);
#if WITH_TILES
            if (!has_tiles_) continue;
            const __m256i upper = (__m256i)_mm512_cvtneps_pbh((__m512)v[i]);
            const __m256i lower = (__m256i)_mm512_cvtneps_pbh((__m512)(v[i] - widen(upper)));
            _mm256_store_si256((__m256i*)(upper_ + q * KEYS + LANES * i), upper);
            _mm256_store_si256((__m256i*)(lower_ + q * KEYS + LANES * i), lower);
#endif
        }
        const float shrink = exponential(each(largest_[q] - now))[0];
        total_[q] = total_[q] * shrink + sum_of(sum);
        largest_[q] = now;
        for (int d = 0; d < stride_; d += LANES) {
            float* own = sums_ + q * stride_ + d;
            store(own, load(own) * each(shrink));
        }
    }

#if WITH_TILES
    // `work(q)` for parts of the queries as alike as may be, each as many as tiles have rows then.
    template <class Work>
    static void each_tile(int first_query, int last_query, const Work& work) {
        const int count = last_query - first_query, parts = (count + TILE_TOKENS - 1) / TILE_TOKENS;
        const int most = (count + parts - 1) / parts;
        for (int q = first_query; q < last_query; q += most) {
            use_tiles(std::min(most, last_query - q));
            work(q);
        }
    }

    // Values as tiles want them: two keys side by side. False where one that not all queries see, as they do the
    // first keys alone, is no finite number: zero times that would not be zero.
    bool lay_out(const uint16_t* const* values, int num_keys, int seen_by_all) {
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        const __m512i first = _mm512_load_si512(FIRST.at), last = _mm512_load_si512(LAST.at);
        __mmask32 strange = 0;
        for (int d = 0; d < stride_; d += 32) {
            const __mmask32 lanes = d + 32 <= dim_ ? ~__mmask32(0) : (__mmask32(1) << (dim_ - d)) - 1;
            int32_t* to = laid_out_ + d / 16 * 2 * TILE / 4;
            for (int k = 0; k < (num_keys + 31) / 32 * 32; k += 2, to += 16) {
                __m512i two[2] = {};
                for (int i = 0; i < 2 && k + i < num_keys; i++) {
                    two[i] = _mm512_maskz_loadu_epi16(lanes, values[k + i] + d);
                    if (k + i >= seen_by_all)
                        strange |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(two[i], exponent), exponent);
                }
                _mm512_store_si512(to, _mm512_permutex2var_epi16(two[0], first, two[1]));
                if (d + 16 < stride_)
                    _mm512_store_si512(to + 2 * TILE / 4,
                                       _mm512_permutex2var_epi16(two[0], last, two[1]));
            }
        }
        return !strange;
    }

    // Queries take values in, by weights of twice the bits of bfloat16.
    void add_in_tiles(int num_keys, int first_query, int last_query) {
        each_tile(first_query, last_query, [&](int q) {
            for (int d = 0; d < stride_; d += 64)
                value_tiles((const char*)(upper_ + q * KEYS), (const char*)(lower_ + q * KEYS), (num_keys + 31) / 32,
                            (const char*)(laid_out_ + d / 16 * 2 * TILE / 4), std::min(4, (stride_ - d) / 16),
                            sums_ + q * stride_ + d, 4 * stride_);
        });
    }
#endif

    // Queries [q, q + num) take values in, each of as many keys as it sees: what all see is read once, then the rest.
    void add(const uint16_t* const* values, int num_keys, int first, int q, int num) {
        const int end = q + num;
        for (int done = 0; q < end; q++) {
            const int seen = std::min(num_keys, position_[q] + 1 - first);
            if (seen <= done) continue;
            const AddValues* by = ADD_VALUES[end - q - 1];
            for (int d = 0; d < dim_;) {
                const bool is_whole = d + 4 * LANES <= dim_;
                by[is_whole](values, done, seen, d, dim_, scores_ + q * KEYS, sums_ + q * stride_, stride_);
                d += is_whole ? 4 * LANES : LANES;
            }
            done = seen;
        }
    }

    const int dim_, group_, kv_head_;
    const size_t slot_size_;
    const int stride_, query_pairs_;
    const uint16_t* const pool_;
    const Floats scale_;
    const bool has_tiles_;
    alignas(64) int32_t query_[QUERIES * HEAD_DIM / 2];  // (queries, query_pairs)
    alignas(64) Ints columns_[VECTORS_OF_KEYS * COLUMNS];
    alignas(64) float scores_[QUERIES * KEYS];
    alignas(64) float sums_[QUERIES * HEAD_DIM];  // (queries, stride)
#if WITH_TILES
    alignas(64) uint16_t upper_[QUERIES * KEYS], lower_[QUERIES * KEYS];  // of weights, where there are tiles
    alignas(64) int32_t laid_out_[HEAD_DIM / 16 * 2 * 256];               // of each 16 dimensions two tiles of values
#endif
    float largest_[QUERIES], total_[QUERIES];
    int position_[QUERIES];  // rises from query to query of a row
};

// One token's queries and keys normalised where the model does that, and rotated; keys and values go to its slot.
void place_heads(const Model& model, const Step& step, const Heads& heads, const Layer& layer, int index, int token,
                 int slot, float* qkv) {
    const int dim = model.head_dim, half = dim / 2, queries = model.num_heads, kv_heads = model.num_kv_heads;
    uint16_t* cell = step.kv_pool + (size_t(index) * step.num_slots + slot) * 2 * kv_heads * dim;
    alignas(64) float cosine[HEAD_DIM], sine[HEAD_DIM], rotated[HEAD_DIM];
    const uint16_t* rotation = step.rotation + step.rotation_rows[token] * 2 * dim;
    for (int d = 0; d < dim; d += LANES) {
        store(cosine + d, load_bf16(rotation + d, dim - d));
        store(sine + d, load_bf16(rotation + dim + d, dim - d));
    }
    for (int h = 0; h < queries + kv_heads; h++) {
        float* x = qkv + h * dim;
        if (layer.qk_norm) {
            const float factor = 1.0f / std::sqrt(square_sum(x, dim) / dim + model.eps);
            for (int d = 0; d < dim; d++) x[d] = x[d] * factor * layer.qk_norm[h * dim + d];
        }
        for (int d = 0; d < half; d++) {
            rotated[d] = x[d] * cosine[d] + x[d + half] * sine[d];
            rotated[d + half] = x[d + half] * cosine[d + half] + x[d] * sine[d + half];
        }
        uint16_t* query = heads.query + (size_t(token) * queries + h) * heads.query_stride;
        store_bf16(h < queries ? query : cell + (h - queries) * dim, rotated, dim);
        if (h < queries) std::memset(query + dim, 0, (heads.query_stride - dim) * 2);
    }
    store_bf16(cell + kv_heads * dim, qkv + (queries + kv_heads) * dim, kv_heads * dim);
}

}  // namespace
