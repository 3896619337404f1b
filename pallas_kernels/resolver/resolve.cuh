// The resolver of hot regions: see the package. One block of threads for each row of the batch, in phases between which
// all threads meet. What it answers does not depend on which thread comes first.
//
// The positions that have to be in the region stand in a hash table in shared memory, with open addressing, at most half
// full. Its values are the first entry that asks for a position; then, negative, the slot that holds it.

#pragma once

#include "../host_rows/foreign.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kPart = 32;  // threads whose counts are summed at once
constexpr int32_t kNobody = INT32_MAX;

struct Resolve {
  const int32_t *positions, *pages, *frames, *regions;
  int32_t *rows, *sources, *targets, *hits, *misses, *lost, *held, *lru;
  int64_t entries, width, count, slots, planned;  // of a row: Q * k, W; R, B; of a row's plan
  int32_t page_size;
  int64_t first;
};

// Shared memory of a block.
struct Shared {
  int32_t *keys, *values;
  uint32_t* hit;  // a bit for each slot
  uint16_t* order;
  int32_t* missing;  // of each thread's entries; then how many before them
  int32_t* unhit;    // of each thread's part of the order of use; then the same
  int32_t* totals;   // of the parts of both
  int32_t* counts;   // hits, misses, lost
};

ANYWHERE int64_t TableSize(int64_t entries) {
  int64_t size = 2;
  while (size < 2 * entries) size *= 2;
  return size;
}

// Lays out the shared memory from `base`, and returns its size in bytes.
ANYWHERE int64_t Lay(const Resolve& all, uint8_t* base, Shared& shared) {
  const int64_t table = TableSize(all.entries), words = (all.slots + 31) / 32;
  int32_t* next = reinterpret_cast<int32_t*>(base);
  shared.keys = next, next += table;
  shared.values = next, next += table;
  shared.hit = reinterpret_cast<uint32_t*>(next), next += words;
  shared.missing = next, next += kThreads + kThreads / kPart;
  shared.unhit = next, next += kThreads + kThreads / kPart;
  shared.totals = next, next += 2 * (kThreads / kPart);
  shared.counts = next, next += 3;
  shared.order = reinterpret_cast<uint16_t*>(next);
  return reinterpret_cast<uint8_t*>(shared.order + all.slots) - base;
}

// Where a thread's count is: apart from those of the other parts, for the sake of shared memory's banks.
ANYWHERE int CountOf(int thread) { return thread + thread / kPart; }

// What threads do to a place that others may be at.

ANYWHERE int32_t Claim(int32_t* key, int32_t position) {
#ifdef __CUDA_ARCH__
  return atomicCAS(key, -1, position);
#else
  const int32_t old = *key;
  if (old < 0) *key = position;
  return old;
#endif
}

ANYWHERE void Least(int32_t* value, int32_t entry) {
#ifdef __CUDA_ARCH__
  atomicMin(value, entry);
#else
  if (entry < *value) *value = entry;
#endif
}

ANYWHERE void Add(int32_t* count, int32_t more) {
#ifdef __CUDA_ARCH__
  atomicAdd(count, more);
#else
  *count += more;
#endif
}

ANYWHERE void Mark(uint32_t* word, uint32_t bit) {
#ifdef __CUDA_ARCH__
  atomicOr(word, bit);
#else
  *word |= bit;
#endif
}

// One row's work.
struct RowOf {
  Resolve all;
  Shared shared;
  int64_t row, table, region;
  int shift = 32;
  bool fresh, owned;

  ANYWHERE RowOf(const Resolve& given, int64_t number, uint8_t* memory) : all(given), row(number) {
    Lay(all, memory, shared);
    table = TableSize(all.entries);
    for (int64_t size = 1; size < table; size *= 2) --shift;
    const int32_t named = all.regions[row];
    fresh = named < -1;
    region = fresh ? -2 - static_cast<int64_t>(named) : named;
    owned = region >= 0 && region < all.count;
  }

  ANYWHERE int64_t Begin() const { return all.slots - shared.counts[0] - shared.counts[1]; }  // of slots that are filled
  ANYWHERE int32_t Position(int64_t entry) const { return all.positions[row * all.entries + entry]; }
  ANYWHERE int32_t* Held() const { return all.held + region * all.slots; }
  ANYWHERE int32_t* Lru() const { return all.lru + region * all.slots; }
  ANYWHERE int32_t RowOfSlot(int64_t slot) const {
    return static_cast<int32_t>(all.first + region * all.slots + slot);
  }
  ANYWHERE bool IsHit(int64_t slot) const { return shared.hit[slot / 32] >> (slot % 32) & 1; }
  ANYWHERE int32_t SlotAt(int64_t place) const { return fresh ? static_cast<int32_t>(place) : Lru()[place]; }

  ANYWHERE int64_t Hash(int32_t position) const {
    return static_cast<uint32_t>(position) * 2654435761u >> shift;  // its upper bits, as many as the table has
  }

  ANYWHERE void Ask(int32_t position, int32_t entry) const {
    int64_t at = Hash(position);
    for (int32_t old = Claim(shared.keys + at, position); old >= 0 && old != position;) {
      at = (at + 1) & (table - 1);
      old = Claim(shared.keys + at, position);
    }
    Least(shared.values + at, entry);
  }

  // Where a position stands in the table, or -1.
  ANYWHERE int64_t Find(int32_t position) const {
    if (position < 0) return -1;
    for (int64_t at = Hash(position); shared.keys[at] >= 0; at = (at + 1) & (table - 1)) {
      if (shared.keys[at] == position) return at;
    }
    return -1;
  }

  ANYWHERE void Clear(int thread) const {
    for (int64_t at = thread; at < table; at += kThreads) shared.keys[at] = -1, shared.values[at] = kNobody;
    for (int64_t word = thread; word * 32 < all.slots; word += kThreads) shared.hit[word] = 0;
    if (thread < 3) shared.counts[thread] = 0;
  }

  // What has a frame is answered; what needs the region goes into the table.
  ANYWHERE void AskAll(int thread) const {
    for (int64_t entry = thread; entry < all.entries; entry += kThreads) {
      const int64_t here = row * all.entries + entry;
      const int32_t position = Position(entry);
      const bool real = position >= 0 && position / all.page_size < all.width;
      const int32_t frame = real ? all.frames[row * all.width + position / all.page_size] : -1;
      all.rows[here] = frame >= 0 ? frame * all.page_size + position % all.page_size : -1;
      if (entry < all.planned) all.sources[row * all.planned + entry] = all.targets[row * all.planned + entry] = -1;
      if (real && frame < 0 && owned) {
        Ask(position, static_cast<int32_t>(entry));
      } else if (position >= 0 && frame < 0) {
        Add(shared.counts + 2, 1);
      }
    }
  }

  ANYWHERE void FindHits(int thread) const {
    if (!owned) return;
    for (int64_t slot = thread; slot < all.slots; slot += kThreads) {
      if (fresh) {
        Held()[slot] = -1;
        continue;
      }
      const int64_t at = Find(Held()[slot]);
      if (at < 0) continue;
      shared.values[at] = static_cast<int32_t>(slot - all.slots);
      Mark(shared.hit + slot / 32, 1u << (slot % 32));
      Add(shared.counts, 1);
    }
  }

  ANYWHERE bool IsMissing(int64_t entry, int64_t& at) const {
    at = Find(Position(entry));
    return at >= 0 && shared.values[at] == entry;
  }

  // A thread's part of `count` things that lie one after the other.
  ANYWHERE static void PartOf(int thread, int64_t count, int64_t& first, int64_t& last) {
    const int64_t each = (count + kThreads - 1) / kThreads;
    first = thread * each < count ? thread * each : count;
    last = first + each < count ? first + each : count;
  }

  ANYWHERE void Count(int thread) const {
    int64_t first, last, at;
    int32_t missing = 0, unhit = 0;
    PartOf(thread, all.entries, first, last);
    for (int64_t entry = first; entry < last; ++entry) missing += IsMissing(entry, at);
    PartOf(thread, owned ? all.slots : 0, first, last);
    for (int64_t place = first; place < last; ++place) unhit += !IsHit(SlotAt(place));
    shared.missing[CountOf(thread)] = missing;
    shared.unhit[CountOf(thread)] = unhit;
  }

  // The first threads add up the parts, one then the parts' sums, and the first threads spread those.
  ANYWHERE int32_t* Counts(int of) const { return of < kThreads / kPart ? shared.missing : shared.unhit; }

  ANYWHERE void SumParts(int thread) const {
    if (thread >= 2 * (kThreads / kPart)) return;
    const int part = thread % (kThreads / kPart);
    int32_t total = 0;
    for (int i = 0; i < kPart; ++i) total += Counts(thread)[CountOf(part * kPart + i)];
    shared.totals[thread] = total;
  }

  ANYWHERE void SumTotals(int thread) const {
    if (thread >= 2) return;
    int32_t before = 0;
    for (int part = 0; part < kThreads / kPart; ++part) {
      int32_t& total = shared.totals[thread * (kThreads / kPart) + part];
      const int32_t mine = total;
      total = before;
      before += mine;
    }
    if (thread == 0) {  // as many as there are slots
      const int32_t room = static_cast<int32_t>(all.slots) - shared.counts[0];
      shared.counts[1] = before < room ? before : room;
    }
  }

  ANYWHERE void Spread(int thread) const {
    if (thread >= 2 * (kThreads / kPart)) return;
    const int part = thread % (kThreads / kPart);
    int32_t before = shared.totals[thread];
    for (int i = 0; i < kPart; ++i) {
      int32_t& count = Counts(thread)[CountOf(part * kPart + i)];
      const int32_t mine = count;
      count = before;
      before += mine;
    }
  }

  ANYWHERE void Order(int thread) const {
    if (!owned) return;
    const int64_t hits = shared.counts[0], misses = shared.counts[1], begin = Begin();
    int64_t first, last;
    PartOf(thread, all.slots, first, last);
    int64_t older = shared.unhit[CountOf(thread)];
    for (int64_t place = first; place < last; ++place) {
      const int32_t slot = SlotAt(place);
      if (IsHit(slot)) {
        shared.order[all.slots - hits + place - older] = static_cast<uint16_t>(slot);
      } else {
        shared.order[older < misses ? begin + older : older - misses] = static_cast<uint16_t>(slot);
        ++older;
      }
    }
  }

  ANYWHERE void Give(int thread) const {
    if (!owned) return;
    int64_t first, last, at;
    PartOf(thread, all.entries, first, last);
    int64_t number = shared.missing[CountOf(thread)];
    for (int64_t entry = first; entry < last && number < shared.counts[1]; ++entry) {
      if (!IsMissing(entry, at)) continue;
      const int32_t position = Position(entry), slot = shared.order[Begin() + number];
      const int32_t page = all.pages[row * all.width + position / all.page_size];
      const int64_t here = row * all.planned + number;
      all.sources[here] = page * all.page_size + position % all.page_size;
      all.targets[here] = RowOfSlot(slot);
      Held()[slot] = position;
      shared.values[at] = static_cast<int32_t>(slot - all.slots);
      ++number;
    }
  }

  ANYWHERE void Answer(int thread) const {
    if (!owned) return;
    for (int64_t entry = thread; entry < all.entries; entry += kThreads) {
      const int64_t at = Find(Position(entry));
      if (at < 0) continue;
      if (shared.values[at] < 0) {
        all.rows[row * all.entries + entry] = RowOfSlot(shared.values[at] + all.slots);
      } else {
        Add(shared.counts + 2, 1);
      }
    }
    for (int64_t place = thread; place < all.slots; place += kThreads) Lru()[place] = shared.order[place];
  }

  ANYWHERE void Report(int thread) const {
    if (thread == 0) all.hits[row] = shared.counts[0];
    if (thread == 1) all.misses[row] = shared.counts[1];
    if (thread == 2) all.lost[row] = shared.counts[2];
  }
};

constexpr int kPhases = 11;

ANYWHERE void RunPhase(const RowOf& row, int phase, int thread) {
  switch (phase) {
    case 0: return row.Clear(thread);
    case 1: return row.AskAll(thread);
    case 2: return row.FindHits(thread);
    case 3: return row.Count(thread);
    case 4: return row.SumParts(thread);
    case 5: return row.SumTotals(thread);
    case 6: return row.Spread(thread);
    case 7: return row.Order(thread);
    case 8: return row.Give(thread);
    case 9: return row.Answer(thread);
    default: return row.Report(thread);
  }
}

#ifdef __CUDACC__

__global__ void __launch_bounds__(kThreads) ResolveAll(Resolve all) {
  extern __shared__ __align__(16) uint8_t memory[];
  const RowOf row(all, blockIdx.x, memory);
#pragma unroll
  for (int phase = 0; phase < kPhases; ++phase) {
    RunPhase(row, phase, threadIdx.x);
    __syncthreads();
  }
}

inline ffi::Error RunResolve(Stream stream, const Resolve& all, int64_t rows, int64_t bytes) {
  const cudaError_t problem =
      cudaFuncSetAttribute(ResolveAll, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (problem != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(problem));
  ResolveAll<<<static_cast<unsigned>(rows), kThreads, static_cast<size_t>(bytes), stream>>>(all);
  return Launched();
}

#else

inline ffi::Error RunResolve(Stream, const Resolve& all, int64_t rows, int64_t bytes) {
  std::vector<int64_t> memory(static_cast<size_t>(bytes / 8 + 1));
  for (int64_t number = 0; number < rows; ++number) {
    const RowOf row(all, number, reinterpret_cast<uint8_t*>(memory.data()));
    for (int phase = 0; phase < kPhases; ++phase) {
      for (int turn = 0; turn < kThreads; ++turn) {  // in no order that anything may depend on
        RunPhase(row, phase, static_cast<int>((turn * 389 + number * 511 + phase * 77) % kThreads));
      }
    }
  }
  return ffi::Error::Success();
}

#endif

using Ints = ffi::Buffer<ffi::S32>;

ffi::Error ResolveRows(Stream stream, Ints positions, Ints pages, Ints frames, Ints regions, Ints held, Ints lru,
                       ffi::Result<Ints> rows, ffi::Result<Ints> sources, ffi::Result<Ints> targets,
                       ffi::Result<Ints> hits, ffi::Result<Ints> misses, ffi::Result<Ints> lost,
                       ffi::Result<Ints> held_after, ffi::Result<Ints> lru_after, int64_t page_size, int64_t first) {
  const auto shape = positions.dimensions(), tables = frames.dimensions(), hot = held.dimensions();
  if (shape.size() != 3 || tables.size() != 2 || hot.size() != 2 || page_size <= 0) {
    return ffi::Error::InvalidArgument("resolver: positions are not [N, Q, k], tables [N, W], or regions [R, B]");
  }
  if (held_after->typed_data() != held.typed_data() || lru_after->typed_data() != lru.typed_data()) {
    return ffi::Error::Internal("resolver: what regions hold was not passed on in place");
  }
  Resolve all{positions.typed_data(), pages.typed_data(),   frames.typed_data(),  regions.typed_data(),
              rows->typed_data(),     sources->typed_data(), targets->typed_data(), hits->typed_data(),
              misses->typed_data(),   lost->typed_data(),    held_after->typed_data(), lru_after->typed_data(),
              shape[1] * shape[2],    tables[1],             hot[0],                hot[1],
              sources->dimensions()[1], static_cast<int32_t>(page_size), first};
  if (all.slots > UINT16_MAX || all.planned != (all.entries < all.slots ? all.entries : all.slots)) {
    return ffi::Error::InvalidArgument("resolver: regions of more than 65,535 rows, or plans of another size");
  }
  if (shape[0] == 0) return ffi::Error::Success();
  Shared shared;
  return RunResolve(stream, all, shape[0], Lay(all, nullptr, shared));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ResolverResolve, ResolveRows,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("first"),
                              {ffi::Traits::kCmdBufferCompatible});
