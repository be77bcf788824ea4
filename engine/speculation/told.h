// What told.py and the native sources tell each other: these structs are declared there a second time. A part of
// guesses.cpp, as all headers of this folder are.

namespace {

constexpr int VERSION = 4;  // of what told.py knows of these files
constexpr int32_t BREAK = -1;
constexpr int MOST = 64;       // guesses of a proposal
constexpr int PROPOSALS = 5;   // echo, ngram and its older one, grammar, habit
constexpr int BRANCHES = 4;    // proposals of which a tree is made

enum Kind { NGRAM_SHORT, NGRAM_LONG, NGRAM_OLDER, ECHO, ECHO_ASTRAY, GRAMMAR, HABIT, KINDS };
enum Source { FROM_ECHO = 1, FROM_NGRAM = 2, FROM_GRAMMAR = 4, FROM_HABIT = 8 };

// Told once; `Rules` of told.py.
struct Rules {
    double priors[KINDS][2];
    double prior_weight, most, rescue, sure, least_rate, least_habit, fading;
    int32_t sources, vocab_size;
    int32_t sequence_memory, source_memory;
    int32_t max_tokens, max_match;          // continuations.py
    int32_t near_, firm, max_astray;        // echo.py
    int32_t long_, max_prompt;              // ngram.py
    int32_t max_contexts;                   // habit.py
};

// A sequence before a step; `Asked` of told.py. It may say `max_tokens` in all, and `limit` may be guessed.
// `num_new` tokens were said since the last look, the first `num_said` of them by the step behind it, which checked
// `checked` of the best proposal; of a tree, `paths` says how much of each proposal, and is 0 of no tree.
struct Sequence;
struct Asked {
    Sequence* sequence;
    const int32_t* ids;  // what was said since, then what the grammar forces
    int32_t num_new, num_forced, max_tokens, num_said, checked, limit;
    int32_t paths[BRANCHES];
};

// The best proposal of a sequence; `Found` of told.py.
struct Found {
    double first, later;
    int32_t kind, length;
    int32_t token_ids[MOST];
};
constexpr int NUM_LENGTHS = 4, LENGTHS[NUM_LENGTHS] = {1, 3, 7, 15};  // chains.py
constexpr int NEEDS = 9;

// What checking guesses takes and may cost; `Bet` of told.py. `steps`: pairs as `needs`, of what steps take.
// `rate`: tokens a second, what must be promised and then what is.
struct Bet {
    const double* steps;
    double plain_s, looking_s, credit_s, rate, doubt, least_doubt;
};

}  // namespace
