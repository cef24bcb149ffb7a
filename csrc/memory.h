// Zeroed memory for weights and caches. Weights are in huge pages where the system grants them: they are streamed once per
// pass, and small pages would cost TLB misses. Small buffers share a mapping, because many matrices are smaller than a huge
// page. A cache is in small pages: its heads lie far apart, so the first request would wait for hundreds of huge pages to be
// zeroed, most of which it does not use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace wager {

// One mapping, unmapped with the last buffer in it. No part is used twice, so every buffer is zeroed.
class Chunk {
  public:
    explicit Chunk(size_t bytes, bool huge = true) : size_(bytes) {
#if defined(__linux__)
        mapped_ = size_ + kHuge;
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
        data_ = reinterpret_cast<uint8_t*>((start + kHuge - 1) / kHuge * kHuge);
        madvise(data_, size_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
        base_ = std::calloc(1, size_ + kLine);
        if (base_ == nullptr) throw std::bad_alloc();
        const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
        data_ = reinterpret_cast<uint8_t*>((start + kLine - 1) / kLine * kLine);
#endif
    }
    ~Chunk() {
#if defined(__linux__)
        munmap(base_, mapped_);
#else
        std::free(base_);
#endif
    }
    Chunk(const Chunk&) = delete;
    Chunk& operator=(const Chunk&) = delete;

    static constexpr size_t kHuge = size_t{2} << 20, kLine = 64;

    size_t size() const { return size_; }
    size_t used = 0;
    uint8_t* data() const { return data_; }

  private:
    size_t size_;
    size_t mapped_ = 0;
    void* base_ = nullptr;
    uint8_t* data_ = nullptr;
};

class Buffer {
  public:
    explicit Buffer(size_t bytes, bool huge = true) : size_(bytes) {
        const size_t room = bytes == 0 ? kGrain : (bytes + kGuard + kGrain - 1) / kGrain * kGrain;
        take(room, huge);
#if defined(__SANITIZE_ADDRESS__)
        // AddressSanitizer knows no mappings: it is told that nothing may touch what lies behind a buffer.
        ASAN_POISON_MEMORY_REGION(data_ + size_, room - size_);
        guarded_ = room;
#endif
    }
#if defined(__SANITIZE_ADDRESS__)
    ~Buffer() { ASAN_UNPOISON_MEMORY_REGION(data_, guarded_); }
#endif
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    static constexpr size_t kShared = size_t{64} << 20, kGrain = 4096;
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t kGuard = kGrain;
    size_t guarded_ = 0;
#else
    static constexpr size_t kGuard = 0;
#endif

    void take(size_t room, bool huge) {
        if (room > kShared / 4 || !huge) {
            chunk_ = std::make_shared<Chunk>(room, huge);
            data_ = chunk_->data();
            return;
        }
        static std::mutex mutex;
        static std::weak_ptr<Chunk> current;
        std::lock_guard<std::mutex> lock(mutex);
        chunk_ = current.lock();
        if (!chunk_ || chunk_->used + room > chunk_->size()) current = chunk_ = std::make_shared<Chunk>(kShared);
        data_ = chunk_->data() + chunk_->used;
        chunk_->used += room;
    }

    size_t size_;
    std::shared_ptr<Chunk> chunk_;
    uint8_t* data_ = nullptr;
};

}  // namespace wager
