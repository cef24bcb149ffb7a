// Sums of exp((z - peak) / T) over a row, in double precision: what top-p compares. Vectors of the compiler, which every
// instruction set computes alike: the lanes are eight, and their order of summing is fixed.
#pragma once

namespace wager::WAGER_NS {

typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

// 2^x to about 1e-15 relative for -1000 <= x <= 0. Taylor series on [-1/2, 1/2].
WAGER_INLINE void exp2(Doubles& x) {
    constexpr double kTerms[] = {2.5678435993488206e-11, 4.4455382718708117e-10, 7.0549116208011227e-09, 1.0178086009239699e-07,
                                 1.3215486790144309e-06, 1.5252733804059841e-05, 1.5403530393381609e-04, 1.3333558146428443e-03,
                                 9.6181291076284772e-03, 5.5504108664821580e-02, 2.4022650695910072e-01, 6.9314718055994531e-01, 1.0};
    constexpr double kBias = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const Doubles biased = x + kBias, f = x - (biased - kBias);
    Doubles p = Doubles{} + kTerms[0];
    for (int term = 1; term < 13; ++term) p = p * f + kTerms[term];
    x = (Doubles)((Longs)p + ((Longs)biased << 52));
}

WAGER_INLINE double sum(const Doubles& x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

// Of finite logits, none above `peak`.
inline Masses masses(const float* logits, int n, double peak, double temperature, double least) {
    constexpr double kLog2e = 1.4426950408889634, kSmallest = -1000.0;
    const double slope = kLog2e / temperature;
    Doubles all = {}, some = {};
    for (int i = 0; i < n; i += 8) {
        Floats few;
        if (i + 8 <= n) {
            std::memcpy(&few, logits + i, sizeof(few));
        } else {
            for (int j = 0; j < 8; ++j) few[j] = i + j < n ? logits[i + j] : -__FLT_MAX__;
        }
        const Doubles z = __builtin_convertvector(few, Doubles);
        Doubles x = (z - peak) * slope;
        const Longs small = x < kSmallest, counts = z >= least;
        x = (Doubles)(((Longs)(Doubles{} + kSmallest) & small) | ((Longs)x & ~small));
        exp2(x);
        all += x;
        some += (Doubles)((Longs)x & counts);
    }
    return {sum(all), sum(some)};
}

}  // namespace wager::WAGER_NS
