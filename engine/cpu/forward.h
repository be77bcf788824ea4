// A step of a dense decoder, layer by layer. A part of step.cpp.

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
        for (int i = 0; i < stride; i += LANES)
            store(work.x + size_t(token) * stride + i, load_bf16(step.embeddings[token] + i, hidden - i));
        std::memset(work.heads.attended + size_t(token) * padded(model.num_heads * model.head_dim), 0,
                    padded(model.num_heads * model.head_dim) * sizeof(float));
    });
}

void run_layer(const Crew& crew, const Model& model, const Step& step, const Work& work, const std::vector<Part>& parts,
               int index) {
    const Layer& layer = model.layers[index];
    const int n = step.num_tokens, hidden = padded(model.hidden), attended = padded(model.num_heads * model.head_dim);
    const int qkv = padded(layer.qkv.outputs), inner = padded(model.intermediate);
    const auto add_to_x = [&](int token, int half, const Floats* y) {
        float* x = work.x + size_t(token) * hidden + half * HALF;
        for (int v = 0; v < WHOLE / 2; v++) store(x + LANES * v, load(x + LANES * v) + y[v]);
    };

    crew.run(n, [&](int token) {
        prepare_normed(layer.qkv, work.inputs, token, work.x + size_t(token) * hidden, layer.attention_norm, model);
    });
    multiply(crew, layer.qkv, work.inputs, n, [&](int token, int half, const Floats* y) {
        for (int v = 0; v < WHOLE / 2; v++)
            store(work.wide + size_t(token) * qkv + half * HALF + LANES * v, y[v]);
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
    multiply(crew, layer.gate_up, work.inputs, n, [&](int token, int half, const Floats* y) {
        float* to = work.wide + size_t(token) * inner + half * HALF / 2;
        for (int v = 0; v < WHOLE / 4; v++) store(to + LANES * v, silu(y[v]) * y[v + WHOLE / 4]);
    });
    crew.run(n, [&](int token) {
        prepare(layer.down, work.inputs, token, work.wide + size_t(token) * inner, 1.0f, nullptr);
    });
    multiply(crew, layer.down, work.inputs, n, add_to_x);

    crew.run(n, [&](int token) {
        if (index >= step.taps[token]) return;
        const uint16_t* tap = step.embeddings[token] + size_t(1 + index) * model.hidden;
        float* x = work.x + size_t(token) * hidden;
        for (int i = 0; i < hidden; i += LANES) store(x + i, load(x + i) + load_bf16(tap + i, model.hidden - i));
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
    multiply(crew, model.head, work.inputs, step.num_ends, [&](int end, int half, const Floats* y) {
        for (int v = 0; v < WHOLE / 2; v++) {
            const int id = half * HALF + LANES * v;
            store(step.logits + end * vocab + id, y[v], first_lanes(int(vocab) - id));
        }
    });
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

// See `beholder_step`.
void run_step(const Crew& crew, const Model& model, const Step& step, int first, int last) {
    const Work work(model, step.num_tokens, step.workspace);
    const std::vector<Part> parts = cut(model, step);
    if (first == 0) embed(crew, model, step, work);
    for (int index = first; index < last; index++) {
        tell(crew, model, step, work, index);
        run_layer(crew, model, step, work, parts, index);
    }
    if (last < model.num_layers) return;
    tell(crew, model, step, work, last);
    if (step.num_ends) run_head(crew, model, step, work);
}

}  // namespace
