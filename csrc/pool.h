// A pool of persistent threads that run one function together, and the barrier between the ops inside it.
//
// The caller is thread 0. Workers spin briefly for the next region, then sleep, so an idle engine uses no core; at a
// barrier threads spin, then yield, because other processes may share the cores. Floating-point modes are set alike in
// every thread during a region: a flush-to-zero bit set by another library must not change a row.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace wager {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

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
    using Work = std::function<void(int)>;

    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) { start(); }
    ~Pool() {
        if (process_ != process()) return;
        {
            std::lock_guard<std::mutex> lock(shared_->mutex);
            shared_->stop = true;
            shared_->generation.fetch_add(1, std::memory_order_release);
        }
        shared_->wake.notify_all();
        for (auto& worker : shared_->workers) worker.join();
        delete shared_;
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Runs work(0..threads-1) together and returns when all are done. One region at a time.
    void run(const Work& work) {
        if (process_ != process()) start();
        Shared& shared = *shared_;
        std::lock_guard<std::mutex> region(shared.region);
        FloatModes modes;
        if (threads_ > 1) {
            shared.work = &work;
            shared.pending.store(threads_ - 1, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> lock(shared.mutex);
                shared.generation.fetch_add(1, std::memory_order_release);
            }
            if (shared.sleepers.load(std::memory_order_seq_cst) > 0) shared.wake.notify_all();
        }
        work(0);
        for (int spins = 0; shared.pending.load(std::memory_order_acquire) != 0; ++spins) wait(spins);
    }

    // Called by every thread of a region; returns when all have arrived.
    void barrier() {
        if (threads_ == 1) return;
        Shared& shared = *shared_;
        const unsigned phase = shared.phase.load(std::memory_order_relaxed);
        if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            shared.arrived.store(0, std::memory_order_relaxed);
            shared.phase.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; shared.phase.load(std::memory_order_acquire) == phase; ++spins) wait(spins);
    }

  private:
    // About 15 us: longer than a barrier among running threads, far shorter than a time slice. Idle workers then yield
    // for some 200 us more before they sleep, because the next step is often near and waking a thread costs 50 us.
    static constexpr int kSpins = 400, kYields = 400;

    // The state that the threads share. A forked child has no workers, and locks in an unknown state, so it creates a new
    // one and leaks the old one.
    struct Shared {
        std::mutex region, mutex;
        std::condition_variable wake;
        std::vector<std::thread> workers;
        const Work* work = nullptr;
        bool stop = false;
        alignas(64) std::atomic<unsigned> generation{0};
        alignas(64) std::atomic<int> pending{0};
        alignas(64) std::atomic<int> arrived{0};
        alignas(64) std::atomic<unsigned> phase{0};
        alignas(64) std::atomic<int> sleepers{0};
    };

    static void wait(int spins) {
        if (spins < kSpins) relax();
        else std::this_thread::yield();
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
        shared_ = new Shared();
        for (int i = 1; i < threads_; ++i) shared_->workers.emplace_back([shared = shared_, i] { serve(*shared, i); });
    }

    static void serve(Shared& shared, int index) {
        for (unsigned seen = 0;;) {
            for (int spins = 0; shared.generation.load(std::memory_order_acquire) == seen; ++spins) {
                if (spins < kSpins + kYields) {
                    wait(spins);
                    continue;
                }
                std::unique_lock<std::mutex> lock(shared.mutex);
                shared.sleepers.fetch_add(1, std::memory_order_seq_cst);
                shared.wake.wait(lock, [&] { return shared.generation.load(std::memory_order_acquire) != seen; });
                shared.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = shared.generation.load(std::memory_order_acquire);
            if (shared.stop) return;
            {
                FloatModes modes;
                (*shared.work)(index);
            }
            shared.pending.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    const int threads_;
    long process_ = -1;
    Shared* shared_ = nullptr;
};

}  // namespace wager
