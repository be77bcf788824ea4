// What sources guess of running answers: echo, ngram, habit, and what a grammar forces; who of them is believed, and what
// came of it. One call before a step serves all its sequences.
//
// Called through ctypes by `native_sources.py`. Each source does here what its Python twin does (echo.py, ngram.py,
// habit.py, and `Speculator._candidate` of speculator.py, which say why): tests hold them equal. Numbers of those files
// are told by the caller, so that each stands in one place.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int VERSION = 1;  // of what native_sources.py is told of this file
constexpr int32_t BREAK = -1;
constexpr int MOST = 32;       // guesses of a proposal
constexpr int PROPOSALS = 5;   // echo, ngram and its older one, grammar, habit
constexpr int BRANCHES = 4;    // proposals of which a tree is made

enum Kind { NGRAM_SHORT, NGRAM_LONG, NGRAM_OLDER, ECHO, ECHO_ASTRAY, GRAMMAR, HABIT, KINDS };
enum Source { FROM_ECHO = 1, FROM_NGRAM = 2, FROM_GRAMMAR = 4, FROM_HABIT = 8 };

// Told once; `Rules` of native_sources.py.
struct Rules {
    double priors[KINDS][2];
    double prior_weight, most, rescue, sure, least_rate, least_habit, fading;
    int32_t sources, vocab_size, max_drafts;
    int32_t sequence_memory, source_memory;
    int32_t max_tokens, max_match;          // continuations.py
    int32_t near_, firm, max_astray;        // echo.py
    int32_t long_, max_prompt;              // ngram.py
    int32_t max_contexts;                   // habit.py
};

// A sequence before a step; `Asked` of native_sources.py. It may say `max_tokens` in all. `num_new` tokens were said since
// the last look, the first `num_said` of them by the step behind it, which checked `checked` of the best proposal; of a
// tree, `paths` says how much of each proposal, and is 0 of no tree.
struct Sequence;
struct Asked {
    Sequence* sequence;
    const int32_t* ids;  // what was said since, then what the grammar forces
    int32_t num_new, num_forced, max_tokens, num_said, checked;
    int32_t paths[BRANCHES];
};

// The best proposal of a sequence; `Found` of native_sources.py.
struct Found {
    double first, later;
    int32_t kind, length;
    int32_t token_ids[MOST];
};
constexpr int NUM_LENGTHS = 4, LENGTHS[NUM_LENGTHS] = {1, 3, 7, 15};  // controller.py
constexpr int NEEDS = 5;

// What checking guesses of one sequence alone takes and may cost; `Bet` of native_sources.py. `steps`: pairs as `needs`, of
// what steps take. `rate`: tokens a second, what must be promised and then what is.
struct Bet {
    const double* steps;
    double plain_s, looking_s, credit_s, rate, doubt, least_doubt;
};

// ---- acceptance.py --------------------------------------------------------------------------------------------------

struct Rates {
    double first, later;

    double expected(int length, double most) const {
        const double l = std::min(later, most);
        return std::min(first, most) * (1.0 - std::pow(l, length)) / (1.0 - l);
    }
};

struct Share {
    double right = 0.0, trials = 0.0;

    void add(int more_right, int more_trials, int memory) {
        right += more_right;
        trials += more_trials;
        if (trials > memory) {
            const double kept = memory / trials;
            right *= kept;
            trials *= kept;
        }
    }
    double rate(double prior, double weight) const { return (right + prior * weight) / (trials + weight); }
};

struct Acceptance {
    Share first, later;

    void add(int right, int guessed, int memory) {
        first.add(std::min(right, 1), 1, memory);
        if (right && guessed > 1) later.add(right - 1, std::min(right, guessed - 1), memory);
    }
    Rates rates(const Rates& prior, double weight) const {
        return {first.rate(prior.first, weight), later.rate(prior.later, weight)};
    }
};

// ---- continuations.py -----------------------------------------------------------------------------------------------

struct Match {
    int at, length;
};

struct Text {
    std::vector<int32_t> ids;

    void extend(const int32_t* more, int count, int most) {
        ids.insert(ids.end(), more, more + count);
        while (int(ids.size()) > most) ids.erase(ids.begin(), ids.begin() + ids.size() / 2);
    }

    // Up to two places where the end of a text stood before.
    int find(const int32_t* end, int length, int most, Match* found) const {
        if (length < 2 || end[-1] == BREAK || end[-2] == BREAK) return 0;
        const int32_t *known = ids.data(), first = end[-2], second = end[-1];
        int count = 0;
        for (int at = int(ids.size()) - 2; at > 0 && count < 2; at--) {  // `at`: of the second token
            if (known[at] != second || known[at - 1] != first || known[at + 1] == BREAK) continue;
            const int place = at + 1, limit = std::min(std::min(place, length), most);
            int equal = 0;
            while (equal < limit && known[place - 1 - equal] == end[-1 - equal]) equal++;
            found[count++] = {place, equal};
        }
        if (count == 2 && found[1].length > found[0].length) std::swap(found[0], found[1]);
        return count;
    }

    // Up to `limit` tokens from `at`, to the next break. `goes_on`: a copy that reaches the end goes on with itself.
    int read(int at, int limit, bool goes_on, int32_t* to) const {
        const int size = int(ids.size()), period = size - at;
        int count = 0;
        for (; count < limit && at + count < size; count++) {
            if (ids[at + count] == BREAK) return count;
            to[count] = ids[at + count];
        }
        for (; goes_on && count && count < limit; count++) to[count] = to[count - period];
        return count;
    }
};

// ---- echo.py --------------------------------------------------------------------------------------------------------

struct Place {
    Text known;
    int at = 0, run = 0, astray = 0;
    bool is_firm = true;

    void follow(const Rules& rules, const int32_t* said, int count) {
        const auto& ids = known.ids;
        for (int i = 0; i < count; i++) {
            if (at < int(ids.size()) && ids[at] == said[i]) {
                at++, run++, astray = 0;
                continue;
            }
            is_firm = false, run = 0, astray++;
            const int end = std::min(int(ids.size()), at + rules.near_);
            int ahead = at;
            while (ahead < end && ids[ahead] != BREAK && ids[ahead] != said[i]) ahead++;
            // Left out since, or else another word in the place of this one.
            if (ahead < end && ids[ahead] == said[i])
                at = ahead + 1;
            else if (at < end && ids[at] != BREAK)
                at++;
        }
        is_firm = is_firm || run >= rules.firm;
    }

    int propose(const Rules& rules, const int32_t* end, int length, int limit, int32_t* to) {
        if (!is_firm) {
            Match found[2];
            if (known.find(end, std::min(length, 16), rules.max_match, found) && found[0].length > run) {
                at = found[0].at, run = found[0].length, astray = 0;
                is_firm = run >= rules.firm;
            }
        }
        return astray > rules.max_astray ? 0 : known.read(at, limit, false, to);
    }
};

// ---- habit.py -------------------------------------------------------------------------------------------------------

struct Context {
    int32_t ids[3];  // of two tokens the first is NONE

    bool operator==(const Context& other) const { return !std::memcmp(ids, other.ids, sizeof ids); }
};
constexpr int32_t NONE = -2;

struct Hash {
    size_t operator()(const Context& context) const {
        uint64_t hash = 0;
        for (const int32_t id : context.ids) hash = (hash ^ uint32_t(id)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
        return hash;
    }
};

struct Next {
    int32_t token_id;
    double right, seen;

    void add(int32_t other, double fading) {
        seen += 1.0;
        if (other == token_id)
            right += 1.0;
        else if (right < 0.5 * seen)
            token_id = other, right = 1.0, seen = 2.0;
        if (seen > fading) right *= 0.5, seen *= 0.5;
    }
    double confidence() const { return right < 2.0 ? 0.0 : (right - 0.5) / seen; }
};

struct Habit {
    std::unordered_map<Context, Next, Hash> young, old;

    Next* find(const Context& context) {
        const auto known = young.find(context);
        if (known != young.end()) return &known->second;
        const auto before = old.find(context);
        if (before == old.end()) return nullptr;
        const Next next = before->second;
        old.erase(before);
        return &young.emplace(context, next).first->second;
    }

    void add(const Rules& rules, const Context& context, int32_t token_id) {
        if (Next* next = find(context)) {
            next->add(token_id, rules.fading);
            return;
        }
        if (int(young.size()) >= rules.max_contexts) old.swap(young), young.clear();
        young.emplace(context, Next{token_id, 1.0, 1.0});
    }

    int propose(const Rules& rules, Context context, int limit, int32_t* to) {
        double likely = 1.0;
        int count = 0;
        while (count < limit) {
            const Next *exact = find(context), *shorter = find({{NONE, context.ids[1], context.ids[2]}});
            const Next* expected = !exact || (shorter && exact->right < 2.0) ? shorter : exact;
            if (!expected || (likely *= expected->confidence()) < rules.least_habit) break;
            to[count++] = expected->token_id;
            context = {{context.ids[1], context.ids[2], expected->token_id}};
        }
        return count;
    }
};

// ---- one sequence ---------------------------------------------------------------------------------------------------

struct Proposal {
    int kind = 0, length = 0;
    int32_t ids[MOST];
};

int agreement(const int32_t* one, int length, const int32_t* other, int count) {
    int same = 0;
    while (same < length && same < count && one[same] == other[same]) same++;
    return same;
}

struct Sequence {
    int num_output = 0;
    Text text;    // prompt and output
    Place place;  // in earlier answers, if there are such
    bool has_echo = false;
    Context context;
    std::vector<int32_t> unlearnt;  // what habit has yet to learn, behind the context
    std::vector<int32_t> output;  // the newest tokens of it, 16 at least where there are so many
    Acceptance own[KINDS];
    Proposal proposals[PROPOSALS];
    int num_proposals = 0;
};

struct Guesses {
    Rules rules;
    Habit habit;
    Acceptance general[KINDS], rescues[KINDS];

    Rates rates(const Sequence& sequence, int kind) const {
        const Rates prior{rules.priors[kind][0], rules.priors[kind][1]};
        const Rates all = general[kind].rates(prior, rules.prior_weight);
        return sequence.own[kind].first.trials > 0.0 ? sequence.own[kind].rates(all, rules.prior_weight) : all;
    }

    Rates rescue_rates(int kind) const {
        const Rates prior{rules.rescue * rules.priors[kind][0], rules.priors[kind][1]};
        return rescues[kind].rates(prior, rules.prior_weight);
    }

    void learn(Sequence& sequence, int kind, int right, int guessed) {
        general[kind].add(right, guessed, rules.source_memory);
        sequence.own[kind].add(right, guessed, rules.sequence_memory);
    }

    // What came of the last proposals.
    void judge(Sequence& sequence, const Asked& asked) {
        const int num_said = std::min(asked.num_said, asked.num_new);
        for (int i = 0; i < sequence.num_proposals; i++) {
            const Proposal& own = sequence.proposals[i];
            const int checked = std::min(i ? 0 : asked.checked, own.length);
            const int guessed = std::max(checked, 1);
            learn(sequence, own.kind, agreement(own.ids, guessed, asked.ids, num_said), guessed);
        }
        if (sequence.num_proposals > 1) learn_rescues(sequence, asked, num_said);
        sequence.num_proposals = 0;
    }

    // Where those asked before were wrong, were those behind them right?
    void learn_rescues(const Sequence& sequence, const Asked& asked, int num_said) {
        const Proposal* all = sequence.proposals;
        const int count = std::min(sequence.num_proposals, BRANCHES);
        if (agreement(all[0].ids, all[0].length, asked.ids, num_said) == num_said) return;
        for (int i = 1; i < count; i++) {
            const Proposal& own = all[i];
            int shared[BRANCHES], at = 0;  // `at`: here it leaves the others
            for (int j = 0; j < i; j++) {
                shared[j] = agreement(own.ids, own.length, all[j].ids, all[j].length);
                at = std::max(at, shared[j]);
            }
            if (at >= std::min(own.length, num_said) || agreement(own.ids, own.length, asked.ids, num_said) < at) continue;
            bool is_tried = false, is_right = false;
            for (int j = 0; j < i; j++)
                if (shared[j] == at && at < all[j].length) is_tried = true, is_right |= all[j].ids[at] == asked.ids[at];
            if (!is_tried || is_right) continue;
            const int checked = std::max(asked.paths[i] - at, 1);
            const int right = agreement(own.ids + at, own.length - at, asked.ids + at, num_said - at);
            rescues[own.kind].add(std::min(right, checked), checked, rules.source_memory);
        }
    }

    void follow(Sequence& sequence, const int32_t* said, int count) {
        sequence.num_output += count;
        if (rules.sources & FROM_NGRAM) sequence.text.extend(said, count, rules.max_tokens);
        if (sequence.has_echo) {
            sequence.place.follow(rules, said, count);
            auto& output = sequence.output;
            if (output.size() > 256) output.erase(output.begin(), output.end() - 16);
            output.insert(output.end(), said, said + count);
        }
        if (rules.sources & FROM_HABIT) sequence.unlearnt.insert(sequence.unlearnt.end(), said, said + count);
    }

    void learn_habits(Sequence& sequence) {
        Context& context = sequence.context;
        for (const int32_t id : sequence.unlearnt) {
            habit.add(rules, context, id);
            habit.add(rules, {{NONE, context.ids[1], context.ids[2]}}, id);
            context = {{context.ids[1], context.ids[2], id}};
        }
        sequence.unlearnt.clear();
    }

    // Keeps the last proposal that was written, if anything of it may be said; says how much is expected to be right.
    double keep(Sequence& sequence, int kind, int length) {
        Proposal& own = sequence.proposals[sequence.num_proposals];
        own.kind = kind;
        own.length = 0;
        while (own.length < length && own.ids[own.length] < rules.vocab_size) own.length++;
        if (!own.length) return 0.0;
        sequence.num_proposals++;
        return rates(sequence, kind).expected(own.length, rules.most);
    }

    void propose(Sequence& sequence, const int32_t* forced, int num_forced, int max_tokens) {
        sequence.num_proposals = 0;
        // One token at least comes without guesses.
        const int limit = std::min(std::min(rules.max_drafts, MOST), max_tokens - sequence.num_output - 1);
        if (limit <= 0) return;
        double most = 0.0;
        const auto room = [&] { return sequence.proposals[sequence.num_proposals].ids; };
        if (sequence.has_echo) {
            const auto& output = sequence.output;
            const int length =
                sequence.place.propose(rules, output.data() + output.size(), int(output.size()), limit, room());
            most = std::max(most, keep(sequence, sequence.place.is_firm ? ECHO : ECHO_ASTRAY, length));
        }
        if (rules.sources & FROM_NGRAM && most < rules.sure * limit) {
            const auto& ids = sequence.text.ids;
            Match found[2];
            const int count = sequence.text.find(ids.data() + ids.size(), int(ids.size()), rules.max_match, found);
            if (count) {
                const int kind = found[0].length >= rules.long_ ? NGRAM_LONG : NGRAM_SHORT;
                const int length = sequence.text.read(found[0].at, limit, true, room());
                const int32_t first = room()[0];
                most = std::max(most, keep(sequence, kind, length));
                // Where both places go on alike, the second says nothing.
                if (count > 1 && length) {
                    const int other = sequence.text.read(found[1].at, limit, true, room());
                    if (other && room()[0] != first) most = std::max(most, keep(sequence, NGRAM_OLDER, other));
                }
            }
        }
        if (num_forced && most < rules.sure * limit) {
            const int length = std::min(num_forced, limit);
            std::copy(forced, forced + length, room());
            most = std::max(most, keep(sequence, GRAMMAR, length));
        }
        if (rules.sources & FROM_HABIT && most < rules.sure * limit) {
            learn_habits(sequence);
            keep(sequence, HABIT, habit.propose(rules, sequence.context, limit, room()));
        }
    }

    // Puts the best proposal first, the others stay in order.
    void put_best_first(Sequence& sequence, Found& found) const {
        double most = 0.0;
        int best = -1;
        for (int i = 0; i < sequence.num_proposals; i++) {
            const Proposal& own = sequence.proposals[i];
            const double right = rates(sequence, own.kind).expected(own.length, rules.most);
            if (right > most) most = right, best = i;
        }
        found.length = 0;
        if (best < 0) return;
        if (best) std::rotate(sequence.proposals, sequence.proposals + best, sequence.proposals + best + 1);
        const Proposal& own = sequence.proposals[0];
        const Rates sure = rates(sequence, own.kind);
        found.first = sure.first, found.later = sure.later, found.kind = own.kind, found.length = own.length;
        std::memcpy(found.token_ids, own.ids, own.length * sizeof(int32_t));
    }
};

}  // namespace

EXPORT int beholder_guesses_version() { return VERSION; }

EXPORT Guesses* beholder_guesses_new(const Rules* rules) { return new Guesses{*rules, {}, {}, {}}; }

EXPORT void beholder_guesses_free(Guesses* guesses) { delete guesses; }

// A sequence that begins to answer. `prompt` and `keys`: its ids, and the same with others in the place of pictures;
// `earlier`: answers that it may repeat, from `at` on first of all, and if `is_firm` most probably.
EXPORT Sequence* beholder_guesses_begin(const Guesses* guesses, const int64_t* prompt, const int64_t* keys,
                                        int32_t num_prompt, const int32_t* earlier, int32_t num_earlier, int32_t at,
                                        int32_t is_firm) {
    auto* sequence = new Sequence;
    const Rules& rules = guesses->rules;
    if (rules.sources & FROM_NGRAM) {
        const int first = std::max(num_prompt - rules.max_prompt, 0);
        std::vector<int32_t> text;
        for (int i = first; i < num_prompt; i++) {
            const bool is_text = keys[i] == prompt[i];
            if (is_text || i == first || keys[i - 1] == prompt[i - 1]) text.push_back(is_text ? int32_t(prompt[i]) : BREAK);
        }
        sequence->text.extend(text.data(), int(text.size()), rules.max_tokens);
    }
    sequence->place.known.extend(earlier, num_earlier, rules.max_tokens);
    sequence->place.at = at;
    sequence->place.is_firm = is_firm;
    sequence->has_echo = num_earlier > 0;
    for (int i = 0; i < 3; i++) {
        const int from = num_prompt - 3 + i;
        sequence->context.ids[i] = from < 0 ? -1 : int32_t(prompt[from]);
    }
    return sequence;
}

EXPORT void beholder_guesses_end(Sequence* sequence) { delete sequence; }

// What is known of some numbers of guesses, as pairs with the numbers rising, for any: straight lines between them.
static double between(const double* known, int count) {
    int at = 1;
    while (at < NEEDS - 1 && count > known[2 * at]) at++;
    const double *low = known + 2 * (at - 1), *high = known + 2 * at;
    return high[0] > low[0] ? low[1] + (high[1] - low[1]) * (count - low[0]) / (high[0] - low[0]) : high[1];
}

// Takes what sequences have said, and asks what follows; without `found` they have ended. `needs` are pairs: so many
// guesses, rising, of which so many must be right. The return value is by how much more are expected to be right, at best,
// where those of all sequences are checked up to one length; see `Controller.choose`.
EXPORT double beholder_guesses_look(Guesses* guesses, Asked* const* all, int32_t count, Found* found,
                                    const double* needs) {
    for (int i = 0; i < count; i++)
        if (all[i]->num_new) guesses->judge(*all[i]->sequence, *all[i]);
    int num_checked[NUM_LENGTHS] = {};
    double right[NUM_LENGTHS] = {};
    for (int i = 0; i < count; i++) {
        Asked& asked = *all[i];
        Sequence& sequence = *asked.sequence;
        asked.num_said = 1, asked.checked = 0;  // nothing is known yet of the step behind this look
        std::fill(asked.paths, asked.paths + BRANCHES, 0);
        guesses->follow(sequence, asked.ids, asked.num_new);
        if (!found) {
            guesses->learn_habits(sequence);
            continue;
        }
        guesses->propose(sequence, asked.ids + asked.num_new, asked.num_forced, asked.max_tokens);
        guesses->put_best_first(sequence, found[i]);
        if (!found[i].length || (needs[1] > 0.0 && found[i].first < guesses->rules.least_rate)) continue;
        for (int which = 0; which < NUM_LENGTHS; which++) {
            const int length = std::min(found[i].length, LENGTHS[which]);
            num_checked[which] += length;
            right[which] += Rates{found[i].first, found[i].later}.expected(length, guesses->rules.most);
        }
    }
    double most = -1.0;
    for (int which = 0; which < NUM_LENGTHS; which++)
        if (num_checked[which]) most = std::max(most, right[which] - between(needs, num_checked[which]));
    return most;
}

// How many of one sequence's guesses to check, `limit` at most, alone in its step: the choice of `Controller.choose_alone`.
EXPORT int beholder_guesses_choose(const Guesses* guesses, const Found* found, Bet* bet, int32_t limit) {
    int best = 0;
    if (found->first < guesses->rules.least_rate) return 0;
    const Rates rates{found->first, found->later};
    for (int length = 1; length <= std::min(found->length, limit); length++) {
        const double step_s = between(bet->steps, length), right = rates.expected(length, guesses->rules.most);
        const double doubt = std::min(std::max(bet->doubt * (1.0 - right / length), bet->least_doubt), 1.0);
        if (doubt * (step_s - bet->plain_s) > bet->credit_s) continue;
        const double rate = (1.0 + right) / (step_s + bet->looking_s);
        if (rate > bet->rate) bet->rate = rate, best = length;
    }
    return best;
}

// Of the best proposal only so many guesses may be said: another may be the best now.
EXPORT void beholder_guesses_cut(const Guesses* guesses, Sequence* sequence, int32_t length, Found* found) {
    sequence->proposals[0].length = length;
    if (!length) {
        std::rotate(sequence->proposals, sequence->proposals + 1, sequence->proposals + sequence->num_proposals);
        sequence->num_proposals--;
    }
    guesses->put_best_first(*sequence, *found);
}

// All that was proposed, the best first, with how probably each is right where the others are wrong.
EXPORT int beholder_guesses_proposals(const Guesses* guesses, const Sequence* sequence, Found* found) {
    for (int i = 0; i < sequence->num_proposals; i++) {
        const Proposal& own = sequence->proposals[i];
        const Rates rates = guesses->rescue_rates(own.kind);
        found[i].first = rates.first, found[i].later = rates.later, found[i].kind = own.kind, found[i].length = own.length;
        std::memcpy(found[i].token_ids, own.ids, own.length * sizeof(int32_t));
    }
    return sequence->num_proposals;
}
