// What dev/sanitize.py calls before it runs tests: faults on purpose, which a build with sanitizers must report, and what
// is none. In no other build.
#include <chrono>
#include <cstdint>
#include <thread>

#include "../../csrc/memory.h"
#include "../../csrc/pool.h"

namespace {
int shared = 0;
}

extern "C" {

// One byte behind an array of the heap.
int read_behind_the_heap() {
    volatile int size = 8;
    uint8_t* bytes = new uint8_t[size]();
    const int found = bytes[size];
    delete[] bytes;
    return found;
}

// One byte behind a buffer of weights, where another buffer shares its mapping.
int read_behind_a_buffer() {
    wager::Buffer first(100), second(100);
    volatile int size = 100;
    return first.data()[size] + second.data()[0];
}

int overflow_a_sum() {
    volatile int large = 2147483647;
    return large + 1;
}

int race() {
    std::thread other([] { ++shared; });
    ++shared;
    other.join();
    return shared;
}

// No fault: stages that are joined by their ends alone, of threads that spin and that sleep. 0 if every stage saw what all
// threads had written in the one before.
int no_fault() {
    constexpr int kParts = 6;
    int sum = 0;
    for (const bool always_all : {true, false}) {
        wager::Pool pool(3, always_all);
        int written[kParts] = {}, wrong[kParts] = {};
        for (int region = 1; region <= 100; ++region) {
            pool.run(2, [&](int stage, int thread, int threads) {
                for (int part = thread; part < kParts; part += threads)
                    if (stage == 0)
                        written[part] = region;
                    else
                        wrong[part] += written[(part + 1) % kParts] != region;
            });
            if (region % 25 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        for (const int each : wrong) sum += each;
    }
    return sum;
}
}
