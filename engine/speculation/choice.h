// How many of the guesses that were found a step checks: the arithmetic of `best` in chains.py, with straight lines
// between the numbers of guesses whose price is known.

namespace {

// What is known of some numbers of guesses, as pairs with the numbers rising, for any.
double between(const double* known, int count) {
    int at = 1;
    while (at < NEEDS - 1 && count > known[2 * at]) at++;
    const double *low = known + 2 * (at - 1), *high = known + 2 * at;
    return high[0] > low[0] ? low[1] + (high[1] - low[1]) * (count - low[0]) / (high[0] - low[0]) : high[1];
}

// As `fitting` of branching.py for several rows.
int fitting(int available, int longest) {
    if (available >= longest) return longest;
    int fits = 0;
    for (const int length : LENGTHS)
        if (length <= available) fits = length;
    return fits;
}

struct Choice {
    const Rules& rules;
    const Found* found;
    const int rows;
    Bet& bet;

    bool is_worth(int row) const { return found[row].length > 0 && found[row].first >= rules.least_rate; }
    double expected(int row, int length) const {
        return length ? Rates{found[row].first, found[row].later}.expected(length, rules.most) : 0.0;
    }
    double doubt(double right, int total) const {
        return std::min(std::max(bet.doubt * (1.0 - right / total), bet.least_doubt), 1.0);
    }
    // Whether so many guesses, of which so many will be right, promise more than what was chosen before.
    bool take(int total, double right) {
        const double step_s = between(bet.steps, total);
        if (doubt(right, total) * (step_s - bet.plain_s) > bet.credit_s) return false;
        const double rate = (rows + right) / (step_s + bet.looking_s);
        if (rate <= bet.rate) return false;
        bet.rate = rate;
        return true;
    }

    // Alone a row need not be like any other: of any lengths that promise enough the one that saves most. The first guess
    // saves a plain step, and each behind it what a token takes once the first has been right. So where the first is
    // doubtful and those behind it are not, few are checked until it was right.
    int alone(int limit) {
        const int most = std::min(std::min(found->length, limit), MOST);
        if (most <= 0 || !is_worth(0)) return 0;
        const double first = std::min(found->first, rules.most), later = std::min(found->later, rules.most);
        double steps_s[MOST + 1], after_s = bet.plain_s, sum = 1.0, power = 1.0;
        for (int length = 1; length <= most; length++) {
            steps_s[length] = between(bet.steps, length);
            power *= later, sum += power;
            after_s = std::min(after_s, (steps_s[length] + bet.looking_s) / sum);
        }
        int best = 0;
        double right = 0.0, likely = first, most_saved_s = 0.0, best_rate = bet.rate;
        for (int length = 1; length <= most; length++) {
            right += likely, likely *= later;
            const double extra_s = steps_s[length] - bet.plain_s, rate = (1.0 + right) / (steps_s[length] + bet.looking_s);
            if (doubt(right, length) * extra_s > bet.credit_s || rate <= bet.rate) continue;
            const double saved_s = first * bet.plain_s + (right - first) * after_s - extra_s;
            if (!best || saved_s > most_saved_s) most_saved_s = saved_s, best_rate = rate, best = length;
        }
        bet.rate = best_rate;
        return best;
    }

    // `lengths` of all rows; returns their sum, which is at most `limit`.
    int together(int limit, int32_t* lengths) {
        int best = 0, before = 0;  // the longest that was chosen, and the sum that was tried last
        for (const int longest : LENGTHS) {
            int total = 0;
            double right = 0.0;
            for (int row = 0; row < rows; row++) {
                const int length = is_worth(row) ? fitting(found[row].length, longest) : 0;
                total += length, right += expected(row, length);
            }
            if (total == before) continue;  // lengths rise with the longest one
            before = total;
            if (total > limit) break;
            if (take(total, right)) best = longest;
        }
        int total = 0;
        for (int row = 0; row < rows; row++)
            total += lengths[row] = best && is_worth(row) ? fitting(found[row].length, best) : 0;
        return total ? without_waste(total, lengths) : 0;
    }

    // Shortens drafts whose last tokens cost more time than they bring, where that promises more.
    int without_waste(int total, int32_t* lengths) {
        // Right guesses that one more draft must bring.
        const double least = std::max(between(bet.steps, total) - bet.plain_s, 0.0) / total * bet.rate;
        const auto shortened = [&](int row) {
            int length = lengths[row];
            while (length > 0) {
                const int shorter = fitting(length - 1, MOST);
                if (expected(row, length) - expected(row, shorter) >= least * (length - shorter)) break;
                length = shorter;
            }
            return length;
        };
        int less = 0;
        double right = 0.0;
        for (int row = 0; row < rows; row++) {
            const int length = shortened(row);
            less += length, right += expected(row, length);
        }
        const double rate = (rows + right) / (between_or_plain(less) + bet.looking_s);
        if (less == total || rate <= bet.rate) return total;
        for (int row = 0; row < rows; row++) lengths[row] = shortened(row);
        bet.rate = rate;
        return less;
    }

    double between_or_plain(int total) const { return total ? between(bet.steps, total) : bet.plain_s; }
};

}  // namespace
