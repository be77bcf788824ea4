// How often guesses are right: see acceptance.py.

namespace {

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

}  // namespace
