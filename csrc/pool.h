// A pool of persistent threads that share the stages of some work, with a barrier after each.
//
// The caller is thread 0 and waits for no thread that has not begun: a stage is shared by those that are awake when it begins,
// and a thread that sleeps is woken meanwhile and takes part in a later one. So a stage must give the same result for any
// number of threads. How many may take part is ThreadLimit's to say. Threads spin for a bounded time and then sleep: an idle
// engine uses no core. Floating-point modes are set alike in every thread: a flush-to-zero bit set by another library must
// not change a row.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "thread_limit.h"
#include "waiter.h"

namespace wager {

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
        int team = 1;  // threads that share the stage
        for (int stage = 0; stage < stages;) {
            const int before = team;
            team = gather();
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

    // Threads that are awake, the caller among them, up to the first one that is not; those that are not are woken.
    int gather() {
        if (always_all_) return threads_;
        const int limit = shared_->limit.limit();
        int team = 1;
        while (team < limit && shared_->waiters[team].awake()) ++team;
        bool woke = false;
        for (int i = team; i < limit; ++i) woke |= shared_->waiters[i].wake();
        if (woke) shared_->limit.woke();
        return team;
    }

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
            parts = stage + 1 == stages || gather() != team;
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
