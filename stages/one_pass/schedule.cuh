#pragma once

// What a block of whole heads works on: its share of the chunks (shares.cu), as jobs that one warp
// makes out and all roles take from a ring.
//
// A share that begins inside a sequence looks back, by the gates alone, for the chunk from which on
// the past has faded when the share begins. Where none is near, the share is linked: it begins with
// the state behind the share in front, and is walked last. If the share lies inside the sequence
// and the next one is linked, too, it is walked twice more before: from nothing, for what it adds
// to a state (U), and from the identity without values, for what it makes of one (T). Both are left
// for the blocks behind: each takes the nearest state that one in front has left, and makes T S + U
// of it share by share. So blocks wait for blocks of smaller numbers alone, which start first.
//
// What keys that are not normalised add to the bound is found on the way, from the diagonal of K
// K^T, and enters the check: the block that is the last of a sequence's and head's to be done makes
// it, and where it does not pass computes the head again in one piece.

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "one_pass/one_pass.cuh"
#include "one_pass/shares.hpp"
#include "one_pass/span.cuh"
#include "one_pass/walks.hpp"
#include "segments/block_plan.cuh"

#include <climits>
#include <cstdint>

namespace gdnflow::stages::one_pass {

struct Job : Task {
  // leave: stores what the walk in front has ended with. take: begins with the state that a block
  // has left. link: makes T S + U of it, T as if it were two chunks.
  enum Kind : int { walk, rehearse, hand_on, leave, take, link, end };
  // Of a walk: from a state; from nothing (U); from the identity and without values (T).
  enum Part : int { state, added, transfer };
  Kind kind = walk;
  Part part = state;
  bool linked = false;  // begins with what the jobs in front have made of a state that was taken
  bool fresh = false;   // no output of chunks in front of it is on its way
  bool flush = false;   // none is left on its way behind it
  int number = 0;       // chunks of this block in front of it
  int outputs = 0;      // more than that
  int first_mark = 0;   // chunk of the block from which on max |S| is recorded
  int block = 0;        // that has left what is taken or linked
};

// How far a block's scheduler is.
struct Progress {
  enum Step : int {
    share,
    add,  // of a share that is linked and lies inside a head, for those behind
    leave_added,
    transfer,
    leave_transfer,
    take,
    link,
    look_ahead,  // whether the next share is linked
    leave,
    last,  // what is linked is walked
    finish_begin,
    finish_end,
    end,
    ended
  };
  Share shares[2];  // this block's and the next one's
  Span span;        // of what comes next,
  int span_of;      // of sequence
  Place at;
  Step step;
  int taken;                               // block whose state or T and U came last
  std::int64_t left;                       // chunks of the share behind the jobs so far
  int announced, chunks, starts, flushes;  // of jobs so far
  bool found;                              // whether there is another job now
  bool linked;                             // whether the share is
};

constexpr int job_stages = 5;

struct JobRing {
  Job jobs[job_stages];
  Progress progress;
  Barrier announced[job_stages], done[job_stages];

  __device__ void init(std::uint32_t readers) {
    for (int i = 0; i < job_stages; ++i) {
      announced[i].init(32);
      done[i].init(readers);
    }
  }
};

// By every lane of a warp that takes jobs, in turn: take(job) for each but the last.
template <class Take>
__device__ __forceinline__ void for_each_job(JobRing& ring, Take&& take) {
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int index = i % job_stages;
    ring.announced[index].wait(static_cast<std::uint32_t>(i / job_stages % 2));
    // By a vote, so that the loop is uniform for the compiler, too.
    if (__any_sync(~0U, ring.jobs[index].kind == Job::end)) return;
    take(ring.jobs[index]);
    ring.done[index].arrive();
  }
}

__device__ __forceinline__ bool same_head(const Place& a, const Place& b) {
  return a.sequence == b.sequence && a.head == b.head;
}

// First token of chunk `index` of a sequence; of the one behind its last, its end.
__device__ __forceinline__ std::int32_t token_of(const Span& span, std::int32_t index) {
  return index == 0 ? span.start : min(span.start + (index * rows - span.in_first), span.end);
}

// The nearest chunk of a sequence in front of chunk `begin` where what is older has faded when that
// begins, or its first, with its initial state; none (-1) where the share does better linked. By a
// warp, eight chunks at a time. A NaN never has faded.
__device__ __forceinline__ segments::Start look_back(const Params& p, const Span& span,
                                                     const Share& share) {
  const Place begin = share.begin;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const float nothing = -__int_as_float(0x7f800000);
  const std::int32_t least = max(0, begin.chunk - share.most_lead);
  float before = 0.0F;
#pragma unroll 1
  for (std::int32_t from = begin.chunk - 1; from >= least; from -= 8) {
    const std::int32_t index = from - lane / 4;
    float sum = 0.0F;
    if (index >= least) {
      const std::int32_t end = token_of(span, index + 1);
#pragma unroll 8
      for (std::int32_t token = token_of(span, index) + lane % 4; token < end; token += 4) {
        sum += device::clamp_log_decay(p.g.at(token, begin.head));
      }
    }
    sum += __shfl_xor_sync(~0U, sum, 1);
    sum += __shfl_xor_sync(~0U, sum, 2);
    sum *= device::log2_e;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float x = __shfl_up_sync(~0U, sum, step);
      if (lane >= step) sum += x;
    }
    sum += before;
    const unsigned found = __ballot_sync(
        ~0U, index >= least && sum <= segments::log2_resolution + segments::log2_margin);
    if (found != 0) {
      const int first = __ffs(static_cast<int>(found)) - 1;
      const std::int32_t chunk = from - first / 4;
      const float bound = __shfl_sync(~0U, sum, first);
      return {chunk, chunk == 0 ? nothing : bound};
    }
    before = __shfl_sync(~0U, sum, 31);
  }
  return {begin.chunk <= share.most_start ? 0 : -1, nothing};
}

// A chunk of nothing that leaves nothing, the first job: while the block waits for its share, every
// role fetches its instructions. By one thread, before a barrier of the block.
__device__ __forceinline__ void init_rehearsal(JobRing& ring) {
  Job& job = ring.jobs[0];
  job.kind = Job::rehearse;
  job.chunks = job.lead = 1;
  job.from_start = job.to_end = false;
  job.fresh = job.flush = true;
  job.part = Job::state;
  job.linked = false;
  job.number = job.outputs = 0;
  job.first_mark = INT_MAX;
  job.block = 0;
}

// Makes out this block's jobs; by a warp, whose registers are few: what it has to remember is in
// shared memory.
class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(const WholeParams& p, JobRing& ring)
      : p_(p), ring_(ring), now_(ring.progress) {}

  __device__ __forceinline__ void run() {
    // In this warp the rehearsal is a step of an imagined share, whose job is not announced.
    bool rehearses = p_.rehearses;
    if (rehearses) {
      ring_.announced[0].arrive();
      imagine();
    }
    bool begun = false;
    for (;;) {
      if (!rehearses && !begun) {
        device::wait_for_predecessors();
        begin();
        begun = true;
      }
      // By every lane before the first writes the next one.
      const Progress::Step step = now_.step;
      if (step == Progress::ended) return;
      if (p_.skips_empty && step == Progress::share && now_.at.chunk == 0) skip_empty();
      segments::Start start{now_.at.chunk, 0.0F};
      const bool ahead = step == Progress::look_ahead;
      if (ahead || (step == Progress::share && now_.at.chunk > 0)) {
        start = look_back(p_, now_.span, now_.shares[ahead ? 1 : 0]);
        if (rehearses) {
          start.chunk = 0;
        } else if (!ahead && is_first_lane()) {
          p_.share_starts[blockIdx.x] = start.chunk < 0 ? now_.at.chunk : start.chunk;
          p_.share_bounds[blockIdx.x] = start.log2_bound;
        }
      }
      // What this block has of a head is visible when every role is done with it.
      if (step == Progress::finish_begin && !now_.linked) {
        wait_for_first();
      } else if (step == Progress::finish_begin || step == Progress::finish_end) {
        wait_for_all();
      }
      if (step == Progress::take) find_front();
      const int number = now_.announced;
      if (number >= job_stages) wait_done(number - job_stages);
      __syncwarp();
      if (step == Progress::finish_begin || step == Progress::finish_end) {
        next_finish(step == Progress::finish_end);
      } else if (is_first_lane()) {
        next(start);
      }
      __syncwarp();
      if (!rehearses && now_.found) ring_.announced[number % job_stages].arrive();
      rehearses = false;
    }
  }

 private:
  __device__ __forceinline__ static bool is_first_lane() { return threadIdx.x % 32 == 0; }

  // A share of a sequence without tokens.
  __device__ __forceinline__ void imagine() {
    if (is_first_lane()) {
      now_.announced = now_.chunks = now_.starts = now_.flushes = 1;
      now_.shares[0].begin = now_.at = {0, 0, 1};
      now_.shares[0].most_lead = 1;
      now_.shares[1].begin = {0, 1, 0};
      now_.span = {};
      now_.span_of = 0;
      now_.left = -1;  // so that none is left behind it
      now_.step = Progress::share;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void begin() {
    constexpr int words = 2 * sizeof(Share) / sizeof(int);
    static_assert(words <= 32);
    auto lane = static_cast<int>(threadIdx.x % 32);
    asm volatile("" : "+r"(lane));  // so that addresses are not made ahead of the loop and kept
    if (lane < words) {
      reinterpret_cast<int*>(now_.shares)[lane] =
          reinterpret_cast<const int*>(p_.shares + blockIdx.x)[lane];
    }
    __syncwarp();
    if (is_first_lane()) {
      const Share share = now_.shares[0];
      const Share behind = now_.shares[1];
      now_.left = chunks_in_front(behind) - chunks_in_front(share);
      now_.span = share.span;
      now_.span_of = share.begin.sequence;
      now_.at = share.begin;
      now_.step = Progress::share;
      now_.linked = false;
      now_.announced = now_.chunks = now_.starts = now_.flushes = first_job();
    }
    __syncwarp();
  }
  // Its number; the rehearsal is a chunk and a flush, too.
  __device__ __forceinline__ int first_job() const { return p_.rehearses ? 1 : 0; }
  __device__ __forceinline__ std::int64_t chunks_in_front(const Share& share) const {
    return std::int64_t{share.span.first_chunk} * p_.heads.v +
           std::int64_t{share.begin.head} * share.span.chunks + share.begin.chunk;
  }

  __device__ __forceinline__ void wait_done(int i) {
    ring_.done[i % job_stages].wait(static_cast<std::uint32_t>(i / job_stages % 2));
  }
  // Where its place in the ring has another job, it has been waited for.
  __device__ __forceinline__ void wait_for_first() {
    const int first = first_job();
    if (first < now_.announced && now_.announced <= first + job_stages) wait_done(first);
  }
  __device__ __forceinline__ void wait_for_all() {
#pragma unroll 1
    for (int i = max(0, now_.announced - job_stages); i < now_.announced; ++i) wait_done(i);
  }

  // On to a sequence with chunks, or to where the share ends; by the warp, 32 sequences at a time.
  __device__ __forceinline__ void skip_empty() {
    const std::int32_t end = now_.shares[1].begin.sequence;
    std::int32_t sequence = now_.at.sequence;
    unsigned found = 0;
#pragma unroll 1
    while (found == 0 && sequence < end) {
      const auto mine = sequence + static_cast<std::int32_t>(threadIdx.x % 32);
      found =
          __ballot_sync(~0U, mine < end && p_.chunks.offsets[mine] < p_.chunks.offsets[mine + 1]);
      sequence += found == 0 ? 32 : __ffs(static_cast<int>(found)) - 1;
    }
    __syncwarp();
    if (is_first_lane() && sequence != now_.at.sequence) now_.at = {min(sequence, end), 0, 0};
    __syncwarp();
  }

  // One step on: of the share, or behind it. `start` is that of the place. By one lane, as all that
  // follows: the next job, where one is found, in its place in the ring.
  __device__ __forceinline__ void next(const segments::Start& start) {
    now_.found = false;
    switch (now_.step) {
      case Progress::share:
        start.chunk < 0 ? put_off() : next_of_share(start);
        break;
      case Progress::look_ahead:
        now_.step = start.chunk >= 0      ? behind_others()
                    : is_linked_through() ? Progress::leave_added
                                          : Progress::leave;
        break;
      case Progress::add:
        // Under which it is found out whether anybody needs it, as is likely.
        found_part(Job::added);
        now_.step = Progress::look_ahead;
        break;
      case Progress::leave_added:
        found(Job::leave, now_.at, -1).part = Job::added;
        now_.step = Progress::transfer;
        break;
      case Progress::transfer:
        found_part(Job::transfer);
        now_.step = Progress::leave_transfer;
        break;
      case Progress::leave_transfer:
        found(Job::leave, now_.at, -1).part = Job::transfer;
        now_.step = Progress::take;
        break;
      case Progress::take:
        found(Job::take, now_.shares[0].begin, -1).block = now_.taken;
        now_.step = behind_link();
        break;
      case Progress::link:
        found_link();
        now_.step = behind_link();
        break;
      case Progress::leave:
        found(Job::leave, now_.at, -1);
        now_.step = behind_others();
        break;
      case Progress::last:
        found_last();
        now_.step = Progress::finish_begin;
        break;
      default:
        found(Job::end, now_.at, -1);
        now_.step = Progress::ended;
    }
  }

  __device__ __forceinline__ Job& found(Job::Kind kind, const Place& place, int waiting_row) {
    const int number = now_.announced;
    now_.announced = number + 1;
    now_.found = true;
    Job& job = ring_.jobs[number % job_stages];
    job.kind = kind;
    job.part = Job::state;
    job.linked = false;
    job.sequence = place.sequence;
    job.head = place.head;
    job.qk_head = p_.heads.qk_of(place.head);
    job.first_column = 0;
    job.waiting_row = waiting_row;
    job.chunks = 0;
    return job;
  }

  // Chunks [from, to) of a head, those in front of `begin.chunk` for the state alone. Cut: other
  // blocks have chunks of the same head; last: no chunks are behind it, as far as is known.
  __device__ __forceinline__ Job& found_walk(const Place& begin, const Span& span,
                                             std::int32_t from, std::int32_t to, int waiting_row,
                                             bool cut, bool last) {
    const int number = now_.chunks;
    const int starts = now_.starts;
    const int flushes = now_.flushes;
    const std::int32_t chunks = to - from;
    const std::int32_t lead = begin.chunk - from;
    const bool fresh = flushes == starts;
    const std::int32_t token = token_of(span, from);
    Job& job = found(Job::walk, begin, waiting_row);
    job.first = span.first_chunk;
    job.first_number = span.first_number;
    job.first_chunk = span.first_chunk + from;
    job.chunks = chunks;
    job.lead = lead;
    job.from_start = from == 0;
    job.to_end = to == span.chunks;
    job.fresh = fresh;
    job.flush = last && chunks > 0;
    job.number = number;
    job.outputs = flushes;
    job.first_mark = cut ? number + lead : INT_MAX;
    job.chunk.first_token = token;
    job.chunk.tokens = token_of(span, from + 1) - token;
    job.end_token = token_of(span, to);
    if (chunks == 0) return job;
    now_.chunks = number + chunks;
    now_.starts = starts + (fresh ? 1 : 0);
    now_.flushes = flushes + (last ? 1 : 0);
    return job;
  }

  __device__ __forceinline__ void next_of_share(const segments::Start& start) {
    const Place begin = now_.shares[0].begin;
    const Place end = now_.shares[1].begin;
    const Place at = now_.at;
    const bool last = same_head(at, end);
    if (last && at.chunk == end.chunk) {
      now_.step = begin.chunk > 0 ? behind_others() : Progress::end;
      return;
    }
    if (at.sequence != now_.span_of) {
      now_.span_of = at.sequence;
      now_.span = span_of(p_.chunks.offsets, p_.starts, p_.prefix_lens, p_.wide_index, at.sequence);
    }
    const Span span = now_.span;
    const std::int32_t stop = last ? end.chunk : span.chunks;
    const std::int64_t left = now_.left - (stop - at.chunk);
    now_.left = left;
    if (last) {
      now_.step = Progress::look_ahead;
    } else {
      now_.at = next_head(at);
    }
    const bool inside = at.chunk > 0;
    const std::int32_t row = inside ? waiting_row() : -1;
    // A role waits inside a job for the next one's chunk. Where empty sequences come first, which
    // need places in the ring, too, nothing is to be on its way.
    const bool empty_next =
        !p_.skips_empty && left > 0 && !last && at.head + 1 == p_.heads.v &&
        p_.chunks.offsets[at.sequence + 1] == p_.chunks.offsets[at.sequence + 2];
    found_walk(at, span, start.chunk, stop, row, inside || last, left == 0 || empty_next);
  }

  __device__ __forceinline__ Place next_head(const Place& at) const {
    const bool same_sequence = at.head + 1 < p_.heads.v;
    return {same_sequence ? at.sequence : at.sequence + 1, same_sequence ? at.head + 1 : 0, 0};
  }
  // Of a final state behind a begin inside a sequence.
  __device__ __forceinline__ std::int32_t waiting_row() const {
    return p_.waiting.data != nullptr ? now_.shares[0].first_block : -1;
  }

  // Shares that are linked.

  // Where the share's first head ends, or the share.
  __device__ __forceinline__ std::int32_t end_of_first() const {
    return is_linked_through() ? now_.shares[1].begin.chunk : now_.shares[0].span.chunks;
  }
  // Whether the next share begins inside the same head.
  __device__ __forceinline__ bool is_linked_through() const {
    return now_.linked && same_head(now_.shares[0].begin, now_.shares[1].begin);
  }
  __device__ __forceinline__ Progress::Step behind_others() const {
    return now_.linked ? Progress::take : Progress::finish_begin;
  }
  __device__ __forceinline__ Progress::Step behind_link() const {
    return now_.taken + 1 < block_of() ? Progress::link : Progress::last;
  }
  __device__ __forceinline__ static int block_of() { return static_cast<int>(blockIdx.x); }
  // The nearest block in front that leaves a state; those between leave T and U, and all are waited
  // for. By the warp, 32 blocks at a time.
  __device__ __forceinline__ void find_front() {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    int front = block_of() - 1;
    for (;;) {
      std::int32_t left = 0;
      if (front >= lane) {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                     : "=r"(left)
                     : "l"(p_.links.left + front - lane)
                     : "memory");
      }
      const unsigned states = __ballot_sync(~0U, left == Links::state_left);
      const unsigned missing = __ballot_sync(~0U, left == 0);
      // The lowest bit of each: a state with nothing missing in front of it.
      if ((states & (0U - states)) - 1U < (missing & (0U - missing)) - 1U) {
        front -= __ffs(static_cast<int>(states)) - 1;
        break;
      }
      if (missing == 0) front -= 32;
    }
    if (is_first_lane()) now_.taken = front;
    __syncwarp();
  }
  // Other heads come first: for the end of the last one the next block may wait.
  __device__ __forceinline__ void put_off() {
    now_.linked = true;
    if (is_linked_through()) {
      now_.step = Progress::add;
      return;
    }
    now_.left -= end_of_first() - now_.at.chunk;
    now_.at = next_head(now_.at);
  }
  // All of the share's chunks, for the state alone; nothing is on its way behind.
  __device__ __forceinline__ void found_part(Job::Part part) {
    const std::int32_t from = now_.shares[0].begin.chunk;
    const Place end = now_.shares[1].begin;
    Job& job = found_walk(end, now_.shares[0].span, from, end.chunk, -1, false, true);
    job.part = part;
    if (part == Job::transfer) job.first_column = dim;  // past the end of v copies give zeros
  }
  __device__ __forceinline__ void found_link() {
    const Place begin = now_.shares[0].begin;
    const int block = now_.taken + 1;
    now_.taken = block;
    Span span{};
    span.chunks = 4;  // of which two, neither the first nor the last
    Job& job = found_walk({begin.sequence, begin.head, 3}, span, 1, 3, -1, false, true);
    job.kind = Job::link;
    job.block = block;
    // No outputs: those of other jobs are numbered on as if it had no chunks, either.
    job.fresh = job.flush = false;
    now_.starts -= 3;
    now_.flushes -= 3;
  }
  __device__ __forceinline__ void found_last() {
    const Place begin = now_.shares[0].begin;
    found_walk(begin, now_.shares[0].span, begin.chunk, end_of_first(), waiting_row(), true, true)
        .linked = true;
  }

  // Whether the share of `block` holds: what it cut off is below the resolution of what it has.
  __device__ __forceinline__ bool holds(const Share& share, std::int32_t block) const {
    const std::int32_t start = __ldcg(&p_.share_starts[block]);
    const std::int32_t first = share.span.first_chunk;
    float log2_bound = __ldcg(&p_.share_bounds[block]);
    // Where nothing is cut off, nobody may have said how keys let it grow.
    for (int i = 0; i < 4 && log2_bound > -__int_as_float(0x7f800000); ++i) {
      log2_bound += __ldcg(&p_.segments.log2_growth[4 * block + i]);
    }
    return most(share.begin.head, first + start) * exp2f(log2_bound) <=
           exp2f(segments::log2_resolution) * most(share.begin.head, first + share.begin.chunk);
  }
  __device__ __forceinline__ float most(int head, std::int32_t chunk) const {
    const float* const parts =
        p_.segments.marks + (std::int64_t{chunk} * p_.heads.v + head) * SegmentPlan::parts;
    std::uint32_t most = 0;  // as bits: a NaN is more than any number
    for (int i = 0; i < SegmentPlan::parts; ++i) {
      most = max(most, __float_as_uint(__ldcg(&parts[i])));
    }
    return __uint_as_float(most);
  }

  // This block's part of the head that the share begins inside is done, and then that of the head
  // that it ends inside; by the whole warp.
  __device__ __forceinline__ void next_finish(bool of_end) {
    const Share& share = now_.shares[of_end ? 1 : 0];
    const bool inside = share.begin.chunk > 0;
    const bool once = of_end && now_.shares[0].begin.chunk > 0 &&
                      same_head(now_.shares[0].begin, share.begin);  // both are one
    __syncwarp();
    if (is_first_lane()) {
      now_.found = false;
      now_.step = of_end ? Progress::end : Progress::finish_end;
    }
    if (inside && !once) finish(share);
  }

  __device__ __forceinline__ void finish(const Share& share) {
    std::int32_t before = 0;
    if (is_first_lane()) {
      __threadfence();
      before = atomicAdd(&p_.finished[share.first_block], 1);
      __threadfence();
    }
    before = __shfl_sync(~0U, before, 0);
    __syncwarp();
    if (before < share.last_block - share.first_block) return;
    bool passed = true;
    for (std::int32_t i = share.first_block + 1 + static_cast<std::int32_t>(threadIdx.x % 32);
         i <= share.last_block; i += 32) {
      passed = passed && holds(p_.shares[i], i);
    }
    passed = __all_sync(~0U, passed);
    if (!is_first_lane()) return;
    const Place head{share.begin.sequence, share.begin.head, 0};
    if (!passed) {
      found_walk(head, share.span, 0, share.span.chunks, -1, false, true);
    } else if (p_.waiting.data != nullptr) {
      found(Job::hand_on, head, share.first_block);
    }
  }

  const WholeParams& p_;
  JobRing& ring_;
  Progress& now_;
};

}  // namespace gdnflow::stages::one_pass
