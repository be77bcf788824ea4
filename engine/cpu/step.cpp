// A step of a dense decoder (Llama, Qwen2, Qwen3) on a CPU with AVX-512 or AVX2: embedding rows in, float32 logits out.
//
// Called through ctypes by `native.py`; the structs of `layout.h` are declared there a second time. It owns nothing but
// its threads: weights, KV pool, slot table, rows and workspace belong to the caller. What computes is compiled twice,
// for each kind of vectors, and chosen when the library is loaded.
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

namespace {

enum Vectors : int { NONE, AVX2, AVX512 };

Vectors supported() {
    __builtin_cpu_init();  // this may run before anything else of the library
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16"))
        return AVX512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? AVX2 : NONE;
}

Vectors in_use = supported();

}  // namespace

// Which vectors compute, 0 if none can.
EXPORT int beholder_vectors() { return in_use; }

// Compute with these at most from now on, for tests: what was laid out in tiles before cannot go on then.
EXPORT void beholder_use(int most) { in_use = std::min(supported(), Vectors(most)); }

// Whether the processor multiplies matrices of bfloat16 in tiles (AMX).
EXPORT int beholder_has_amx() {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// Whether weights of 8 bits may lie in tiles, which this file uses.
EXPORT int beholder_has_tiles() {
    unsigned a, b, c, d = 0;
    if (in_use < AVX512 || !beholder_has_amx()) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 25 & 1) && may_use_tiles();
}

// What follows runs only where `in_use` says so.
#define WITH_TILES HAS_TILES
#if defined(__clang__)
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
#endif
namespace avx512 {
#include "vectors_avx512.h"
#include "kernels.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#undef WITH_TILES
#define WITH_TILES 0
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "vectors_avx2.h"
#include "kernels.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Bytes of workspace that a step of so many tokens needs.
EXPORT int64_t beholder_workspace(const Model* model, int32_t num_tokens) {
    return int64_t(avx2::Work(*model, num_tokens, nullptr).bytes);
}

// The largest logits of some rows, each the first of several, as ids (count,). What is no number counts as the lowest,
// as for `engine.sampling.finite`. `chosen` (count, 2): a row of `logits`, and one of `masks` or -1; a mask has bits of
// the ids that may be said, `num_words` times 32 of them.
EXPORT void beholder_best(const float* logits, const int32_t* chosen, int32_t count, int32_t vocab,
                          const uint16_t* masks, int32_t num_words, int64_t* ids, int32_t num_threads) {
    const Crew crew(int64_t(count) * vocab < WORTH_WAKING ? 1 : num_threads);
    const auto best = in_use == AVX512 ? avx512::best : avx2::best;
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
    (in_use == AVX512 ? avx512::run_step : avx2::run_step)(crew, *model, *step, first, last);
}

// Bytes of workspace that so many pairs of a draft head need.
EXPORT int64_t beholder_draft_workspace(const Head* head, int32_t num_pairs) {
    return int64_t(avx2::DraftWork(*head, num_pairs, nullptr).bytes);
}

// Has a draft head guess: see head.h.
EXPORT void beholder_draft(const Head* head, const Draft* draft, int32_t num_threads) {
    const Crew crew(num_threads);
    (in_use == AVX512 ? avx512::run_draft : avx2::run_draft)(crew, *head, *draft);
}
