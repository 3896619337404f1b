// The library: what is called by XLA, and the pinning of memory.

#include "../resolver/resolve.cuh"
#include "rows.cuh"

extern "C" const char* const HostRowsBuiltFor = BUILT_FOR;  // the version of jaxlib

// Pin memory of the host, and say where devices see it: null, or what went wrong.
extern "C" const char* HostRowsPin(void* memory, size_t bytes, void** seen) {
#ifdef __CUDACC__
  cudaError_t problem = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (problem == cudaSuccess) problem = cudaHostGetDevicePointer(seen, memory, 0);
  return problem == cudaSuccess ? nullptr : cudaGetErrorString(problem);
#else
  *seen = memory;
  return nullptr;
#endif
}

extern "C" const char* HostRowsUnpin(void* memory) {
#ifdef __CUDACC__
  const cudaError_t problem = cudaHostUnregister(memory);
  return problem == cudaSuccess ? nullptr : cudaGetErrorString(problem);
#else
  return nullptr;
#endif
}
