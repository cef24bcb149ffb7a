#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>

namespace {

struct Registers {
    unsigned eax, ebx, ecx, edx;
};

// Zeros if the processor has no such leaf.
Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers found{};
    __get_cpuid_count(leaf, subleaf, &found.eax, &found.ebx, &found.ecx, &found.edx);
    return found;
}

bool bit(unsigned value, int index) { return value >> index & 1; }

// Which registers the operating system saves, from leaf 1: the low half of XCR0, 0 if it does not say.
unsigned saved_registers(const Registers& basic) {
    if (!bit(basic.ecx, 27)) return 0;  // OSXSAVE
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// The name of leaf 0, in the order of its registers.
bool made_by(const char (&name)[13]) {
    const Registers maker = cpuid(0, 0);
    return !std::memcmp(&maker.ebx, name, 4) && !std::memcmp(&maker.edx, name + 4, 4) && !std::memcmp(&maker.ecx, name + 8, 4);
}

wager::CpuFeatures read_features() {
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
    const Registers more = extended.eax >= 1 ? cpuid(7, 1) : Registers{};
    const unsigned saved = saved_registers(basic);
    const bool ymm = (saved & 0x06) == 0x06 && bit(basic.ecx, 28);  // XMM and YMM; AVX
    const bool zmm = ymm && (saved & 0xe0) == 0xe0;                 // masks and both parts of ZMM
    wager::CpuFeatures found{};
    found.avx2 = ymm && bit(extended.ebx, 5);
    found.fma = ymm && bit(basic.ecx, 12);
    found.f16c = ymm && bit(basic.ecx, 29);
    found.avx_vnni = ymm && bit(more.eax, 4);
    found.avx512f = zmm && bit(extended.ebx, 16);
    found.avx512bw = zmm && bit(extended.ebx, 30);
    found.avx512dq = zmm && bit(extended.ebx, 17);
    found.avx512vl = zmm && bit(extended.ebx, 31);
    found.avx512_bf16 = zmm && bit(more.eax, 5);
    found.avx512_vnni = zmm && bit(extended.ecx, 11);
    found.avx512vbmi = zmm && bit(extended.ecx, 1);
    found.amd = made_by("AuthenticAMD") || made_by("HygonGenuine");
    return found;
}

}  // namespace

const wager::CpuFeatures wager::kCpuFeatures = read_features();
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

namespace {

wager::CpuFeatures read_features() {
    // Bits of the kernel's arch/arm64/include/uapi/asm/hwcap.h.
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    wager::CpuFeatures found{};
    found.asimddp = first >> 20 & 1;
    found.i8mm = second >> 13 & 1;
    found.bf16 = second >> 14 & 1;
    return found;
}

}  // namespace

const wager::CpuFeatures wager::kCpuFeatures = read_features();
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

namespace {

bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

wager::CpuFeatures read_features() {
    wager::CpuFeatures found{};
    found.asimddp = has("hw.optional.arm.FEAT_DotProd");
    found.i8mm = has("hw.optional.arm.FEAT_I8MM");
    found.bf16 = has("hw.optional.arm.FEAT_BF16");
    return found;
}

}  // namespace

const wager::CpuFeatures wager::kCpuFeatures = read_features();
#else
const wager::CpuFeatures wager::kCpuFeatures{};
#endif
