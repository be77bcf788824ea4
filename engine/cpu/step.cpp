// A step of a dense decoder (Llama, Qwen2, Qwen3) on a CPU with AVX-512: embedding rows in, float32 logits out.
//
// Called through ctypes by `native.py`; the structs at the head are declared there a second time. It owns nothing but
// its threads: weights, KV pool, slot table, rows and workspace belong to the caller.
//
// Every token's arithmetic is its own. No sum depends on which tokens, rows or drafts stand beside it, nor on the
// number of threads: products add up inputs in one order whatever the tile, attention walks keys in blocks that begin
// at multiples of KEYS. A position computed alone, in a batch, as a draft or in a chunk of a prompt is the same to the
// bit. (Compiled with -ffp-contract=off: a compiler fuses products and sums in one copy of a template and not another.)
//
// Products. A weight matrix is kept in groups of 128 outputs, each group pair of inputs by pair of inputs:
//
//     [group][pair][8 vectors][16 outputs][2 inputs]        of int8 or bfloat16
//
// so that one instruction (vpdpwssd, vdpbf16ps) adds two inputs' products to sixteen outputs, and a step reads weights
// in the order in which they lie. int8 weights are multiplied as integers: a row of inputs becomes 16-bit fixed point
// with a scale for each BLOCK inputs, finer than bfloat16 is (a bfloat16 has 8 bits, the largest value of a block here
// has 15), and sums of integers are exact. Registers hold the sums of three tokens by 128 outputs, which read weights
// once and as they lie, or of six by 64, which multiply more for each weight that they load: the first for steps of up
// to three tokens, where reading weights is what takes the time, the second for others. Sums are the same in both.

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int VERSION = 3;     // of what native.py is told of this file
constexpr int GROUP = 128;     // outputs whose weights stand together
constexpr int HALF = 64;       // rows of inputs and outputs are padded to multiples of it
constexpr int BLOCK = 512;     // inputs with one scale: 512 * 32767 * 128 is the most that 32 bits hold
constexpr int TOKENS = 48;     // of a product at once: their results stay in the first cache
constexpr int FEW = 3;         // tokens by a whole group of outputs
constexpr int MANY = 6;        // tokens by a half of it
constexpr int AHEAD = 16;      // pairs of inputs whose weights are fetched before they are needed
constexpr int WORTH_WAKING = 1 << 18;  // logits to be compared
constexpr int KEYS = 64;       // attention looks at so many positions at once
constexpr int QUERIES = 64;    // and so many heads of query tokens
constexpr int TOGETHER = 6;    // of them share registers
constexpr int HEAD_DIM = 256;  // at most
constexpr int COLUMNS = HEAD_DIM / 2;

struct Matrix {
    const char* weights;
    const float* scales;  // (padded outputs,); ones where weights are bfloat16
    const float* bias;    // (padded outputs,)
    int32_t inputs;       // padded
    int32_t outputs;      // not padded
    int32_t is_int8;
};

struct Layer {
    const float* attention_norm;  // (padded hidden,)
    const float* qk_norm;         // (heads + kv_heads, head_dim) or null
    const float* mlp_norm;
    Matrix qkv;
    Matrix out;
    Matrix gate_up;  // groups of 32 gates and their 32 ups
    Matrix down;
};

struct Model {
    const Layer* layers;
    const float* norm;
    Matrix head;
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    float eps;
};

struct Row {
    int32_t table_row, start, first, length;  // tokens [first, first + length) at positions start, start + 1, ...
    int32_t shared;                           // so many first positions are in the slots of the row before it
};

struct Step {
    const Row* rows;
    const uint16_t* const* embeddings;  // of each token bfloat16 (hidden * (1 + taps),)
    const int32_t* taps;                // what follows a token's embedding is added after layers 0, 1, ... (DeepStack)
    const uint16_t* rotation;           // bfloat16 (any, 2, head_dim): cosines, and sines with the first half negated
    const int64_t* rotation_rows;       // of each token
    const int32_t* slot_table;          // (any, table_width)
    uint16_t* kv_pool;                  // bfloat16 (layers, num_slots, 2, kv_heads, head_dim)
    const int32_t* ends;                // tokens whose logits are wanted
    float* logits;                      // (num_ends, vocab)
    char* workspace;
    const int32_t* told;                // after so many layers, hidden states are told to a draft head
    uint16_t* features;                 // bfloat16 (num_slots, num_told * hidden): there, by slot
    int64_t num_slots, table_width;
    int32_t num_rows, num_tokens, num_ends, num_told;
};

int padded(int count) { return (count + HALF - 1) / HALF * HALF; }
int blocks_of(int inputs) { return (inputs + BLOCK - 1) / BLOCK; }

// ---- threads --------------------------------------------------------------------------------------------------------

// Items of work that any thread takes, the caller among them: who is late misses items, nobody waits for it. Threads
// sleep between steps.
class Threads {
  public:
    explicit Threads(int count) : count_(count) {
        try {
            for (int i = 1; i < count; i++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {  // no more threads may be: those that are take all items
        }
    }

    int count() const { return count_; }

    void begin() {
        std::lock_guard<std::mutex> lock(mutex_);
        active_ = true;
        wake_.notify_all();
    }

    void end() { active_ = false; }

    template <class Work>
    void run(int items, const Work& work) {
        call_ = [](const void* context, int item) { (*static_cast<const Work*>(context))(item); };
        context_ = &work;
        items_ = items;
        unfinished_.store(items, std::memory_order_relaxed);
        // The upper half counts phases, so that no thread takes an item of a phase by a number read in another.
        ticket_.store((++phase_ << 32) | uint32_t(items), std::memory_order_release);
        take();
        for (int spins = 0; unfinished_.load(std::memory_order_acquire); spins++) rest(spins);
    }

  private:
    static void rest(int spins) {
        if (spins % 256 == 255)
            sched_yield();  // whoever holds the last item may need this core
        else
            _mm_pause();
    }

    void take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (uint32_t(ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call_(context_, items_ - int(uint32_t(ticket)));
            unfinished_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve() {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return active_.load(); });
            }
            for (int spins = 0; active_.load(std::memory_order_relaxed); spins++) {
                take();
                rest(spins);
            }
        }
    }

    const int count_;
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int items_ = 0;
    uint64_t phase_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    alignas(64) std::atomic<bool> active_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

std::mutex threads_mutex;    // held by the step that uses them; another step at the same time works alone
Threads* threads = nullptr;  // never freed: they sleep until the process ends

void forget_threads() {  // in a forked child, which has none of them
    threads = nullptr;
    new (&threads_mutex) std::mutex;
}

// The threads for one step.
class Crew {
  public:
    explicit Crew(int count) {
        if (count <= 1 || !threads_mutex.try_lock()) return;
        static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
        (void)registered;
        if (!threads || threads->count() != count) threads = new Threads(count);
        threads_ = threads;
        threads_->begin();
    }
    ~Crew() {
        if (!threads_) return;
        threads_->end();
        threads_mutex.unlock();
    }
    Crew(const Crew&) = delete;

    int count() const { return threads_ ? threads_->count() : 1; }

    template <class Work>
    void run(int items, const Work& work) const {
        if (threads_ && items > 1)
            threads_->run(items, work);
        else
            for (int item = 0; item < items; item++) work(item);
    }

  private:
    Threads* threads_ = nullptr;
};

}  // namespace

EXPORT int beholder_version() { return VERSION; }

EXPORT int beholder_is_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Whether the processor multiplies matrices of bfloat16 as such (AMX). oneDNN uses that and this file does not.
EXPORT int beholder_has_amx() {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// All that follows is compiled for AVX-512 and runs only where the function above says so.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
#endif

namespace {

// ---- numbers --------------------------------------------------------------------------------------------------------

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

// e^x for x up to 0, within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
__m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // the order of these lets what is no number through
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

// ---- products -------------------------------------------------------------------------------------------------------

// Rows of inputs as products take them: 16 bits each, bfloat16 or fixed point with a scale for each block.
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
        __m512 largest = _mm512_setzero_ps();
        for (int i = 0; i < count; i += 16) {
            __m512 v = _mm512_loadu_ps(x + first + i);
            if (weight)
                v = _mm512_mul_ps(_mm512_mul_ps(v, _mm512_set1_ps(factor)), _mm512_loadu_ps(weight + first + i));
            _mm512_store_ps(y + i, v);
            largest = _mm512_max_ps(largest, _mm512_abs_ps(v));
        }
        if (!matrix.is_int8) {
            store_bf16(to, y, count);
            continue;
        }
        const float most = _mm512_reduce_max_ps(largest);
        const __m512 up = _mm512_set1_ps(most > 0 ? 32767.0f / most : 0.0f);
        in.scales[token * blocks_of(matrix.inputs) + first / BLOCK] = most / 32767.0f;
        for (int i = 0; i < count; i += 16) {
            const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(y + i), up));
            _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtsepi32_epi16(fixed));
        }
    }
}

void prepare_normed(const Matrix& matrix, const Inputs& in, int token, const float* x, const float* weight,
                    const Model& model) {
    const float mean = square_sum(x, model.hidden) / model.hidden;
    prepare(matrix, in, token, x, 1.0f / std::sqrt(mean + model.eps), weight);
}

struct Int8 {
    typedef int Sum __attribute__((vector_size(64)));  // see Floats
    static constexpr int BYTES = 32;
    static __m512i load(const char* from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)); }
    static Sum add(Sum sum, __m512i w, __m512i x) { return (Sum)_mm512_dpwssd_epi32((__m512i)sum, w, x); }
    static __m512 value(Sum sum, float scale) {
        return _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sum), _mm512_set1_ps(scale));
    }
};

struct Bf16 {
    typedef Floats Sum;
    static constexpr int BYTES = 64;
    static __m512i load(const char* from) { return _mm512_loadu_si512(from); }
    static Sum add(Sum sum, __m512i w, __m512i x) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
    }
    static __m512 value(Sum sum, float) { return (__m512)sum; }
};

// COUNT rows of x by 16 * VECTORS outputs, over `pairs` pairs of inputs: added to `result` (tokens, GROUP), or put
// there. `ahead` goes with `weights` from pair to pair, and what it points to is fetched: into the first cache where a
// step has so few tokens that reading weights is what takes the time, else into the second.
template <class Weight, int COUNT, int VECTORS>
void tile(const char* weights, const char* ahead, const uint16_t* x, size_t stride, int pairs, const float* scales,
          int num_scales, bool is_first, float* result) {
    typename Weight::Sum sum[COUNT][VECTORS];
    for (int t = 0; t < COUNT; t++)
        for (int v = 0; v < VECTORS; v++) sum[t][v] = typename Weight::Sum{};
    for (int pair = 0; pair < pairs; pair++, weights += 8 * Weight::BYTES, ahead += 8 * Weight::BYTES) {
        for (int line = 0; line < VECTORS * Weight::BYTES; line += 64)
            _mm_prefetch(ahead + line, COUNT <= FEW ? _MM_HINT_T0 : _MM_HINT_T1);
        for (int half = 0; half < VECTORS; half += 4) {  // four by four, or registers would not do
            __m512i w[4];
            for (int v = 0; v < 4; v++) w[v] = Weight::load(weights + (half + v) * Weight::BYTES);
            for (int t = 0; t < COUNT; t++) {
                int32_t two;
                std::memcpy(&two, x + t * stride + 2 * pair, sizeof two);
                for (int v = 0; v < 4; v++)
                    sum[t][half + v] = Weight::add(sum[t][half + v], w[v], _mm512_set1_epi32(two));
            }
        }
    }
    for (int t = 0; t < COUNT; t++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = result + t * GROUP + 16 * v;
            const __m512 value = Weight::value(sum[t][v], scales[t * num_scales]);
            _mm512_store_ps(to, is_first ? value : _mm512_add_ps(_mm512_load_ps(to), value));
        }
}

// Tiles of tokens [first, first + count) by a group of outputs (VECTORS is 8) or one half of it.
template <class Weight, int VECTORS>
void tiles(const Matrix& matrix, int half, const Inputs& in, int first, int count, float* result) {
    using Tile = decltype(&tile<Weight, 1, 4>);
    static constexpr Tile WIDE[] = {tile<Weight, 1, VECTORS>, tile<Weight, 2, VECTORS>, tile<Weight, 3, VECTORS>};
    static constexpr Tile TALL[] = {tile<Weight, 1, 4>, tile<Weight, 2, 4>, tile<Weight, 3, 4>,
                                    tile<Weight, 4, 4>, tile<Weight, 5, 4>, tile<Weight, 6, 4>};
    constexpr int PAIR = 8 * Weight::BYTES;
    const int num_scales = blocks_of(matrix.inputs);
    const size_t stride = matrix.inputs;
    for (int input = 0; input < matrix.inputs; input += BLOCK) {
        const char* w = matrix.weights + (half / 2 * stride + input) / 2 * PAIR + half % 2 * (PAIR / 2);
        const int pairs = std::min(BLOCK, matrix.inputs - input) / 2;
        const uint16_t* x = in.values + first * stride + input;
        const float* scales = in.scales + first * num_scales + input / BLOCK;
        if (count <= FEW) {
            WIDE[count - 1](w, w + AHEAD * PAIR, x, stride, pairs, scales, num_scales, input == 0, result);
            continue;
        }
        for (int v = 0; v < VECTORS; v += 4, w += PAIR / 2) {  // a half after the other, which the first cache holds
            const char* next = v + 4 < VECTORS ? w + PAIR / 2 : w + pairs * PAIR - v * Weight::BYTES;
            for (int t = 0, now; t < count; t += now) {
                const int num_tiles = (count - t + MANY - 1) / MANY;
                now = (count - t + num_tiles - 1) / num_tiles;  // tiles alike: 4 and 3 are quicker than 6 and 1
                TALL[now - 1](w, t ? w : next, x + t * stride, stride, pairs, scales + t * num_scales, num_scales,
                              input == 0, result + t * GROUP + v * 16);
            }
        }
    }
}

// All outputs of all tokens: `take(token, half, y)` gets 64 of them at a time, y[4] with scales and biases applied.
template <class Take>
void multiply(const Crew& crew, const Matrix& matrix, const Inputs& in, int num_tokens, const Take& take) {
    const int halves = padded(matrix.outputs) / HALF, chunks = (num_tokens + TOKENS - 1) / TOKENS;
    const int wide = crew.count() == 1 || halves * chunks >= 8 * crew.count() ? 2 : 1;
    crew.run((halves + wide - 1) / wide * chunks, [&](int item) {
        alignas(64) float result[TOKENS * GROUP];
        const int first = item % chunks * TOKENS, count = std::min(TOKENS, num_tokens - first);
        const int half = item / chunks * wide, num = std::min(wide, halves - half);
        const auto compute = matrix.is_int8 ? (num == 2 ? tiles<Int8, 8> : tiles<Int8, 4>)
                                            : (num == 2 ? tiles<Bf16, 8> : tiles<Bf16, 4>);
        compute(matrix, half, in, first, count, result);
        for (int h = half; h < half + num; h++) {
            const float *scale = matrix.scales + h * HALF, *bias = matrix.bias + h * HALF;
            for (int t = 0; t < count; t++) {
                __m512 y[4];
                for (int v = 0; v < 4; v++)
                    y[v] = _mm512_fmadd_ps(_mm512_load_ps(result + t * GROUP + (h - half) * HALF + 16 * v),
                                           _mm512_loadu_ps(scale + 16 * v), _mm512_loadu_ps(bias + 16 * v));
                take(first + t, h, y);
            }
        }
    });
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Slots lie anywhere, so no prefetcher of the processor knows where the next is. A block of them is fetched whole, for
// all heads, which come one after the other.
void fetch(const uint16_t* pool, const int32_t* slots, size_t slot_size, int first, int end) {
    for (int k = first; k < std::min(end, first + KEYS); k++)
        for (size_t i = 0; i < slot_size; i += 32)
            _mm_prefetch((const char*)(pool + slots[k] * slot_size + i), _MM_HINT_T0);
}

// Sixteen vectors of sixteen 32-bit numbers, columns for rows.
void transpose(__m512i* v) {
    __m512i w[16];
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
        v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    }
}

// Scores of COUNT queries, of `stride` pairs each, for 16 * VECTORS keys that stand in columns (VECTORS, pairs, 16).
template <int COUNT, int VECTORS>
void score(const int32_t* query, int stride, int pairs, const __m512i* keys, float* scores) {
    Floats sum[COUNT][VECTORS];
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) sum[q][v] = Floats{};
    for (int pair = 0; pair < pairs; pair++)
        for (int q = 0; q < COUNT; q++) {
            const __m512bh two = (__m512bh)_mm512_set1_epi32(query[q * stride + pair]);
            for (int v = 0; v < VECTORS; v++)
                sum[q][v] = (Floats)_mm512_dpbf16_ps((__m512)sum[q][v], (__m512bh)keys[v * COLUMNS + pair], two);
        }
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(scores + q * KEYS + 16 * v, (__m512)sum[q][v]);
}

// Adds values of keys [first, last), 16 * VECTORS dimensions from `dim` on, to the sums of COUNT queries.
template <int COUNT, int VECTORS>
void add_values(const uint16_t* const* values, int first, int last, int dim, int dims, const float* weights,
                float* sums, int stride) {
    Floats sum[COUNT][VECTORS];
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) sum[q][v] = (Floats)_mm512_load_ps(sums + q * stride + dim + 16 * v);
    for (int key = first; key < last; key++) {
        __m512 value[VECTORS];
        for (int v = 0; v < VECTORS; v++) {  // a load under a mask would keep sums out of registers, in gcc 12
            const uint16_t* from = values[key] + dim + 16 * v;
            value[v] = VECTORS == 4 ? widen(_mm256_loadu_si256((const __m256i*)from)) : load_bf16(from, dims - dim);
        }
        for (int q = 0; q < COUNT; q++)
            for (int v = 0; v < VECTORS; v++)
                sum[q][v] = (Floats)_mm512_fmadd_ps(_mm512_set1_ps(weights[q * KEYS + key]), value[v], (__m512)sum[q][v]);
    }
    for (int q = 0; q < COUNT; q++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + q * stride + dim + 16 * v, (__m512)sum[q][v]);
}

using Score = decltype(&score<1, 1>);
using AddValues = decltype(&add_values<1, 1>);

// By queries less one, and sixteens of keys less one.
constexpr Score SCORE[TOGETHER][KEYS / 16] = {
    {score<1, 1>, score<1, 2>, score<1, 3>, score<1, 4>}, {score<2, 1>, score<2, 2>, score<2, 3>, score<2, 4>},
    {score<3, 1>, score<3, 2>, score<3, 3>, score<3, 4>}, {score<4, 1>, score<4, 2>, score<4, 3>, score<4, 4>},
    {score<5, 1>, score<5, 2>, score<5, 3>, score<5, 4>}, {score<6, 1>, score<6, 2>, score<6, 3>, score<6, 4>},
};
// By queries less one, for 16 and for 64 dimensions.
constexpr AddValues ADD_VALUES[TOGETHER][2] = {
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
          scale_(_mm512_set1_ps(1.0f / std::sqrt(float(dim_)))) {
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
            const __m512 inverse = _mm512_set1_ps(1.0f / total_[q]);
            for (int d = 0; d < dim_; d += 16)
                _mm512_mask_storeu_ps(to + d, first_lanes(dim_ - d),
                                      _mm512_mul_ps(_mm512_load_ps(sums_ + q * stride_ + d), inverse));
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
            for (int q = first_query, num; q < last_query; q += num) {
                num = std::min(TOGETHER, last_query - q);
                add(values, num_keys, first, q, num);
            }
        }
    }

    void compare(const uint16_t* const* values, int num_keys, int first_query, int last_query) {
        const int pairs = (dim_ + 1) / 2, vectors = (num_keys + 15) / 16;
        for (int v = 0; v < vectors; v++)
            for (int pair = 0; pair < pairs; pair += 16) {
                __m512i* columns = columns_ + v * COLUMNS + pair;
                for (int j = 0; j < 16; j++)  // lanes beyond the last key repeat it; nobody looks at them
                    columns[j] = _mm512_maskz_loadu_epi32(
                        first_lanes(pairs - pair),
                        values[std::min(16 * v + j, num_keys - 1)] - slot_size_ / 2 + 2 * pair);
                transpose(columns);
            }
        for (int q = first_query, num; q < last_query; q += num) {
            num = std::min(TOGETHER, last_query - q);
            SCORE[num - 1][vectors - 1](query_ + q * query_pairs_, query_pairs_, pairs, columns_, scores_ + q * KEYS);
        }
    }

    // Scores of a query become weights of the values; what it has seen before shrinks.
    void weigh(int q, int seen) {
        if (seen <= 0) return;
        const int vectors = (seen + 15) / 16;
        float* s = scores_ + q * KEYS;
        __m512 v[KEYS / 16], most = _mm512_set1_ps(largest_[q]);
        for (int i = 0; i < vectors; i++) {
            v[i] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), first_lanes(seen - 16 * i),
                                      _mm512_load_ps(s + 16 * i), scale_);
            most = _mm512_max_ps(most, v[i]);
        }
        const float now = _mm512_reduce_max_ps(most);
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < vectors; i++) {
            v[i] = _mm512_maskz_mov_ps(first_lanes(seen - 16 * i), exponential(_mm512_sub_ps(v[i], _mm512_set1_ps(now))));
            sum = _mm512_add_ps(sum, v[i]);
            _mm512_store_ps(s + 16 * i, v[i]);
        }
        const __m512 shrink = _mm512_set1_ps(_mm512_cvtss_f32(exponential(_mm512_set1_ps(largest_[q] - now))));
        total_[q] = total_[q] * _mm512_cvtss_f32(shrink) + _mm512_reduce_add_ps(sum);
        largest_[q] = now;
        for (int d = 0; d < stride_; d += 16) {
            float* own = sums_ + q * stride_ + d;
            _mm512_store_ps(own, _mm512_mul_ps(_mm512_load_ps(own), shrink));
        }
    }

    // Queries [q, q + num) take values in, each of as many keys as it sees: what all see is read once, then the rest.
    void add(const uint16_t* const* values, int num_keys, int first, int q, int num) {
        const int end = q + num;
        for (int done = 0; q < end; q++) {
            const int seen = std::min(num_keys, position_[q] + 1 - first);
            if (seen <= done) continue;
            const AddValues* by = ADD_VALUES[end - q - 1];
            for (int d = 0; d < dim_;) {
                const bool is_whole = d + 64 <= dim_;
                by[is_whole](values, done, seen, d, dim_, scores_ + q * KEYS, sums_ + q * stride_, stride_);
                d += is_whole ? 64 : 16;
            }
            done = seen;
        }
    }

    const int dim_, group_, kv_head_;
    const size_t slot_size_;
    const int stride_, query_pairs_;
    const uint16_t* const pool_;
    const __m512 scale_;
    alignas(64) int32_t query_[QUERIES * HEAD_DIM / 2];  // (queries, query_pairs)
    alignas(64) __m512i columns_[KEYS / 16 * COLUMNS];
    alignas(64) float scores_[QUERIES * KEYS];
    alignas(64) float sums_[QUERIES * HEAD_DIM];  // (queries, stride)
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
    for (int d = 0; d < dim; d += 16) {
        _mm512_store_ps(cosine + d, load_bf16(rotation + d, dim - d));
        _mm512_store_ps(sine + d, load_bf16(rotation + dim + d, dim - d));
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

// ---- the step -------------------------------------------------------------------------------------------------------

// The workspace, cut up. Only `x` outlives a call.
struct Work {
    float* x;     // (tokens, padded hidden): the residual stream
    float* wide;  // (tokens, the widest product's outputs)
    Heads heads;
    Inputs inputs;
    size_t bytes;

    Work(const Model& model, int tokens, char* at) {
        const char* begin = at;
        const auto take = [&](size_t bytes) {
            char* taken = at;
            at += (bytes + 63) / 64 * 64;
            return taken;
        };
        const size_t hidden = padded(model.hidden), inner = padded(model.intermediate), n = tokens;
        const size_t attended = padded(model.num_heads * model.head_dim);
        const size_t qkv = padded((model.num_heads + 2 * model.num_kv_heads) * model.head_dim);
        const size_t widest = std::max(std::max(hidden, inner), attended);
        x = (float*)take(n * hidden * 4);
        wide = (float*)take(n * std::max(qkv, inner) * 4);
        heads.query_stride = (model.head_dim + 31) / 32 * 32;
        heads.query = (uint16_t*)take(n * model.num_heads * heads.query_stride * 2);
        heads.attended = (float*)take(n * attended * 4);
        inputs.values = (uint16_t*)take(n * widest * 2);
        inputs.scales = (float*)take(n * blocks_of(int(widest)) * 4);
        bytes = size_t(at - begin);
    }
};

void embed(const Crew& crew, const Model& model, const Step& step, const Work& work) {
    const int hidden = model.hidden, stride = padded(hidden);
    crew.run(step.num_tokens, [&](int token) {
        for (int i = 0; i < stride; i += 16)
            _mm512_store_ps(work.x + size_t(token) * stride + i, load_bf16(step.embeddings[token] + i, hidden - i));
        std::memset(work.heads.attended + size_t(token) * padded(model.num_heads * model.head_dim), 0,
                    padded(model.num_heads * model.head_dim) * sizeof(float));
    });
}

void run_layer(const Crew& crew, const Model& model, const Step& step, const Work& work, const std::vector<Part>& parts,
               int index) {
    const Layer& layer = model.layers[index];
    const int n = step.num_tokens, hidden = padded(model.hidden), attended = padded(model.num_heads * model.head_dim);
    const int qkv = padded(layer.qkv.outputs), inner = padded(model.intermediate);
    const auto add_to_x = [&](int token, int half, const __m512* y) {
        float* x = work.x + size_t(token) * hidden + half * HALF;
        for (int v = 0; v < 4; v++) _mm512_store_ps(x + 16 * v, _mm512_add_ps(_mm512_load_ps(x + 16 * v), y[v]));
    };

    crew.run(n, [&](int token) {
        prepare_normed(layer.qkv, work.inputs, token, work.x + size_t(token) * hidden, layer.attention_norm, model);
    });
    multiply(crew, layer.qkv, work.inputs, n, [&](int token, int half, const __m512* y) {
        for (int v = 0; v < 4; v++) _mm512_store_ps(work.wide + size_t(token) * qkv + half * HALF + 16 * v, y[v]);
    });
    crew.run(int(parts.size()), [&](int item) {
        const Part& part = parts[item];
        for (const Row* row = part.row; row < part.row + part.num_rows; row++) {
            const int32_t* slots = step.slot_table + row->table_row * step.table_width + row->start;
            const int from = row == part.row ? part.from : 0, end = part.num_rows == 1 ? from + part.count : row->length;
            for (int t = from; t < end; t++) {
                const int token = row->first + t;
                place_heads(model, step, work.heads, layer, index, token, slots[t], work.wide + size_t(token) * qkv);
            }
        }
    });
    crew.run(int(parts.size()) * model.num_kv_heads, [&](int item) {
        const Part& part = parts[item / model.num_kv_heads];
        Attention(model, step, work.heads, index, part, item % model.num_kv_heads);
    });
    crew.run(n, [&](int token) {
        prepare(layer.out, work.inputs, token, work.heads.attended + size_t(token) * attended, 1.0f, nullptr);
    });
    multiply(crew, layer.out, work.inputs, n, add_to_x);

    crew.run(n, [&](int token) {
        prepare_normed(layer.gate_up, work.inputs, token, work.x + size_t(token) * hidden, layer.mlp_norm, model);
    });
    multiply(crew, layer.gate_up, work.inputs, n, [&](int token, int half, const __m512* y) {
        float* to = work.wide + size_t(token) * inner + half * HALF / 2;
        for (int v = 0; v < 2; v++) _mm512_store_ps(to + 16 * v, _mm512_mul_ps(silu(y[v]), y[v + 2]));
    });
    crew.run(n, [&](int token) {
        prepare(layer.down, work.inputs, token, work.wide + size_t(token) * inner, 1.0f, nullptr);
    });
    multiply(crew, layer.down, work.inputs, n, add_to_x);

    crew.run(n, [&](int token) {
        if (index >= step.taps[token]) return;
        const uint16_t* tap = step.embeddings[token] + size_t(1 + index) * model.hidden;
        float* x = work.x + size_t(token) * hidden;
        for (int i = 0; i < hidden; i += 16)
            _mm512_store_ps(x + i, _mm512_add_ps(_mm512_load_ps(x + i), load_bf16(tap + i, model.hidden - i)));
    });
}

// What `layers` layers have made of all tokens, to whoever wants to know it.
void tell(const Crew& crew, const Model& model, const Step& step, const Work& work, int layers) {
    for (int which = 0; which < step.num_told; which++) {
        if (step.told[which] != layers) continue;
        crew.run(step.num_rows, [&](int item) {
            const Row& row = step.rows[item];
            const int32_t* slots = step.slot_table + row.table_row * step.table_width + row.start;
            for (int t = 0; t < row.length; t++)
                store_bf16(step.features + (size_t(slots[t]) * step.num_told + which) * model.hidden,
                           work.x + size_t(row.first + t) * padded(model.hidden), model.hidden);
        });
    }
}

void run_head(const Crew& crew, const Model& model, const Step& step, const Work& work) {
    const size_t vocab = model.head.outputs;
    crew.run(step.num_ends, [&](int end) {
        prepare_normed(model.head, work.inputs, end, work.x + size_t(step.ends[end]) * padded(model.hidden), model.norm,
                       model);
    });
    multiply(crew, model.head, work.inputs, step.num_ends, [&](int end, int half, const __m512* y) {
        for (int v = 0; v < 4; v++) {
            const int id = half * HALF + 16 * v;
            _mm512_mask_storeu_ps(step.logits + end * vocab + id, first_lanes(int(vocab) - id), y[v]);
        }
    });
}

// See `beholder_best`.
int best(const float* logits, const uint16_t* mask, int vocab, int num_words) {
    const __m512 most = _mm512_set1_ps(1e30f), least = _mm512_set1_ps(-1e30f);
    const __m512i sixteen = _mm512_set1_epi32(16);
    __m512 largest = _mm512_set1_ps(-INFINITY);
    __m512i at = _mm512_setzero_si512(), index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int first = 0; first < vocab; first += 16, index = _mm512_add_epi32(index, sixteen)) {
        __mmask16 lanes = first_lanes(vocab - first);
        if (mask) lanes &= first < 32 * num_words ? mask[first / 16] : 0;
        // The order of these lets the lowest through where a logit is no number.
        const __m512 v = _mm512_min_ps(_mm512_max_ps(_mm512_maskz_loadu_ps(lanes, logits + first), least), most);
        const __mmask16 larger = _mm512_mask_cmp_ps_mask(lanes, v, largest, _CMP_GT_OQ);
        largest = _mm512_mask_mov_ps(largest, larger, v);
        at = _mm512_mask_mov_epi32(at, larger, index);
    }
    const __m512 all = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    return _mm512_mask_reduce_min_epi32(_mm512_cmp_ps_mask(largest, all, _CMP_EQ_OQ), at);
}

// The rows in parts for attention: long rows are cut, short ones that share their first slots are put together.
std::vector<Part> cut(const Model& model, const Step& step) {
    const int most = std::max(1, std::min(16, QUERIES / (model.num_heads / model.num_kv_heads)));
    std::vector<Part> parts;
    for (const Row *row = step.rows, *end = row + step.num_rows; row < end;) {
        Part part{row, 1, 0, row->length, 0};
        int shared = row->start;
        for (const Row* next = row + 1; next < end; next++, part.num_rows++) {
            shared = std::min(shared, next->shared);
            if (shared < KEYS || part.count + next->length > most) break;
            part.count += next->length;
            part.common = shared / KEYS * KEYS;
        }
        if (part.num_rows > 1) {
            parts.push_back(part);
        } else {
            for (int from = 0; from < row->length; from += most)
                parts.push_back({row, 1, from, std::min(most, row->length - from), 0});
        }
        row += part.num_rows;
    }
    return parts;
}

}  // namespace

// Bytes of workspace that a step of so many tokens needs.
EXPORT int64_t beholder_workspace(const Model* model, int32_t num_tokens) {
    return int64_t(Work(*model, num_tokens, nullptr).bytes);
}

// The largest logits of some rows, each the first of several, as ids (count,). What is no number counts as the lowest,
// as for `engine.sampling.finite`. `chosen` (count, 2): a row of `logits`, and one of `masks` or -1; a mask has bits of
// the ids that may be said, `num_words` times 32 of them.
EXPORT void beholder_best(const float* logits, const int32_t* chosen, int32_t count, int32_t vocab,
                          const uint16_t* masks, int32_t num_words, int64_t* ids, int32_t num_threads) {
    const Crew crew(int64_t(count) * vocab < WORTH_WAKING ? 1 : num_threads);
    crew.run(count, [&](int i) {
        const int32_t row = chosen[2 * i], mask = chosen[2 * i + 1];
        ids[i] = best(logits + size_t(row) * vocab, mask < 0 ? nullptr : masks + size_t(mask) * 2 * num_words, vocab,
                      num_words);
    });
}

// Runs layers [first, last) of a step: the first of all takes the embeddings in, the last of all makes logits. Between
// calls of one step the workspace must be left as it is.
EXPORT void beholder_step(const Model* model, const Step* step, int32_t first, int32_t last, int32_t num_threads) {
    const Crew crew(num_threads);
    const Work work(*model, step->num_tokens, step->workspace);
    const std::vector<Part> parts = cut(*model, *step);
    if (first == 0) embed(crew, *model, *step, work);
    for (int index = first; index < last; index++) {
        tell(crew, *model, *step, work, index);
        run_layer(crew, *model, *step, work, parts, index);
    }
    if (last == model->num_layers) tell(crew, *model, *step, work, last);
    if (last == model->num_layers && step->num_ends) run_head(crew, *model, *step, work);
}

#include "head.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
