// A step of a dense decoder (Llama, Qwen2, Qwen3) on a CPU with AVX-512: embedding rows in, float32 logits out.
//
// Called through ctypes by `native.py`; the structs of `layout.h` are declared there a second time. It owns nothing but
// its threads: weights, KV pool, slot table, rows and workspace belong to the caller.
//
// Every token's arithmetic is its own on a processor. No sum depends on which tokens, rows or drafts stand beside it,
// nor on the number of threads: products add up inputs in one order whatever the tile, attention walks keys in blocks
// that begin at multiples of KEYS. A position computed alone, in a batch, as a draft or in a chunk of a prompt is the
// same to the bit, whatever values stand at keys that others see and it does not. (Compiled with
// -ffp-contract=off: a compiler fuses products and sums in one copy of a template and not another.)

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

#include "layout.h"
#include "tiles.h"
#include "threads.h"

EXPORT int beholder_version() { return VERSION; }

EXPORT int beholder_is_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Whether the processor multiplies matrices of bfloat16 in tiles (AMX).
EXPORT int beholder_has_amx() {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// Whether weights of 8 bits may lie in tiles, which this file uses.
EXPORT int beholder_has_tiles() {
    unsigned a, b, c, d = 0;
    return beholder_has_amx() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1) && may_use_tiles();
}

// All that follows is compiled for AVX-512 and runs only where the function above says so.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
#endif

#include "numbers.h"
#include "products.h"
#include "attention.h"

namespace {

// The workspace, cut up. Only `x` outlives a call.
struct Work {
    float* x;     // (tokens, padded hidden): the residual stream
    float* wide;  // (tokens, the widest product's outputs)
    Heads heads;
    Inputs inputs;
    size_t bytes;

    Work(const Model& model, int tokens, char* at) {
        Cutter take(at);
        const size_t hidden = padded(model.hidden), inner = padded(model.intermediate), n = tokens;
        const size_t attended = padded(model.num_heads * model.head_dim);
        const size_t qkv = padded((model.num_heads + 2 * model.num_kv_heads) * model.head_dim);
        const size_t widest = std::max(std::max(hidden, inner), attended);
        x = (float*)take(n * hidden * 4);
        wide = (float*)take(n * std::max(qkv, inner) * 4);
        take_rows(take, n, model.num_heads, model.head_dim, widest, heads, inputs);
        bytes = take.bytes();
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
            const int from = row == part.row ? part.from : 0;
            const int end = part.num_rows == 1 ? from + part.count : row->length;
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
    __m512i at = _mm512_setzero_si512();
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
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
