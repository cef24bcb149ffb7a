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

// No fault: regions that are joined by their ends alone, and ones with barriers inside, of threads that spin and that
// sleep. 0 if every thread saw what the others had written.
int no_fault() {
    constexpr int kThreads = 3;
    wager::Pool pool(kThreads);
    int written[kThreads] = {}, wrong[kThreads] = {}, sum = 0;
    for (int region = 1; region <= 100; ++region) {
        pool.run([&](int thread) { written[thread] = region; });
        for (const int each : written) sum += each - region;
        pool.run([&](int thread) {
            written[thread] = -region;
            pool.barrier();
            wrong[thread] += written[(thread + 1) % kThreads] != -region;
            pool.barrier();
        });
        if (region % 25 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    for (const int each : wrong) sum += each;
    return sum;
}
}
