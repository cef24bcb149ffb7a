// Which of the instructions that the kernels use the processor has and the operating system saves the registers of, by the
// names of Linux's /proc/cpuinfo. Those of other architectures are false.
//
// Read by cpuid and xgetbv (__builtin_cpu_supports needs a run-time library, and is always false with the one of zig), on ARM from
// the auxiliary vector of Linux or by macOS's sysctl.
#pragma once

namespace wager {

struct CpuFeatures {
    bool avx2, fma, f16c, avx_vnni, avx512f, avx512bw, avx512dq, avx512vl, avx512_bf16, avx512_vnni, avx512vbmi;
    bool asimddp, i8mm, bf16;
    // Made by AMD: as fast with non-temporal prefetches as with others. Intel's bring lines to the first level alone, where 16
    // can be under way: 7 GB/s a core where the memory gives 15 to 25.
    bool amd;
};

extern const CpuFeatures kCpuFeatures;

}  // namespace wager
