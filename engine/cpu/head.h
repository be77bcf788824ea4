// A draft head in the layout of EAGLE-3 (see engine/models/eagle3.py) on the kernels of step.cpp, of which this file is
// a part: what follows after sequences' last tokens, and by its own guesses what follows after that.
//
// The pair at position q is the token at q + 1 and what the model made of the token at q; its keys and values lie in
// the slot of q + 1, so that a head's slot table is the model's from the second position on. Whoever only catches up
// needs keys and values alone, which is a third of the work. As in a step, each pair's arithmetic is its own.

namespace {

struct Pair {
    int32_t table_row, position;
    int64_t rotation;
    const uint16_t* embedding;
};

// The workspace of so many pairs, cut up.
struct DraftWork {
    float* fused;  // (pairs, padded hidden)
    float* pair;   // (pairs, padded 2 hidden)
    float* wide;   // (pairs, the widest)
    float* x;      // (ends, padded hidden)
    Heads heads;   // of ends
    Inputs inputs;
    size_t bytes;

    DraftWork(const Head& head, int pairs, char* at) {
        Cutter take(at);
        const size_t n = pairs;
        size_t widest = 0;
        for (const Matrix* matrix : {&head.fc, &head.queries, &head.keys_values, &head.out, &head.gate_up, &head.down})
            widest = std::max<size_t>(widest, std::max(matrix->inputs, padded(matrix->outputs)));
        fused = (float*)take(n * padded(head.hidden) * 4);
        pair = (float*)take(n * padded(2 * head.hidden) * 4);
        wide = (float*)take(n * widest * 4);
        x = (float*)take(n * padded(head.hidden) * 4);
        take_rows(take, n, head.num_heads, head.head_dim, widest, heads, inputs);
        bytes = take.bytes();
    }
};

void normalise(float* to, const float* x, const float* weight, int count, float eps) {
    const Floats factor = each(1.0f / std::sqrt(square_sum(x, count) / count + eps));
    for (int i = 0; i < count; i += LANES)
        store(to + i, load(x + i) * factor * load(weight + i), first_lanes(count - i));
}

// Keys and values of all pairs, and logits after those of `ends`, whose hidden states are kept in `ahead`.
void run_pairs(const Crew& crew, const Head& head, const Draft& draft, const DraftWork& work,
               const std::vector<Pair>& pairs, const std::vector<int>& ends, bool is_guessed) {
    const int n = int(pairs.size()), num_ends = int(ends.size()), hidden = padded(head.hidden);
    const int both = padded(2 * head.hidden), read = head.num_features * head.hidden;
    const int keys_values = padded(head.keys_values.outputs), queries = padded(head.queries.outputs);
    const int inner = padded(head.intermediate);
    const size_t vocab = head.head.outputs;
    const Inputs& in = work.inputs;

    Model shape = {};
    shape.hidden = head.hidden, shape.eps = head.eps, shape.head_dim = head.head_dim;
    shape.num_heads = head.num_heads, shape.num_kv_heads = head.num_kv_heads;
    Model only_keys = shape, only_queries = shape;
    only_keys.num_heads = only_queries.num_kv_heads = 0;
    std::vector<int64_t> rotations(n), end_rotations(num_ends);
    for (int p = 0; p < n; p++) rotations[p] = pairs[p].rotation;
    for (int e = 0; e < num_ends; e++) end_rotations[e] = pairs[ends[e]].rotation;
    Step step = {};
    step.slot_table = draft.slot_table + 1, step.table_width = draft.table_width;
    step.kv_pool = draft.kv_pool, step.num_slots = draft.num_slots;
    step.rotation = draft.rotation, step.rotation_rows = rotations.data();
    const auto slots_of = [&](const Pair& pair) { return draft.slot_table + pair.table_row * draft.table_width; };
    const auto put = [](float* to, const Floats* y) {
        for (int v = 0; v < WHOLE / 2; v++) store(to + LANES * v, y[v]);
    };

    if (!is_guessed) {
        crew.run(n, [&](int p) {
            const uint16_t* from = draft.features + size_t(slots_of(pairs[p])[pairs[p].position]) * read;
            float* to = work.wide + size_t(p) * head.fc.inputs;
            for (int i = 0; i < head.fc.inputs; i += LANES) store(to + i, load_bf16(from + i, read - i));
            prepare(head.fc, in, p, to, 1.0f, nullptr);
        });
        multiply(crew, head.fc, in, n,
                 [&](int p, int half, const Floats* y) { put(work.fused + size_t(p) * hidden + half * HALF, y); });
    }
    crew.run(n, [&](int p) {
        float *fused = work.fused + size_t(p) * hidden, *pair = work.pair + size_t(p) * both;
        if (is_guessed) std::memcpy(fused, draft.ahead + size_t(pairs[p].table_row) * hidden, hidden * sizeof(float));
        float* embedding = work.wide + size_t(p) * hidden;
        for (int i = 0; i < hidden; i += LANES)
            store(embedding + i, load_bf16(pairs[p].embedding + i, head.hidden - i));
        std::memset(pair, 0, both * sizeof(float));
        normalise(pair, embedding, head.token_norm, head.hidden, head.eps);
        normalise(pair + head.hidden, fused, head.feature_norm, head.hidden, head.eps);
        prepare(head.keys_values, in, p, pair, 1.0f, nullptr);
    });
    multiply(crew, head.keys_values, in, n, [&](int p, int half, const Floats* y) {
        put(work.wide + size_t(p) * keys_values + half * HALF, y);
    });
    crew.run(n, [&](int p) {
        const int slot = slots_of(pairs[p])[pairs[p].position + 1];
        place_heads(only_keys, step, work.heads, Layer{}, 0, p, slot, work.wide + size_t(p) * keys_values);
    });
    if (!num_ends) return;

    step.rotation_rows = end_rotations.data();
    crew.run(num_ends,
             [&](int e) { prepare(head.queries, in, e, work.pair + size_t(ends[e]) * both, 1.0f, nullptr); });
    multiply(crew, head.queries, in, num_ends, [&](int e, int half, const Floats* y) {
        put(work.wide + size_t(e) * queries + half * HALF, y);
    });
    crew.run(num_ends, [&](int e) {
        place_heads(only_queries, step, work.heads, Layer{}, 0, e, 0, work.wide + size_t(e) * queries);
        std::memset(work.heads.attended + size_t(e) * queries, 0, queries * sizeof(float));
        float* x = work.x + size_t(e) * hidden;
        std::memcpy(x, work.fused + size_t(ends[e]) * hidden, hidden * sizeof(float));
        if (head.norm_before_residual)
            std::memcpy(x, work.pair + size_t(ends[e]) * both + head.hidden, head.hidden * sizeof(float));
    });
    crew.run(num_ends * head.num_kv_heads, [&](int item) {
        const int e = item / head.num_kv_heads;
        const Row row = {pairs[ends[e]].table_row, pairs[ends[e]].position, e, 1, 0};
        Attention(shape, step, work.heads, 0, Part{&row, 1, 0, 1, 0}, item % head.num_kv_heads);
    });
    const auto add_to_x = [&](int e, int half, const Floats* y) {
        float* x = work.x + size_t(e) * hidden + half * HALF;
        for (int v = 0; v < WHOLE / 2; v++) store(x + LANES * v, load(x + LANES * v) + y[v]);
    };
    crew.run(num_ends,
             [&](int e) { prepare(head.out, in, e, work.heads.attended + size_t(e) * queries, 1.0f, nullptr); });
    multiply(crew, head.out, in, num_ends, add_to_x);
    crew.run(num_ends,
             [&](int e) { prepare_normed(head.gate_up, in, e, work.x + size_t(e) * hidden, head.mlp_norm, shape); });
    multiply(crew, head.gate_up, in, num_ends, [&](int e, int half, const Floats* y) {
        float* to = work.wide + size_t(e) * inner + half * HALF / 2;
        for (int v = 0; v < WHOLE / 4; v++) store(to + LANES * v, silu(y[v]) * y[v + WHOLE / 4]);
    });
    crew.run(num_ends, [&](int e) { prepare(head.down, in, e, work.wide + size_t(e) * inner, 1.0f, nullptr); });
    multiply(crew, head.down, in, num_ends, add_to_x);
    crew.run(num_ends, [&](int e) {
        const float* x = work.x + size_t(e) * hidden;
        std::memcpy(draft.ahead + size_t(pairs[ends[e]].table_row) * hidden, x, hidden * sizeof(float));
        prepare_normed(head.head, in, e, x, head.norm, shape);
    });
    multiply(crew, head.head, in, num_ends, [&](int e, int half, const Floats* y) {
        for (int v = 0; v < WHOLE / 2; v++) {
            const int id = half * HALF + LANES * v;
            store(draft.logits + e * vocab + id, y[v], first_lanes(int(vocab) - id));
        }
    });
}

// The likeliest of the head's ids, of those whose bits `allowed` has (null: all).
int likeliest(const Head& head, const float* logits, const uint16_t* allowed) {
    const int count = head.head.outputs;
    if (!allowed || !head.targets) return best(logits, allowed, count, (count + 31) / 32);
    int found = 0;
    bool is_first = true;
    for (int own = 0; own < count; own++) {
        const int32_t id = head.targets[own];
        if (!(allowed[id / 16] >> id % 16 & 1) || !(is_first || logits[own] > logits[found])) continue;
        found = own;
        is_first = false;
    }
    return found;
}

// Computes the pairs of all rows. With lengths, the likeliest tokens are guessed one after the other, for all ends
// together; without, logits are left for somebody who draws.
void run_draft(const Crew& crew, const Head& head, const Draft& draft) {
    const DraftWork work(head, draft.num_pairs, draft.workspace);
    std::vector<Pair> pairs;
    std::vector<int> ends(draft.num_ends);
    pairs.reserve(draft.num_pairs);
    for (const Row* row = draft.rows; row < draft.rows + draft.num_rows; row++)
        for (int t = 0; t < row->length; t++) {
            const int pair = row->first + t, position = row->start + t;
            pairs.push_back({row->table_row, position, draft.in_order ? pair : position, draft.embeddings[pair]});
        }
    for (int e = 0; e < draft.num_ends; e++) {
        const Row& row = draft.rows[draft.ends[e]];
        ends[e] = row.first + row.length - 1;
    }
    run_pairs(crew, head, draft, work, pairs, ends, draft.is_guessed);
    if (!draft.lengths || !draft.num_ends) return;

    const int most = *std::max_element(draft.lengths, draft.lengths + draft.num_ends);
    std::vector<int> asking(draft.num_ends);
    std::vector<Pair> last(draft.num_ends);
    for (int e = 0; e < draft.num_ends; e++) asking[e] = e, last[e] = pairs[ends[e]];
    for (int count = 1;; count++) {
        pairs.clear();
        ends.clear();
        std::vector<int> go_on;
        for (size_t i = 0; i < asking.size(); i++) {
            const int e = asking[i];
            const uint16_t* allowed = count == 1 && draft.allowed ? draft.allowed[e] : nullptr;
            const int own = likeliest(head, draft.logits + i * head.head.outputs, allowed);
            const int64_t id = head.targets ? head.targets[own] : own;
            draft.guesses[e * most + count - 1] = int32_t(id);
            if (count >= draft.lengths[e]) continue;
            const int position = ++last[e].position;
            const int64_t order = draft.num_pairs + int64_t(count - 1) * draft.num_ends + e;
            ends.push_back(int(pairs.size()));
            pairs.push_back({last[e].table_row, position, draft.in_order ? order : position,
                             draft.table + id * draft.table_stride});
            go_on.push_back(e);
        }
        if (pairs.empty()) return;
        asking.swap(go_on);
        run_pairs(crew, head, draft, work, pairs, ends, true);
    }
}

}  // namespace
