// Where one thread waits for others: it spins for a bounded time, then sleeps until it is woken. On Linux it sleeps on a futex,
// elsewhere on a condition variable.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wager {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#else
    std::this_thread::yield();
#endif
}

class alignas(64) Waiter {
  public:
    // Some 10 us without a look at the clock: longer than most waits among threads that all run.
    static constexpr int kUntimedSpins = 256, kSpinsPerLook = 16;
    static constexpr Duration kSpinFor = std::chrono::microseconds(200);

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

    // For other threads. Whether it is awake is a hint: it may change at once.
    bool awake() const { return state_.load(std::memory_order_relaxed) == kAwake; }
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

}  // namespace wager
