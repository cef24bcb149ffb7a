// How many threads are worth their waits. Where other programs use the cores too, a thread that is not running keeps all others
// waiting at the next barrier, for milliseconds; then fewer threads are faster, and one waits for nobody.
//
// An account compares with half as many threads: they would take at most twice as long for what the threads do while none
// waits, taken as half as long again because they share the memory. Time so gained is credit, up to a bound; what the first
// thread waits is charged, and so is waking threads. Without credit half the threads go on alone for kFactor times what was
// lost, and at least twice as long as before where the threads had not earned the full credit since: trying them again costs
// a small share of the time, however busy the machine is. Only time at work counts.
#pragma once

#include <algorithm>
#include <chrono>

namespace wager {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

class ThreadLimit {
  public:
    static constexpr Duration kTrial = std::chrono::milliseconds(1), kMostCredit = std::chrono::milliseconds(10);
    static constexpr Duration kLongPause = std::chrono::milliseconds(500), kWaking = std::chrono::microseconds(200);
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
    void woke() { credit_ -= kWaking; }

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

}  // namespace wager
