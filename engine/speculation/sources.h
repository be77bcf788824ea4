// What each source knows of a text: what its Python twin does (continuations.py, echo.py, habit.py), which says why.

namespace {

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
    std::vector<bool> doubtful;  // where other places go on otherwise behind the same two tokens
    int at = 0, run = 0, astray = 0;
    bool is_firm = true, has_moved = false;  // to another place, firmly, in the last `propose`
    bool is_trusted = false;                 // whatever others say

    void find_doubtful() {
        const auto& ids = known.ids;
        doubtful.assign(ids.size(), false);
        std::unordered_map<uint64_t, size_t> seen;  // the last place behind two tokens
        std::vector<size_t> earlier(ids.size(), 0);
        for (size_t place = 2; place < ids.size(); place++) {
            if (ids[place] == BREAK || ids[place - 1] == BREAK || ids[place - 2] == BREAK) continue;
            size_t& last = seen[uint64_t(uint32_t(ids[place - 2])) << 32 | uint32_t(ids[place - 1])];
            earlier[place] = last;
            if (last && (doubtful[last] || ids[last] != ids[place]))
                for (size_t other = place; other; other = earlier[other]) doubtful[other] = true;
            last = place;
        }
    }
    bool doubts() const { return at < int(doubtful.size()) && doubtful[at]; }

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
        has_moved = false;
        if (!is_firm) {
            Match found[2];
            if (known.find(end, std::min(length, 16), rules.max_match, found) && found[0].length > run) {
                is_firm = found[0].length >= rules.firm;
                has_moved = is_firm && at != found[0].at;
                at = found[0].at, run = found[0].length, astray = 0;
            }
        }
        if (astray > rules.max_astray) return 0;
        const int count = known.read(at, limit, false, to);
        for (int sure = 0; sure < count && !doubtful.empty(); sure++)
            if (doubtful[at + sure]) return std::max(sure, int(is_firm));
        return count;
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

}  // namespace
