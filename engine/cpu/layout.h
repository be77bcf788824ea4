// What native.py, head.py and the native code tell each other: these structs are declared there a second time. A part
// of step.cpp, as all headers of this folder are.

namespace {

constexpr int VERSION = 6;     // of what native.py is told of this file
constexpr int GROUP = 128;     // outputs whose weights stand together
constexpr int HALF = 64;       // rows of inputs and outputs are padded to multiples of it
constexpr int BLOCK = 512;     // inputs with one scale: 512 * 32767 * 128 is the most that 32 bits hold
constexpr int TOKENS = 48;     // of a product at once: their results stay in the first cache
constexpr int FEW = 3;         // tokens whose products are bound by reading weights
constexpr int AHEAD = 16;      // pairs of inputs whose weights are fetched before they are needed
constexpr int WORTH_WAKING = 1 << 18;  // logits to be compared
constexpr int KEYS = 64;       // attention looks at so many positions at once
constexpr int QUERIES = 64;    // and so many heads of query tokens
constexpr int HEAD_DIM = 256;  // at most
constexpr int COLUMNS = HEAD_DIM / 2;

// How a matrix's weights lie: see products.h and tiles.h.
enum Form : int32_t { BFLOAT16, INT8, TILED };

struct Matrix {
    const char* weights;
    const float* scales;  // (padded outputs,); ones where weights are bfloat16
    const float* bias;    // (padded outputs,)
    int32_t inputs;       // padded
    int32_t outputs;      // not padded
    Form form;
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
    int32_t has_tiles;  // whether attention is computed in them
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

// A draft head: see head.h.
struct Head {
    const float* token_norm;    // (padded hidden,)
    const float* feature_norm;  // (padded hidden,)
    const float* mlp_norm;
    const float* norm;
    Matrix fc;
    Matrix queries;
    Matrix keys_values;
    Matrix out;
    Matrix gate_up;  // groups of 32 gates and their 32 ups
    Matrix down;
    Matrix head;
    const int32_t* targets;  // which of the model's ids each of the head's is; null: the same
    int32_t hidden, intermediate, num_heads, num_kv_heads, head_dim, num_features;
    int32_t norm_before_residual;  // whether what is added to attention's result is normalised, too
    float eps;
};

struct Draft {
    const Row* rows;                    // of pairs
    const int32_t* ends;                // rows after whose last pair is guessed
    const int32_t* lengths;             // so many tokens each; null: logits are wanted, nobody chooses here
    const uint16_t* const* allowed;     // of each end bits of the model's ids, for its first guess; null: all ids
    const uint16_t* const* embeddings;  // of each pair's token, bfloat16 (hidden,)
    const uint16_t* table;              // bfloat16 (ids, table_stride): embeddings of guesses
    const uint16_t* features;           // bfloat16 (num_slots, num_features * hidden)
    float* ahead;                       // (table rows, padded hidden): the head's own guess of what the model makes
    const uint16_t* rotation;           // bfloat16 (any, 2, head_dim), as in a step
    const int32_t* slot_table;          // (any, table_width), the model's
    uint16_t* kv_pool;                  // bfloat16 (num_slots, 2, kv_heads, head_dim)
    float* logits;                      // (num_ends, the head's ids)
    int32_t* guesses;                   // (num_ends, most of lengths)
    char* workspace;
    int64_t num_slots, table_width, table_stride;
    int32_t num_rows, num_pairs, num_ends;
    int32_t is_guessed;  // features are those in `ahead`
    int32_t in_order;    // rotations are those of the pairs, then of each further guess of all ends; else by position
};

int padded(int count) { return (count + HALF - 1) / HALF * HALF; }
int blocks_of(int inputs) { return (inputs + BLOCK - 1) / BLOCK; }

// Cuts a workspace up, into parts that begin at cache lines.
class Cutter {
  public:
    explicit Cutter(char* begin) : begin_(begin), at_(begin) {}

    char* operator()(size_t bytes) {
        char* taken = at_;
        at_ += (bytes + 63) / 64 * 64;
        return taken;
    }
    size_t bytes() const { return size_t(at_ - begin_); }

  private:
    char* begin_;
    char* at_;
};

}  // namespace
