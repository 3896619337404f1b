// What functions that XLA calls share. nvcc makes them for a GPU; any C++ compiler (-x c++) makes the same for a CPU,
// for tests: there what the threads of a kernel do is done by one, each thread's part after the other's.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#ifdef __CUDACC__

#include <cuda_runtime.h>
#define ANYWHERE __host__ __device__
using Stream = cudaStream_t;
using StreamContext = ffi::PlatformStream<cudaStream_t>;

inline ffi::Error Launched() {
  const cudaError_t problem = cudaGetLastError();
  return problem == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(problem));
}

#else

#define ANYWHERE
struct Here {};  // in a stream's place
using Stream = Here;
using StreamContext = Here;

template <>
struct ffi::CtxDecoding<Here> {
  using Type = Here;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) { return Here{}; }
};

#endif
