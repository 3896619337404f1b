// Copies of latent records between a pool in host memory and the device: see the package.

#pragma once

#include "foreign.cuh"

namespace {

constexpr int kLanes = 32;
constexpr int kInFlight = 4;  // words that a lane asks for before it stores the first: 2 KiB a warp
constexpr int kWarps = 8;     // of a block

struct alignas(16) Word {
  uint32_t part[4];
};

// What is copied, and between where. Records are `bytes` long and lie densely; `pool` is two halves of an address.
struct Copy {
  const uint32_t* pool;
  int64_t pool_rows;
  uint8_t* device;  // the latents; of a write: the new records
  int64_t device_rows;
  int64_t bytes;
  const int32_t* pool_row;
  const int32_t* device_row;  // null: entry i is row i
  int64_t count;
};

// One lane's share of a record. Whole words where the record and both its places allow it.
template <typename Unit>
ANYWHERE void CopyShare(const uint8_t* from, uint8_t* to, int64_t bytes, int lane) {
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = lane; first < count; first += kLanes * kInFlight) {
    Unit held[kInFlight];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kLanes < count) held[i] = source[first + i * kLanes];
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kLanes < count) target[first + i * kLanes] = held[i];
    }
  }
}

ANYWHERE void CopyRecord(const uint8_t* from, uint8_t* to, int64_t bytes, int lane) {
  const uintptr_t odd = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes;
  if (odd % sizeof(Word) == 0) {
    CopyShare<Word>(from, to, bytes, lane);
  } else if (odd % sizeof(uint32_t) == 0) {
    CopyShare<uint32_t>(from, to, bytes, lane);
  } else {
    CopyShare<uint8_t>(from, to, bytes, lane);
  }
}

ANYWHERE uint8_t* Pool(const Copy& copy) {
  return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(copy.pool[1]) << 32 | copy.pool[0]);
}

// The rows of an entry; false where it is none, or leads out of either array.
ANYWHERE bool Rows(const Copy& copy, int64_t entry, int32_t& pool_row, int32_t& device_row) {
  if (entry >= copy.count) return false;
  pool_row = copy.pool_row[entry];
  device_row = copy.device_row ? copy.device_row[entry] : static_cast<int32_t>(entry);
  return pool_row >= 0 && pool_row < copy.pool_rows && device_row >= 0 && device_row < copy.device_rows;
}

ANYWHERE void CopyOne(const Copy& copy, bool fetch, uint8_t* pool, int64_t pool_row, int64_t device_row, int lane) {
  uint8_t* there = pool + pool_row * copy.bytes;
  uint8_t* here = copy.device + device_row * copy.bytes;
  CopyRecord(fetch ? there : here, fetch ? here : there, copy.bytes, lane);
}

// A warp looks at 32 entries at once, which lie as many apart as there are warps: those to be copied come in runs, and
// so they are shared out. It copies them one after the other.
ANYWHERE int64_t EntryOf(int64_t first, int lane, int64_t warps) { return first + lane * warps; }

#ifdef __CUDACC__

template <bool kFetch>
__global__ void __launch_bounds__(kWarps* kLanes) CopyAll(Copy copy) {
  const int lane = threadIdx.x % kLanes;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  uint8_t* pool = Pool(copy);
  for (int64_t first = warp; first < copy.count; first += warps * kLanes) {
    int32_t pool_row = -1, device_row = -1;
    const bool mine = Rows(copy, EntryOf(first, lane, warps), pool_row, device_row);
    for (uint32_t left = __ballot_sync(~0u, mine); left; left &= left - 1) {
      const int whose = __ffs(left) - 1;
      CopyOne(copy, kFetch, pool, __shfl_sync(~0u, pool_row, whose), __shfl_sync(~0u, device_row, whose), lane);
    }
  }
}

template <bool kFetch>
ffi::Error Run(Stream stream, const Copy& copy) {
  if (copy.count == 0) return ffi::Error::Success();
  constexpr int64_t kMost = 132 * 8;  // what an H200 holds at once
  const int64_t blocks = (copy.count + kWarps - 1) / kWarps;
  CopyAll<kFetch><<<static_cast<unsigned>(blocks < kMost ? blocks : kMost), kWarps * kLanes, 0, stream>>>(copy);
  return Launched();
}

#else

template <bool kFetch>
ffi::Error Run(Stream, const Copy& copy) {
  constexpr int64_t warps = 3;  // as if there were so many
  for (int64_t warp = 0; warp < warps; ++warp) {
    for (int64_t first = warp; first < copy.count; first += warps * kLanes) {
      for (int whose = 0; whose < kLanes; ++whose) {
        int32_t pool_row, device_row;
        if (!Rows(copy, EntryOf(first, whose, warps), pool_row, device_row)) continue;
        for (int lane = 0; lane < kLanes; ++lane) CopyOne(copy, kFetch, Pool(copy), pool_row, device_row, lane);
      }
    }
  }
  return ffi::Error::Success();
}

#endif

ffi::Error Fetch(Stream stream, ffi::Buffer<ffi::U32> pool, ffi::Buffer<ffi::S32> sources, ffi::AnyBuffer latents,
                 ffi::Buffer<ffi::S32> targets, ffi::Result<ffi::AnyBuffer> out, int64_t pool_rows) {
  const auto shape = latents.dimensions();
  if (shape.size() != 3 || sources.element_count() != targets.element_count()) {
    return ffi::Error::InvalidArgument("host_rows_fetch: latents are not [P, G, n], or sources do not match targets");
  }
  if (out->untyped_data() != latents.untyped_data()) {
    return ffi::Error::Internal("host_rows_fetch: the latents were not passed on in place");
  }
  const int64_t rows = shape[0] * shape[1];
  Copy copy{};
  copy.pool = pool.typed_data();
  copy.pool_rows = pool_rows;
  copy.device = static_cast<uint8_t*>(out->untyped_data());
  copy.device_rows = rows;
  copy.bytes = rows ? static_cast<int64_t>(latents.size_bytes()) / rows : 0;
  copy.pool_row = sources.typed_data();
  copy.device_row = targets.typed_data();
  copy.count = static_cast<int64_t>(sources.element_count());
  return Run<true>(stream, copy);
}

ffi::Error Write(Stream stream, ffi::Buffer<ffi::U32> pool, ffi::AnyBuffer records, ffi::Buffer<ffi::S32> slots,
                 ffi::Result<ffi::Buffer<ffi::U32>> out, int64_t pool_rows) {
  const auto shape = records.dimensions();
  if (shape.size() != 2 || static_cast<int64_t>(slots.element_count()) != shape[0]) {
    return ffi::Error::InvalidArgument("host_rows_write: records are not [T, n], or slots do not match them");
  }
  if (out->untyped_data() != pool.untyped_data()) {
    return ffi::Error::Internal("host_rows_write: the pool's address was not passed on in place");
  }
  Copy copy{};
  copy.pool = pool.typed_data();
  copy.pool_rows = pool_rows;
  copy.device = static_cast<uint8_t*>(records.untyped_data());
  copy.device_rows = shape[0];
  copy.bytes = shape[0] ? static_cast<int64_t>(records.size_bytes()) / shape[0] : 0;
  copy.pool_row = slots.typed_data();
  copy.count = shape[0];
  return Run<false>(stream, copy);
}

}  // namespace

// Nothing of a call is decided on the host, so that what is recorded of a step and replayed does the same again.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HostRowsFetch, Fetch,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("pool_rows"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostRowsWrite, Write,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .Attr<int64_t>("pool_rows"),
                              {ffi::Traits::kCmdBufferCompatible});
