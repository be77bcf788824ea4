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

#include "told.h"
#include "acceptance.h"
#include "sources.h"
#include "answer.h"
#include "choice.h"

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
    sequence->place.is_firm = sequence->place.is_trusted = is_firm;
    if (!is_firm) sequence->place.find_doubtful();
    sequence->has_echo = num_earlier > 0;
    for (int i = 0; i < 3; i++) {
        const int from = num_prompt - 3 + i;
        sequence->context.ids[i] = from < 0 ? -1 : int32_t(prompt[from]);
    }
    return sequence;
}

EXPORT void beholder_guesses_end(Sequence* sequence) { delete sequence; }

// Takes what sequences have said, and asks what follows, but for those that are null; without `found` they have ended.
// `needs` are pairs: so many guesses, rising, of which so many must be right. The return value is by how much more are
// expected to be right, at best, where those of all sequences are checked up to one length; see `best` of chains.py.
EXPORT double beholder_guesses_look(Guesses* guesses, Asked* const* all, int32_t count, Found* found,
                                    const double* needs) {
    for (int i = 0; i < count; i++)
        if (all[i] && all[i]->num_new) guesses->judge(*all[i]->sequence, *all[i]);
    int num_checked[NUM_LENGTHS] = {};
    double right[NUM_LENGTHS] = {};
    for (int i = 0; i < count; i++) {
        if (!all[i]) {
            found[i].length = 0;
            continue;
        }
        Asked& asked = *all[i];
        Sequence& sequence = *asked.sequence;
        asked.num_said = 1, asked.checked = 0;  // nothing is known yet of the step behind this look
        std::fill(asked.paths, asked.paths + BRANCHES, 0);
        guesses->follow(sequence, asked.ids, asked.num_new);
        if (!found) {
            guesses->learn_habits(sequence);
            continue;
        }
        guesses->propose(sequence, asked);
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

// How many of each sequence's guesses to check, `limit` in all at most, as `lengths`; returns their sum.
EXPORT int beholder_guesses_choose(const Guesses* guesses, const Found* found, int32_t count, Bet* bet, int32_t limit,
                                   int32_t* lengths) {
    Choice choice{guesses->rules, found, count, *bet};
    return count == 1 ? lengths[0] = choice.alone(limit) : choice.together(limit, lengths);
}

// Both: asks what follows, and decides how many of it to check. -1: nothing is worth a thought.
EXPORT int beholder_guesses_decide(Guesses* guesses, Asked* const* all, int32_t count, Found* found, const double* needs,
                                   Bet* bet, int32_t limit, int32_t* lengths) {
    if (beholder_guesses_look(guesses, all, count, found, needs) < 0.0) return -1;
    return beholder_guesses_choose(guesses, found, count, bet, limit, lengths);
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

// From now on this proposal is the best.
EXPORT void beholder_guesses_prefer(Sequence* sequence, int32_t which) {
    std::rotate(sequence->proposals, sequence->proposals + which, sequence->proposals + which + 1);
}

// All that was proposed, the best first, with how probably each is right; `rescue`: where the others are wrong.
EXPORT int beholder_guesses_proposals(const Guesses* guesses, const Sequence* sequence, Found* found, int32_t rescue) {
    for (int i = 0; i < sequence->num_proposals; i++) {
        const Proposal& own = sequence->proposals[i];
        const Rates rates = rescue ? guesses->rescue_rates(own.kind) : guesses->rates(*sequence, own.kind);
        found[i].first = rates.first, found[i].later = rates.later, found[i].kind = own.kind, found[i].length = own.length;
        std::memcpy(found[i].token_ids, own.ids, own.length * sizeof(int32_t));
    }
    return sequence->num_proposals;
}
