// Which of the instructions that the kernels use the processor has and the operating system saves the registers of, by the
// names of /proc/cpuinfo. All false where the processor is not an x86-64 one.
//
// Read by cpuid and xgetbv: __builtin_cpu_supports needs a run-time library, and is always false with the one of zig.
#pragma once

namespace wager {

struct CpuFeatures {
    bool avx2, fma, f16c, avx_vnni, avx512f, avx512bw, avx512dq, avx512vl, avx512_bf16, avx512_vnni;
};

extern const CpuFeatures kCpuFeatures;

}  // namespace wager
