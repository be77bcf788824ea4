// What is likeliest by a row of logits. A part of step.cpp.

namespace {

// The largest of a row of logits: see `beholder_best`.
int best(const float* logits, const uint16_t* mask, int vocab, int num_words) {
    const Floats most = each(1e30f), least = each(-1e30f);
    Floats largest = each(-INFINITY);
    Ints at = each(0), index = counting();
    for (int first = 0; first < vocab; first += LANES, index = index + LANES) {
        Lanes lanes = first_lanes(vocab - first);
        if (mask) lanes = both(lanes, lanes_of(first < 32 * num_words ? mask[first / 16] >> first % 16 : 0));
        // The order of these lets the lowest through where a logit is no number.
        const Floats v = smaller(larger(load(logits + first, lanes), least), most);
        const Lanes is_larger = both(lanes, is_less(largest, v));
        largest = choose(is_larger, v, largest);
        at = choose(is_larger, index, at);
    }
    return least_of(is_equal(largest, each(largest_of(largest))), at);
}

}  // namespace
