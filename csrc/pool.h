// A pool of persistent threads that share the stages of some work, with a barrier after each.
//
// The caller is thread 0. A stage is shared by the threads that are awake when it begins; one that sleeps is woken meanwhile and
// takes part in a later one. Where stages are long, threads sleep because they have waited for the caller: those take part at
// once, and the caller waits for them. So a stage must give the same result for any number of threads. How many may take part is
// ThreadLimit's to say. Threads spin for a bounded time and then sleep: an idle engine uses no core.
// Floating-point modes are set alike in every thread: a flush-to-zero bit set by another library must not change a row.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace wager {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

// That this thread has computed; where the system does not tell, all time that has passed.
inline Duration processor_time() {
#if defined(__unix__) || defined(__APPLE__)
    timespec used;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0)
        return std::chrono::duration_cast<Duration>(std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec));
#endif
    return Clock::now().time_since_epoch();
}

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#else
    std::this_thread::yield();
#endif
}

// Where one thread waits for others: it spins for a bounded time, then sleeps until it is woken. On Linux it sleeps on a futex,
// elsewhere on a condition variable.
class alignas(64) Waiter {
  public:
    // Some 10 us without a look at the clock: longer than most waits among threads that all run.
    static constexpr int kUntimedSpins = 256, kSpinsPerLook = 16;
    static constexpr Duration kSpinFor = std::chrono::microseconds(200);  // about what waking a thread costs

    // Returns when ready() is true, and the time that it took beyond the untimed spins. The thread says that it sleeps, then
    // asks may_sleep(): no wake-up is lost if that is false, or whoever makes ready() true sees afterwards that it sleeps.
    template <class Ready, class MaySleep>
    Duration wait(const Ready& ready, const MaySleep& may_sleep) {
        for (int i = 0; i < kUntimedSpins; ++i) {
            if (ready()) return Duration::zero();
            relax();
        }
        const Clock::time_point begin = Clock::now();
        for (Clock::time_point spun = begin, now = begin;; now = Clock::now()) {
            for (int i = 0; i < kSpinsPerLook; ++i) {
                if (ready()) return Clock::now() - begin;
                relax();
            }
            if (now - spun < kSpinFor) continue;
            state_.store(kAsleep, std::memory_order_seq_cst);
            if (may_sleep()) sleep();
            state_.store(kAwake, std::memory_order_seq_cst);
            spun = Clock::now();
        }
    }

    // For other threads. Whether it is awake or asleep is a hint: it may change at once. A woken thread is neither until it runs.
    bool awake() const { return state_.load(std::memory_order_relaxed) == kAwake; }
    bool asleep() const { return state_.load(std::memory_order_relaxed) == kAsleep; }
    bool wake() {  // false: it does not sleep
        int asleep = kAsleep;
        if (state_.load(std::memory_order_seq_cst) != kAsleep) return false;
        if (!state_.compare_exchange_strong(asleep, kWoken, std::memory_order_seq_cst)) return false;
        notify();
        return true;
    }

  private:
    enum State : int { kAwake, kAsleep, kWoken };  // woken: until it runs again

#if defined(__linux__)
    static_assert(sizeof(std::atomic<int>) == sizeof(int), "a futex is an int");

    void sleep() {
        while (state_.load(std::memory_order_seq_cst) == kAsleep)
            syscall(SYS_futex, reinterpret_cast<int*>(&state_), FUTEX_WAIT_PRIVATE, kAsleep, nullptr, nullptr, 0);
    }
    void notify() { syscall(SYS_futex, reinterpret_cast<int*>(&state_), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
    void sleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        woken_.wait(lock, [&] { return state_.load(std::memory_order_seq_cst) != kAsleep; });
    }
    void notify() {
        { std::lock_guard<std::mutex> lock(mutex_); }  // it is before its look at the state, or in its wait
        woken_.notify_one();
    }

    std::mutex mutex_;
    std::condition_variable woken_;
#endif

    std::atomic<int> state_{kAwake};
};

// How many threads are worth their waits. Where other programs use the cores too, a thread that is not running keeps all others
// waiting at the next barrier, for milliseconds; then fewer threads are faster, and one waits for nobody.
//
// An account compares with half as many threads: they would take at most twice as long for what the threads do while none
// waits, taken as half as long again because they share the memory. Time so gained is credit, up to a bound; what the first
// thread waits is charged, and so is waking threads. Without credit half the threads go on alone for kFactor times what was
// lost, and at least twice as long as before where the threads had not earned the full credit since: trying them again costs
// a small share of the time, however busy the machine is. Only time at work counts.

class ThreadLimit {
  public:
    static constexpr Duration kTrial = std::chrono::milliseconds(1), kMostCredit = std::chrono::milliseconds(10);
    static constexpr Duration kLongPause = std::chrono::milliseconds(500);
    static constexpr int kFactor = 16;

    explicit ThreadLimit(int threads) : threads_(threads), limit_(threads) {}

    int limit() const { return limit_; }

    // Work begins.
    void begin(Clock::time_point now) {
        since_ = now;
        if (limit_ == threads_ || left_ > Duration::zero()) return;
        limit_ = std::min(threads_, 2 * limit_);
        left_ = pause_;
        credit_ = kTrial;
    }

    // Sleeping threads were woken.
    void woke() { credit_ -= Waiter::kSpinFor; }

    // `team` threads have shared the work since the last call; of that time the first one waited `waited` for the others.
    void worked(Clock::time_point now, int team, Duration waited) {
        const Duration passed = now - since_;
        since_ = now;
        left_ -= passed;
        if (team > 1) credit_ = std::min(kMostCredit, credit_ + (passed - waited) / 2 - waited);
        if (credit_ == kMostCredit) pause_ = Duration::zero();
        if (credit_ < Duration::zero() && limit_ > 1) halve();
    }

  private:
    void halve() {
        limit_ /= 2;
        pause_ = std::max(kFactor * (kTrial - credit_), std::min(kLongPause, 2 * pause_));
        left_ = pause_;
        credit_ = kTrial;
    }

    const int threads_;
    int limit_;
    Duration credit_ = kTrial, pause_ = Duration::zero(), left_ = Duration::zero();
    Clock::time_point since_{};
};

class FloatModes {
  public:
#if defined(__x86_64__)
    FloatModes() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~FloatModes() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#endif
};

class Pool {
  public:
    // Does part `thread` of `threads` of a stage.
    using Work = std::function<void(int stage, int thread, int threads)>;

    // always_all: all threads share every stage and the caller waits for those that sleep, for tests of the stages.
    explicit Pool(int threads, bool always_all = false) : threads_(threads < 1 ? 1 : threads), always_all_(always_all) { start(); }
    ~Pool() {
        if (process_ != process()) return;
        shared_->stop = true;
        publish(threads_);
        for (auto& worker : shared_->workers) worker.join();
        delete shared_;
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // How many share the work now: fewer than `threads` while other programs use the cores.
    int limit() const { return limit_now_.load(std::memory_order_relaxed); }

    // Does stages 0, 1 .. one after the other and returns when all are done. One caller at a time; others wait.
    void run(int stages, const Work& work) {
        if (process_ != process()) start();
        Shared& shared = *shared_;
        std::lock_guard<std::mutex> region(shared.region);
        FloatModes modes;
        shared.work = &work;
        shared.limit.begin(Clock::now());
        shared.came = 1;
        shared.begun = processor_time();
        int team = 1;  // threads that share the stage
        for (int stage = 0; stage < stages;) {
            const int before = team;
            team = gather(stage);
            if (team != before) shared.limit.worked(Clock::now(), before, Duration::zero());
            if (team == 1) work(stage++, 0, 1);
            else stage = share(stage, stages, team);
        }
        shared.limit.worked(Clock::now(), team, Duration::zero());
        limit_now_.store(shared.limit.limit(), std::memory_order_relaxed);
    }

  private:
    // What the threads share. A forked child has no workers, and locks in an unknown state, so it creates a new one and leaks
    // the old one.
    struct Shared {
        explicit Shared(int threads) : limit(threads), waiters(new Waiter[threads]) {}

        std::mutex region;
        std::vector<std::thread> workers;
        ThreadLimit limit;      // the caller's alone
        uint64_t arrivals = 0;  // the caller's alone: how often threads have arrived at barriers so far
        int came = 1;           // the caller's alone: threads below this one were awake, or woken, since the work began
        Duration begun{};       // the caller's alone: its processor time when the work began
        // A team shares some consecutive stages: `arrivals`, and in the low bits how many they are. What else they need to know
        // lies in the same cache line, which is not written before the team parts.
        alignas(64) std::atomic<uint64_t> ticket{0};
        std::unique_ptr<Waiter[]> waiters;  // of each thread
        const Work* work = nullptr;
        int first_stage = 0;
        bool parts = false;  // after the current stage; read by the last one to arrive at its barrier
        bool stop = false;
        // The barrier: how often a thread has arrived, and how many had when the last stage ended; twice that. An odd `arrived`
        // says that some thread sleeps, an odd `ended` that the team parts.
        alignas(64) std::atomic<uint64_t> arrived{0};
        alignas(64) std::atomic<uint64_t> ended{0};
    };

    static constexpr int kTeamBits = 16;
    static int team_of(uint64_t ticket) { return static_cast<int>(ticket & ((1 << kTeamBits) - 1)); }

    // How many threads share `stage`, the caller among them; the others are woken. A thread that sleeps takes part if it has been
    // awake since the work began and stages are long: alone the caller would take longer than waking it.
    int gather(int stage) {
        if (always_all_) return threads_;
        const int limit = shared_->limit.limit();
        int team = 1;
        for (; team < limit; ++team) {
            const Waiter& waiter = shared_->waiters[team];
            if (waiter.awake()) shared_->came = std::max(shared_->came, team + 1);
            else if (!waiter.asleep() || team >= shared_->came || !long_stages(stage)) break;
        }
        bool woke = false;
        for (int i = team; i < limit; ++i) woke |= shared_->waiters[i].wake();
        if (woke) {
            shared_->came = limit;
            shared_->limit.woke();
        }
        return team;
    }

    // Whether the stages before this one were long on average. Time in which the caller was stopped or slept does not count, but
    // that in which it spun does.
    bool long_stages(int stage) const { return processor_time() - shared_->begun > stage * Waiter::kSpinFor / 2; }

    void publish(int team) {
        shared_->ticket.store(shared_->arrivals << kTeamBits | static_cast<uint64_t>(team), std::memory_order_seq_cst);
        for (int i = 1; i < team; ++i) shared_->waiters[i].wake();
    }

    // The caller's part of stages from `stage` on, with a team, until another team should go on; the next stage.
    int share(int stage, int stages, int team) {
        Shared& shared = *shared_;
        shared.first_stage = stage;
        shared.parts = false;
        publish(team);
        for (bool parts = false; !parts; ++stage) {
            (*shared.work)(stage, 0, team);
            parts = stage + 1 == stages || gather(stage + 1) != team;
            if (parts) shared.parts = true;
            shared.arrivals += static_cast<uint64_t>(team);
            const Duration waited = barrier(shared, 0, team, shared.arrivals).waited;
            if (waited > Duration::zero()) shared.limit.worked(Clock::now(), team, waited);
        }
        return stage;
    }

    static void serve(Shared& shared, int index) {
        const FloatModes modes;
        for (uint64_t ticket = 0, last = 0;; last = ticket) {
            const auto called = [&] {
                ticket = shared.ticket.load(std::memory_order_seq_cst);
                return ticket != last && index < team_of(ticket);
            };
            shared.waiters[index].wait(called, [&] { return !called(); });
            if (shared.stop) return;
            const int team = team_of(ticket);
            uint64_t arrivals = ticket >> kTeamBits;
            for (int stage = shared.first_stage;; ++stage) {
                (*shared.work)(stage, index, team);
                arrivals += static_cast<uint64_t>(team);
                if (barrier(shared, index, team, arrivals).parts) break;
            }
        }
    }

    struct Passed {
        Duration waited;
        bool parts;
    };

    // Ends a stage for one thread of a team: returns when the threads have arrived `arrivals` times. All changes of `arrived` are
    // ordered: whoever marks it before the last arrival is woken by that, and whoever marks it later sees that it was the last.
    static Passed barrier(Shared& shared, int index, int team, uint64_t arrivals) {
        const uint64_t before = shared.arrived.fetch_add(2, std::memory_order_acq_rel);
        if (before / 2 + 1 == arrivals) {
            const bool parts = shared.parts, sleepers = before % 2;
            if (sleepers) shared.arrived.fetch_and(~uint64_t{1}, std::memory_order_acq_rel);
            shared.ended.store(2 * arrivals + parts, std::memory_order_release);
            for (int i = 0; sleepers && i < team; ++i)
                if (i != index) shared.waiters[i].wake();
            return {Duration::zero(), parts};
        }
        uint64_t ended = 0;
        const Duration waited = shared.waiters[index].wait(
            [&] { return (ended = shared.ended.load(std::memory_order_acquire)) / 2 >= arrivals; },
            [&] { return shared.arrived.fetch_or(1, std::memory_order_acq_rel) / 2 < arrivals; });
        return {waited, ended % 2 || ended / 2 > arrivals};  // a team does not go on without one of its threads
    }

    static long process() {
#if defined(__unix__) || defined(__APPLE__)
        return static_cast<long>(getpid());
#else
        return 0;
#endif
    }

    void start() {
        process_ = process();
        shared_ = new Shared(threads_);
        for (int i = 1; i < threads_; ++i) shared_->workers.emplace_back([shared = shared_, i] { serve(*shared, i); });
    }

    const int threads_;
    const bool always_all_;
    std::atomic<int> limit_now_{threads_};
    long process_ = -1;
    Shared* shared_ = nullptr;
};

}  // namespace wager
