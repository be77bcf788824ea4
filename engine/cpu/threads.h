// Threads that compute beside the one that calls: they live as long as the process and sleep between steps.

namespace {

// Items of work that any thread takes, the caller among them: who is late misses items, nobody waits for it. Threads
// sleep between steps.
class Threads {
  public:
    explicit Threads(int count) : count_(count) {
        try {
            for (int i = 1; i < count; i++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {  // no more threads may be: those that are take all items
        }
    }

    int count() const { return count_; }

    void begin() {
        std::lock_guard<std::mutex> lock(mutex_);
        active_ = true;
        wake_.notify_all();
    }

    void end() { active_ = false; }

    template <class Work>
    void run(int items, const Work& work) {
        call_ = [](const void* context, int item) { (*static_cast<const Work*>(context))(item); };
        context_ = &work;
        items_ = items;
        unfinished_.store(items, std::memory_order_relaxed);
        // The upper half counts phases, so that no thread takes an item of a phase by a number read in another.
        ticket_.store((++phase_ << 32) | uint32_t(items), std::memory_order_release);
        take();
        for (int spins = 0; unfinished_.load(std::memory_order_acquire); spins++) rest(spins);
    }

  private:
    static void rest(int spins) {
        if (spins % 256 == 255)
            sched_yield();  // whoever holds the last item may need this core
        else
            _mm_pause();
    }

    void take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (uint32_t(ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call_(context_, items_ - int(uint32_t(ticket)));
            unfinished_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve() {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return active_.load(); });
            }
            for (int spins = 0; active_.load(std::memory_order_relaxed); spins++) {
                take();
                rest(spins);
            }
            leave_tiles();
        }
    }

    const int count_;
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int items_ = 0;
    uint64_t phase_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    alignas(64) std::atomic<bool> active_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

std::mutex threads_mutex;    // held by the step that uses them; another step at the same time works alone
std::vector<Threads*> threads;  // one of each count; never freed: they sleep until the process ends

void forget_threads() {  // in a forked child, which has none of them
    new (&threads) std::vector<Threads*>;
    new (&threads_mutex) std::mutex;
}

// The threads for one step.
class Crew {
  public:
    explicit Crew(int count) {
        if (count <= 1 || !threads_mutex.try_lock()) return;
        static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
        (void)registered;
        for (Threads* known : threads)
            if (known->count() == count) threads_ = known;
        if (!threads_) threads.push_back(threads_ = new Threads(count));
        threads_->begin();
    }
    ~Crew() {
        leave_tiles();
        if (!threads_) return;
        threads_->end();
        threads_mutex.unlock();
    }
    Crew(const Crew&) = delete;

    int count() const { return threads_ ? threads_->count() : 1; }

    template <class Work>
    void run(int items, const Work& work) const {
        if (threads_ && items > 1)
            threads_->run(items, work);
        else
            for (int item = 0; item < items; item++) work(item);
    }

  private:
    Threads* threads_ = nullptr;
};

}  // namespace
