// One answer: who of the sources is believed, and what came of it; see `Speculator` of speculator.py.

namespace {

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
            if (i && own.ids[0] == sequence.proposals[0].ids[0]) continue;  // it was not what the guess hung on
            const int checked = std::min(i ? 0 : asked.checked, own.length);
            int guessed = std::max(checked, 1), right = agreement(own.ids, guessed, asked.ids, num_said);
            // Where a chain was right, what came behind it tells of one guess more.
            if (checked && right == checked && !asked.paths[0] && right < std::min(own.length, num_said))
                right += own.ids[guessed] == asked.ids[guessed], guessed++;
            learn(sequence, own.kind, right, guessed);
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

    void propose(Sequence& sequence, const Asked& asked) {
        sequence.num_proposals = 0;
        // One token at least comes without guesses.
        const int limit = std::min(std::min(asked.limit, MOST), asked.max_tokens - sequence.num_output - 1);
        if (limit <= 0) return;
        double most = 0.0;
        const auto room = [&] { return sequence.proposals[sequence.num_proposals].ids; };
        if (sequence.has_echo) {
            const auto& output = sequence.output;
            const int length =
                sequence.place.propose(rules, output.data() + output.size(), int(output.size()), limit, room());
            if (sequence.place.has_moved) sequence.own[ECHO] = {};  // which was believed of another place
            const bool is_firm = sequence.place.is_firm && !sequence.place.doubts();
            most = std::max(most, keep(sequence, is_firm ? ECHO : ECHO_ASTRAY, length));
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
        if (asked.num_forced && most < rules.sure * limit) {
            const int length = std::min(asked.num_forced, limit);
            const int32_t* forced = asked.ids + asked.num_new;
            std::copy(forced, forced + length, room());
            most = std::max(most, keep(sequence, GRAMMAR, length));
        }
        if (rules.sources & FROM_HABIT && most < rules.sure * limit) {
            learn_habits(sequence);
            keep(sequence, HABIT, habit.propose(rules, sequence.context, limit, room()));
            weigh_echo(sequence);
        }
    }

    // As `Echo.weighed` of echo.py.
    void weigh_echo(Sequence& sequence) const {
        Proposal* all = sequence.proposals;
        if (!sequence.num_proposals || sequence.place.is_trusted) return;
        if (all[0].kind != ECHO && all[0].kind != ECHO_ASTRAY) return;
        all[0].kind = ECHO_ASTRAY;
        for (int i = 1; i < sequence.num_proposals; i++)
            if (all[i].ids[0] == all[0].ids[0]) all[0].kind = ECHO;
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
