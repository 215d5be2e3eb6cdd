// Runs a kernel's threads on a CPU, each by itself in random order, and looks at every access.
//
// One CTA, or the CTAs of one cluster, run at a time. Each of their threads is a fibre of its own.
// A random one goes on whenever one waits, and now and then at a barrier. Copies (TMA, bulk) and
// products (wgmma) are *agents*: actors beside the threads. Loads take place at a random moment
// after they were started; products and stores at once, which is one of the orders that a GPU may
// choose.
//
// Each actor has a vector clock. Two accesses to the same 2 bytes, one of them a write, are a race
// unless one's clock says that it comes behind the other, in whatever order they happened to run.
// What orders: __syncwarp, __syncthreads, bar.sync, bar.arrive, barrier.cluster; mbarriers, an
// arrival before the wait for its phase; wgmma.wait_group and cp.async.bulk.wait_group, for the
// agents' work; one launch before the next. Shuffles and votes order nothing, and two threads of a
// warp are not in step.
//
// Seen:
// - races in shared memory, and in global memory within a cluster and between CTAs;
// - accesses outside of a tensor or of shared memory;
// - reads of what nobody wrote: tensors without values, and shared memory of a CTA that starts. A
//   thread's access counts if none of its bytes has a value, since structs have padding;
// - products and bulk copies that read, or write over, what a thread wrote without a proxy fence;
// - too many arrivals at a barrier, an mbarrier before its init, lanes that do not meet in a
//   collective, addresses that are not aligned, deadlocks;
// - a CTA that ends before its bulk stores, before copies to it, or while others of its cluster may
//   still read its shared memory.
//
// Not seen:
// - what ptxas makes of a kernel, and registers that a product in flight still reads or writes;
// - wgmma and mma.sync of TF32: not emulated, and an error where a kernel calls them;
// - the order that ld.acquire and red.release make: they are plain accesses, and would be reported;
//   sums by bulk copies are not looked at, nor is atomicAdd. Other atomics are missing, as what MISSING
//   names;
// - static __shared__ variables: there is one for all CTAs, and it is not looked at;
// - lanes of a warp that test an mbarrier apart: the first that passes lets its warp pass, as one
//   instruction does for all;
// - bulk stores that have only been read (wait_group.read) when they should be done;
// - kernels that start before the one before them is done (griddepcontrol);
// - and, as with any test, batches that were not drawn.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#undef threadIdx

extern "C" void* __real_memcpy(void*, const void*, size_t);
extern "C" char __executable_start;

namespace lanes {

View* view = nullptr;
int num_sms = 2;

namespace {

using Clock = uint32_t;
using Clocks = std::vector<Clock>;  // of all actors

// --- Memory: the shared memory of up to 8 CTAs, then tensors with space between them

constexpr size_t kShared = 256 * 1024, kMaxCtas = 8, kSharedEnd = kShared * kMaxCtas;
constexpr size_t kEnd = kSharedEnd + (size_t{64} << 20), kGap = 4096, kStack = 256 * 1024;
constexpr int kCopyAgents = 128, kProductAgents = 8;  // of a launch, of a warp; used in turn

struct Cell {  // of 2 bytes
  uint16_t writer, reader;
  Clock written, read;  // 0: not in this group of CTAs
  uint32_t write_place, read_place;
  uint32_t writer_fences;
  uint16_t group;
  bool exists : 1, has_value : 1, is_by_agent : 1, is_of_launch : 1, has_readers : 1;
};
struct Tensor {
  size_t begin, end;
  std::string name;
};

char* memory = nullptr;
Cell* cells;
std::map<size_t, std::map<int, Clock>> readers;  // of cells that several actors read
std::vector<Tensor> tensors;
size_t next_tensor;

void* reserve(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

// --- Threads

struct AgentTime {
  int agent;
  Clock time;
};
struct AsyncCopy {
  uint32_t shared;
  const char* global;
  int bytes, source_bytes;
};
struct Thread {
  View own;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  int index, cta, warp;
  bool is_done = true, is_ready = false, was_woken = false, bar_value = false;
  Clocks clocks, at_fence;
  uint32_t fences = 0;
  std::vector<AsyncCopy> copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
  int bulk_agent = -1, product_agent = -1;
  std::vector<AgentTime> bulk_groups, product_groups;
  std::string waits_for;
};
struct Barrier {
  int count = 0, expected = 0;
  bool value = false;
  Clocks clocks;
  std::vector<Thread*> waiting;
};
struct Collective {  // shuffles, votes and products of a warp
  int count = 0, kind = 0;
  unsigned generation = 0;
  uint64_t values[2][32];
  std::vector<Thread*> waiting;
};
struct Warp {
  Collective collective, product;
  Barrier sync;
  int next_agent = 0;
};
struct MBarrier {
  bool is_valid = false;
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  unsigned phase = 0;
  Clocks now, done;
  std::vector<Thread*> waiting;
  // Of each warp, the clocks that its n-th wait brought, and how many waits a lane has behind it.
  std::map<int, std::vector<Clocks>> passed;
  std::map<int, size_t> waits;
};

std::mt19937 random_bits(1);
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<std::map<int, Barrier>> cta_barriers;
std::map<size_t, MBarrier> mbarriers;  // by place in `memory`
Barrier cluster_barrier;
std::vector<Thread*> ready;
std::vector<std::function<void()>> copies_under_way;
std::vector<int> alive_of_cta;
std::vector<Clocks> end_of_cta;
std::vector<std::map<int, Clock>> remote_reads;  // of a CTA's shared memory, by actor
std::vector<Clocks> agent_clocks;
std::vector<Clock> agent_times;
Thread* self = nullptr;  // the thread that runs
int acting = -1;         // or the agent that acts for it
void* main_stack_pointer;
int num_threads, num_agents, num_actors, alive, next_copy_agent;
uint16_t group;  // of CTAs that run together, counted
Kernel kernel;
const void* kernel_params;

// Saves the registers that a call keeps, and goes on where `load` was saved (x86-64, System V).
extern "C" void lanes_switch(void** save, void* load);
asm(R"(
.globl lanes_switch
lanes_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void join(Clocks& into, const Clocks& other) {
  if (into.empty()) into.assign(num_actors, 0);
  for (int i = 0; i < num_actors; ++i) into[i] = std::max(into[i], other[i]);
}
void learn(const AgentTime& done) {
  self->clocks[done.agent] = std::max(self->clocks[done.agent], done.time);
}
void tick() { ++self->clocks[self->index]; }
void wake(Thread* thread) {
  if (thread->is_ready || thread->is_done) return;
  thread->is_ready = true;
  ready.push_back(thread);
}
void wake_all(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) wake(thread);
  waiting.clear();
}
void block() {
  Thread* own = self;
  lanes_switch(&own->stack_pointer, main_stack_pointer);
}
void maybe_let_others() {
  if (random_bits() % 4 != 0) return;
  wake(self);
  block();
}

// --- Reports

int found = 0;
bool bounds_alone = false, unwritten_products = false;
std::set<std::string> reported;

std::string name_of_place(size_t place) {
  if (place < kSharedEnd) {
    return "shared memory + " + std::to_string(place % kShared) + " of CTA " +
           std::to_string(place / kShared);
  }
  for (const Tensor& t : tensors) {
    if (place + kGap < t.begin || place >= t.end + kGap) continue;
    return t.name + " + " + std::to_string(int64_t(place) - int64_t(t.begin)) + " of " +
           std::to_string(t.end - t.begin) + " bytes";
  }
  return "no tensor";
}
std::string name_of_actor(int actor) {
  return actor < num_threads ? "thread " + std::to_string(actor)
                             : "agent " + std::to_string(actor - num_threads);
}

// Once for each pair of instructions, whose addresses addr2line takes.
void report(const char* kind, size_t place, uint32_t code, int other = -1,
            uint32_t other_code = 0) {
  const bool is_bounds = strstr(kind, "outside") != nullptr;
  if (bounds_alone && place >= kSharedEnd && !is_bounds) return;
  if (!reported.insert(kind + std::to_string(code) + "," + std::to_string(other_code)).second) {
    return;
  }
  ++found;
  printf("FINDING %s: %s, by %s at 0x%x", kind, name_of_place(place).c_str(),
         name_of_actor(acting >= 0 ? acting : self->index).c_str(), code);
  if (other >= 0) printf(", before by %s at 0x%x", name_of_actor(other).c_str(), other_code);
  printf("\n");
  fflush(stdout);
}

// --- One access to memory

void forget_readers(size_t index) {
  if (cells[index].has_readers) readers.erase(index);
  cells[index].has_readers = false;
  cells[index].read = 0;
}

void check_after_write(const Cell& cell, size_t place, bool writes, int actor, const Clocks& clocks,
                       uint32_t code) {
  if (cell.written == 0) return;
  const bool is_global = place >= kSharedEnd;
  const char* kind = writes ? "write after write" : "read after write";
  if (cell.group != group) {  // another CTA of this launch: nothing orders them
    if (is_global && cell.is_of_launch) report(kind, place, code, cell.writer, cell.write_place);
    return;
  }
  if (cell.writer != actor && clocks[cell.writer] < cell.written) {
    report(kind, place, code, cell.writer, cell.write_place);
  }
  if (acting < 0 || cell.is_by_agent || is_global || cell.writer >= num_threads) return;
  const bool fenced_by_writer = threads[cell.writer].fences > cell.writer_fences;
  const bool fenced_here = !self->at_fence.empty() && self->at_fence[cell.writer] >= cell.written;
  if (!fenced_by_writer && !fenced_here) {
    report("no proxy fence between a thread's write and an asynchronous access", place, code,
           cell.writer, cell.write_place);
  }
}

void write_cell(Cell& cell, size_t index, int actor, const Clocks& clocks, uint32_t code) {
  if (cell.group == group) {
    if (cell.has_readers) {
      for (const auto& [reader, time] : readers[index]) {
        if (reader != actor && clocks[reader] < time) {
          report("write after read", index * 2, code, reader, cell.read_place);
        }
      }
    } else if (cell.read != 0 && cell.reader != actor && clocks[cell.reader] < cell.read) {
      report("write after read", index * 2, code, cell.reader, cell.read_place);
    }
  }
  forget_readers(index);
  cell.writer = uint16_t(actor);
  cell.written = clocks[actor];
  cell.write_place = code;
  cell.writer_fences = acting < 0 ? self->fences : 0;
  cell.group = group;
  cell.has_value = true;
  cell.is_of_launch = index * 2 >= kSharedEnd;
  cell.is_by_agent = acting >= 0;
}

void read_cell(Cell& cell, size_t index, int actor, const Clocks& clocks, uint32_t code) {
  if (index * 2 >= kSharedEnd && !cell.is_of_launch) return;  // an input
  if (cell.group != group) {
    forget_readers(index);
    if (cell.is_of_launch) return;  // reported
    cell.written = 0;
    cell.group = group;
  }
  if (cell.has_readers) {
    readers[index][actor] = clocks[actor];
  } else if (cell.read == 0 || cell.reader == actor || clocks[cell.reader] >= cell.read) {
    cell.reader = uint16_t(actor);
    cell.read = clocks[actor];
  } else {
    cell.has_readers = true;
    readers[index] = {{cell.reader, cell.read}, {actor, clocks[actor]}};
  }
  cell.read_place = code;
}

void access(const void* pointer, size_t bytes, bool writes, const void* return_address) {
  const size_t begin = size_t(static_cast<const char*>(pointer) - memory);
  if (begin >= kEnd || (self == nullptr && acting < 0)) return;
  const auto code = uint32_t(static_cast<const char*>(return_address) - &__executable_start);
  const int actor = acting >= 0 ? acting : self->index;
  const Clocks& clocks = acting >= 0 ? agent_clocks[acting - num_threads] : self->clocks;
  const size_t first = begin / 2, end = (begin + bytes + 1) / 2;
  // A thread that copies a struct reads its padding, too.
  const bool has_padding =
      acting < 0 &&
      std::any_of(cells + first, cells + end, [](const Cell& c) { return c.has_value; });
  for (size_t index = first; index < end; ++index) {
    Cell& cell = cells[index];
    if (!cell.exists) {
      report(writes ? "write outside" : "read outside", index * 2, code);
      continue;
    }
    const bool is_allowed = unwritten_products && acting >= 0 && index * 2 < kSharedEnd;
    if (!writes && !cell.has_value && !has_padding && !is_allowed) {
      report("read of what nobody wrote", index * 2, code);
    }
    check_after_write(cell, index * 2, writes, actor, clocks, code);
    if (writes) {
      write_cell(cell, index, actor, clocks, code);
    } else {
      read_cell(cell, index, actor, clocks, code);
    }
  }
}

void copy(char* to, const char* from, size_t bytes, const void* code) {
  access(from, bytes, false, code);
  access(to, bytes, true, code);
  __real_memcpy(to, from, bytes);
}

// What an agent does, on behalf of a thread
template <typename Work>
void act(int agent, Thread* thread, Work work) {
  Thread* const before = self;
  self = thread;
  acting = agent;
  work();
  acting = -1;
  self = before;
}

int new_agent(int slot, const Clocks& clocks) {
  agent_clocks[slot] = clocks;
  agent_clocks[slot][num_threads + slot] = ++agent_times[slot];
  return num_threads + slot;
}
int new_copy_agent() {
  const int slot = num_agents - kCopyAgents + next_copy_agent;
  next_copy_agent = (next_copy_agent + 1) % kCopyAgents;
  return new_agent(slot, self->clocks);
}
AgentTime now_of(int agent) { return {agent, agent_times[agent - num_threads]}; }

// --- Barriers

void finish(Barrier& barrier) {
  for (Thread* thread : barrier.waiting) {
    join(thread->clocks, barrier.clocks);
    thread->bar_value = barrier.value;
    thread->was_woken = true;
    if (thread != self) wake(thread);
  }
  barrier = Barrier{};
}

bool meet(Barrier& barrier, int expected, bool arrives_only, bool value, const std::string& what) {
  if (barrier.count > 0 && barrier.expected != expected) fail("a barrier of two sizes");
  barrier.expected = expected;
  join(barrier.clocks, self->clocks);
  tick();
  barrier.value |= value;
  if (++barrier.count > expected) fail("too many threads at a barrier");
  self->was_woken = false;
  if (!arrives_only) barrier.waiting.push_back(self);
  if (barrier.count == expected) finish(barrier);
  self->waits_for = what;
  while (!arrives_only && !self->was_woken) block();
  return self->bar_value;
}

MBarrier& mbarrier_at(size_t place) {
  MBarrier& barrier = mbarriers[place];
  if (!barrier.is_valid) fail("an mbarrier before its init");
  return barrier;
}
size_t place_of(const uint64_t& barrier) {
  return size_t(reinterpret_cast<const char*>(&barrier) - memory);
}
void maybe_complete(MBarrier& barrier) {
  while (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.done = barrier.now;
    barrier.now.assign(num_actors, 0);
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    wake_all(barrier.waiting);
  }
}

// --- Copies by TMA

struct Map {
  const char* base;
  int64_t dims[3], strides[2];  // [columns, heads, rows], bytes
  int box[3], elem_bytes;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

size_t swizzled(size_t place, int pitch) {
  return place ^ (pitch == 128 ? (place >> 7 & 7) << 4 : pitch == 64 ? (place >> 7 & 3) << 4 : 0);
}

// Calls visit(shared, global, bytes) for each 16 bytes of the box, `bytes` of which the tensor has.
template <typename Visit>
void for_each_chunk(const Map& map, char* shared, int x, int y, int z, Visit visit) {
  const int pitch = map.box[0] * map.elem_bytes;
  for (int line = 0; line < map.box[2] * map.box[1]; ++line) {
    for (int byte = 0; byte < pitch; byte += 16) {
      const size_t place = size_t(shared - memory) + size_t(line) * pitch + byte;
      const int64_t row = z + line / map.box[1], head = y + line % map.box[1],
                    column = x + byte / map.elem_bytes;
      const bool exists = row >= 0 && row < map.dims[2] && head >= 0 && head < map.dims[1];
      const int64_t left = exists ? (map.dims[0] - column) * map.elem_bytes : 0;
      const char* global =
          map.base + row * map.strides[1] + head * map.strides[0] + column * map.elem_bytes;
      visit(memory + swizzled(place, pitch == 128 ? 128 : 64), const_cast<char*>(global),
            size_t(std::clamp<int64_t>(left, 0, 16)));
    }
  }
}

// Lets `work`, which copies `bytes`, take place later, and the barrier know of it.
void copy_later(uint64_t& barrier, int64_t bytes, std::function<void()> work) {
  const int agent = new_copy_agent();
  const size_t place = place_of(barrier);
  Thread* const thread = self;
  tick();
  copies_under_way.push_back([=] {
    act(agent, thread, work);
    MBarrier& m = mbarrier_at(place);
    join(m.now, agent_clocks[agent - num_threads]);
    m.bytes -= bytes;
    maybe_complete(m);
  });
}

int bulk_agent() {
  if (self->bulk_agent < 0) {
    self->bulk_agent = new_copy_agent();
  } else {
    join(agent_clocks[self->bulk_agent - num_threads], self->clocks);
  }
  return self->bulk_agent;
}

// --- Products

float element(uint16_t word, bool is_bf16) {
  return is_bf16 ? float(bits<__nv_bfloat16>(word)) : float(bits<__half>(word));
}

// Row (or column) `line` of an operand in shared memory, term k, as its descriptor says.
float operand(uint64_t descriptor, bool is_transposed, int line, int k, bool is_bf16,
              const void* code) {
  const auto field = [&](int shift) { return size_t(descriptor >> shift & 0x3fff) << 4; };
  const int pitch = descriptor >> 62 == 1 ? 128 : 64;
  const size_t begin = field(0), blocks = field(16), groups = field(32);
  const size_t place = is_transposed
                           ? begin + size_t(line) * 2 / pitch * blocks + k / 8 * groups +
                                 size_t(k % 8) * pitch + size_t(line) * 2 % pitch
                           : begin + line / 8 * groups + size_t(line % 8) * pitch + size_t(k) * 2;
  const char* chunk = memory + self->cta * kShared + swizzled(place, pitch);
  if (reinterpret_cast<uintptr_t>(chunk) % 16 == 0) access(chunk, 16, false, code);
  return element(*reinterpret_cast<const uint16_t*>(chunk), is_bf16);
}

// The 16 rows of one warp
void multiply(const Product* const (&of_lanes)[32], int first_row, const void* code) {
  static float a[16][16], b[16][256];
  const Product& p = *of_lanes[0];
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < 8 * p.blocks; ++column) {
      b[k][column] = operand(p.b, p.is_b_transposed, column, k, p.is_bf16, code);
    }
    for (int row = 0; row < 16 && p.a_registers == nullptr; ++row) {
      a[row][k] = operand(p.a, p.is_a_transposed, first_row + row, k, p.is_bf16, code);
    }
  }
  for (int lane = 0; lane < 32 && p.a_registers != nullptr; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const auto word = uint16_t(of_lanes[lane]->a_registers[i / 2] >> 16 * (i % 2));
      a[lane / 4 + 8 * (i / 2 % 2)][2 * (lane % 4) + i % 2 + 8 * (i / 4)] =
          element(word, p.is_bf16);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4 * p.blocks; ++i) {
      const int row = lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      float& c = of_lanes[lane]->c[i];
      c = p.accumulates ? c + sum : sum;
    }
  }
}

// --- A thread's end, and a launch

void end_thread() {
  Thread& own = *self;
  if (!own.bulk_groups.empty()) report("a CTA ends before its bulk stores", own.cta * kShared, 0);
  own.is_done = true;
  --alive;
  join(end_of_cta[own.cta], own.clocks);
  if (--alive_of_cta[own.cta] == 0) {
    for (const auto& [reader, time] : remote_reads[own.cta]) {
      if (end_of_cta[own.cta][reader] >= time) continue;
      report("a CTA ends while another may read its shared memory", own.cta * kShared, 0, reader);
    }
  }
  Barrier& all = cta_barriers[own.cta][0];  // __syncthreads of those that are left
  if (all.count > 0 && all.count == alive_of_cta[own.cta]) finish(all);
  lanes_switch(&own.stack_pointer, main_stack_pointer);
}
void begin_thread() {
  kernel(kernel_params);
  end_thread();
}

void prepare_thread(Thread& thread, int index, int per_cta, Dim block, Dim grid) {
  char* stack = thread.stack != nullptr ? thread.stack : static_cast<char*>(reserve(kStack));
  thread = Thread{};
  thread.stack = stack;
  thread.index = index;
  thread.cta = index / per_cta;
  thread.warp = index / 32;
  thread.is_done = false;
  block.x += unsigned(thread.cta);
  thread.own = {{unsigned(index % per_cta), 0, 0},
                block,
                {unsigned(per_cta), 1, 1},
                grid,
                thread.cta,
                index % 32};
  thread.clocks.assign(num_actors, 0);
  thread.clocks[index] = 1;
  auto* top = reinterpret_cast<void**>(stack + kStack - 64);
  *--top = nullptr;  // where begin_thread would return to
  *--top = reinterpret_cast<void*>(begin_thread);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  thread.stack_pointer = top;
  wake(&thread);
}

void deadlock() {
  std::map<std::string, int> waiting;
  for (const Thread& t : threads) {
    if (!t.is_done) ++waiting["warp " + std::to_string(t.warp) + " at " + t.waits_for];
  }
  printf("FINDING deadlock:");
  for (const auto& [what, count] : waiting) printf(" %s (%d threads);", what.c_str(), count);
  printf("\n");
  fflush(stdout);
  _exit(2);
}

void run_group(Dim block, Dim grid, int per_cta, int ctas, size_t shared_bytes) {
  if (++group == 0) ++group;
  warps.assign(num_threads / 32, {});
  cta_barriers.assign(ctas, {});
  mbarriers.clear();
  cluster_barrier = Barrier{};
  remote_reads.assign(ctas, {});
  end_of_cta.assign(ctas, {});
  alive = num_threads;
  alive_of_cta.assign(ctas, per_cta);
  memset(memory, 0xff, ctas * kShared);  // NaN
  for (size_t i = 0; i < ctas * kShared / 2; ++i) {
    cells[i] = Cell{};
    cells[i].exists = i * 2 % kShared < shared_bytes;
  }
  for (int i = 0; i < num_threads; ++i) prepare_thread(threads[i], i, per_cta, block, grid);
  while (alive > 0) {
    auto& later = copies_under_way;
    if (!later.empty() && (ready.empty() || random_bits() % 64 == 0)) {
      std::swap(later[random_bits() % later.size()], later.back());
      const auto work = later.back();
      later.pop_back();
      work();
      continue;
    }
    if (ready.empty()) deadlock();
    std::swap(ready[random_bits() % ready.size()], ready.back());
    self = ready.back();
    ready.pop_back();
    self->is_ready = false;
    view = &self->own;
    lanes_switch(&main_stack_pointer, self->stack_pointer);
    self = nullptr;
  }
  if (!copies_under_way.empty()) fail("a copy to shared memory outlives its CTA");
}

}  // namespace

// --- What kernels and drivers call (runtime.h)

void fail(const char* text) {
  printf("FINDING %s\n", text);
  fflush(stdout);
  _exit(2);
}
int findings() { return found; }
void judge_bounds_alone(bool alone) { bounds_alone = alone; }
void products_may_read_unwritten(bool may) { unwritten_products = may; }

void start(unsigned seed) {
  if (memory == nullptr) {
    memory = static_cast<char*>(reserve(kEnd + 1024));
    memory += (1024 - reinterpret_cast<uintptr_t>(memory) % 1024) % 1024;
    cells = static_cast<Cell*>(reserve(kEnd / 2 * sizeof(Cell)));
  }
  random_bits.seed(seed);
  for (const Tensor& t : tensors) {
    for (size_t i = t.begin / 2; i < (t.end + 1) / 2; ++i) cells[i] = Cell{};
  }
  tensors.clear();
  next_tensor = kSharedEnd + kGap;
}

void* tensor(size_t bytes, const char* name, bool is_written) {
  const size_t begin = (next_tensor + 255) / 256 * 256;
  next_tensor = begin + bytes + kGap;
  if (next_tensor > kEnd) fail("tensors of more than 64 MiB");
  tensors.push_back({begin, begin + bytes, name});
  for (size_t i = begin / 2; i < (begin + bytes + 1) / 2; ++i) {
    cells[i] = Cell{};
    cells[i].exists = true;
    cells[i].has_value = is_written;
  }
  memset(memory + begin, is_written ? 0 : 0xff, bytes);
  return memory + begin;
}

void run(Kernel function, const void* params, int64_t grid_x, int64_t grid_y, int per_cta,
         int cluster, int shared_bytes) {
  if (shared_bytes > 227 * 1024) fail("more shared memory than an SM has");
  kernel = function;
  kernel_params = params;
  for (const Tensor& t : tensors) {
    for (size_t i = t.begin / 2; i < (t.end + 1) / 2; ++i) {
      cells[i].is_of_launch = cells[i].has_readers = false;
      cells[i].written = cells[i].read = 0;
    }
  }
  readers.clear();
  num_threads = per_cta * cluster;
  num_agents = num_threads / 32 * kProductAgents + kCopyAgents;
  num_actors = num_threads + num_agents;
  if (threads.size() < size_t(num_threads)) threads.resize(num_threads);
  agent_clocks.assign(num_agents, {});
  agent_times.assign(num_agents, 0);
  const Dim grid{unsigned(grid_x), unsigned(grid_y), 1};
  for (Dim block{0, 0, 0}; block.y < grid.y; ++block.y) {
    for (block.x = 0; block.x < grid.x; block.x += cluster) {
      run_group(block, grid, per_cta, cluster, size_t(shared_bytes));
    }
  }
}

char* dynamic_shared() { return memory + self->cta * kShared; }
uint32_t shared_address(const void* pointer) {
  const size_t place = size_t(static_cast<const char*>(pointer) - memory);
  if (place >= kSharedEnd) fail("a shared address of something else");
  return uint32_t(place % kShared);
}
uint32_t address_in_cta(uint32_t shared, uint32_t rank) {
  return (shared & 0xffffff) | (rank + 1) << 24;
}
char* at(uint32_t shared) {
  const int cta = shared >> 24 ? int(shared >> 24) - 1 : self->cta;
  if ((shared & 0xffffff) >= kShared) fail("a shared address outside");
  if (cta != self->cta) {
    if (alive_of_cta[cta] == 0) fail("shared memory of a CTA that has ended");
    remote_reads[cta][self->index] = self->clocks[self->index];
  }
  return memory + cta * kShared + (shared & 0xffffff);
}

const uint64_t* exchange(int kind, unsigned mask, uint64_t value) {
  const int lane = view->lane;
  static uint64_t alone[32];
  if (mask == 1u << lane) {
    alone[lane] = value;
    return alone;
  }
  maybe_let_others();
  Collective& all = warps[self->warp].collective;
  if (all.count == 0) all.kind = kind;
  if (all.kind != kind) fail("a warp's lanes are at different collectives");
  const unsigned generation = all.generation;
  all.values[generation % 2][lane] = value;
  if (++all.count == __builtin_popcount(mask)) {
    all.count = 0;
    ++all.generation;
    wake_all(all.waiting);
  } else {
    all.waiting.push_back(self);
    self->waits_for = "a collective";
    while (all.generation == generation) block();
  }
  return all.values[generation % 2];
}
void syncwarp() {
  maybe_let_others();
  meet(warps[self->warp].sync, 32, false, false, "__syncwarp");
}
void meet_all(Barrier& barrier, const int& left, const char* what) {
  maybe_let_others();
  barrier.expected = left;  // threads may have ended since the first arrived
  meet(barrier, left, false, false, what);
}
void syncthreads() {
  meet_all(cta_barriers[self->cta][0], alive_of_cta[self->cta], "__syncthreads");
}
bool bar(int id, int size, bool arrives_only, bool value) {
  maybe_let_others();
  return meet(cta_barriers[self->cta][id], size, arrives_only, value, "bar " + std::to_string(id));
}
void barrier_cluster() { meet_all(cluster_barrier, alive, "barrier.cluster"); }

void mbarrier_init(uint64_t& barrier, int arrivals) {
  MBarrier& m = mbarriers[place_of(barrier)];
  m = MBarrier{};
  m.is_valid = true;
  m.arrivals = m.pending = arrivals;
  m.now.assign(num_actors, 0);
  m.done = m.now;
}
void mbarrier_arrive(uint64_t& barrier, int arrivals, int bytes) {
  maybe_let_others();
  MBarrier& m = mbarrier_at(place_of(barrier));
  join(m.now, self->clocks);
  tick();
  m.bytes += bytes;
  m.pending -= arrivals;
  if (m.pending < 0) fail("too many arrivals at an mbarrier");
  maybe_complete(m);
}
void mbarrier_wait(uint64_t& barrier, int parity) {
  maybe_let_others();
  MBarrier& m = mbarrier_at(place_of(barrier));
  const size_t number = m.waits[self->index]++;
  auto& passed = m.passed[self->warp];
  while (number >= passed.size()) {
    if (int(m.phase % 2) != parity) {
      passed.push_back(m.done);
      wake_all(m.waiting);
      break;
    }
    m.waiting.push_back(self);
    self->waits_for = "mbarrier at " + std::to_string(place_of(barrier) % kShared) + ", parity " +
                      std::to_string(parity);
    block();
  }
  join(self->clocks, passed[number]);
}
void fence_proxy_async() {
  ++self->fences;
  self->at_fence = self->clocks;
}

void make_map(CUtensorMap& map, const void* base, const int64_t (&dims)[3],
              const int64_t (&strides_bytes)[2], const int (&box)[3], int elem_bytes) {
  const Map own{static_cast<const char*>(base),
                {dims[0], dims[1], dims[2]},
                {strides_bytes[0], strides_bytes[1]},
                {box[0], box[1], box[2]},
                elem_bytes};
  __real_memcpy(&map, &own, sizeof own);
}
void tensor_load(const void* shared, const CUtensorMap& tensor_map, int x, int y, int z,
                 uint64_t& barrier) {
  const void* code = __builtin_return_address(0);
  const Map map = *reinterpret_cast<const Map*>(&tensor_map);
  auto* to = static_cast<char*>(const_cast<void*>(shared));
  copy_later(barrier, int64_t(map.box[0]) * map.box[1] * map.box[2] * map.elem_bytes, [=] {
    for_each_chunk(map, to, x, y, z, [&](char* chunk, const char* global, size_t bytes) {
      char values[16] = {};
      if (bytes > 0) copy(values, global, bytes, code);
      copy(chunk, values, 16, code);
    });
  });
}
void tensor_store(const CUtensorMap& tensor_map, const void* shared, int x, int y, int z) {
  const void* code = __builtin_return_address(0);
  const Map map = *reinterpret_cast<const Map*>(&tensor_map);
  act(bulk_agent(), self, [&] {
    for_each_chunk(map, static_cast<char*>(const_cast<void*>(shared)), x, y, z,
                   [&](char* chunk, char* global, size_t bytes) {
                     access(chunk, 16, false, code);
                     if (bytes > 0) copy(global, chunk, bytes, code);
                   });
  });
  tick();
}
void bulk_load(const void* shared, const void* global, int bytes, uint64_t& barrier) {
  const void* code = __builtin_return_address(0);
  const auto places = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (places % 16 != 0 || bytes % 16 != 0) fail("a bulk copy that is not aligned");
  auto* to = static_cast<char*>(const_cast<void*>(shared));
  copy_later(barrier, bytes,
             [=] { copy(to, static_cast<const char*>(global), size_t(bytes), code); });
}
void bulk_store(void* global, const void* shared, int bytes, bool adds) {
  const void* code = __builtin_return_address(0);
  act(bulk_agent(), self, [&] {
    if (!adds)
      return copy(static_cast<char*>(global), static_cast<const char*>(shared), bytes, code);
    access(shared, size_t(bytes), false, code);
    auto* sum = static_cast<float*>(global);
    for (int i = 0; i < bytes / 4; ++i) sum[i] += static_cast<const float*>(shared)[i];
  });
  tick();
}
void bulk_commit() {
  if (self->bulk_agent >= 0) self->bulk_groups.push_back(now_of(self->bulk_agent));
  self->bulk_agent = -1;
}
void bulk_wait() {
  for (const AgentTime& done : self->bulk_groups) learn(done);
  self->bulk_groups.clear();
  maybe_let_others();
}
void cp_async(uint32_t shared, const void* global, int bytes, int source_bytes) {
  if (shared % bytes != 0) fail("cp.async that is not aligned");
  if (source_bytes > 0 && reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    fail("cp.async of what is not aligned");
  }
  self->copies.push_back({shared, static_cast<const char*>(global), bytes, source_bytes});
}
void cp_async_commit() {
  self->copy_groups.push_back(self->copies);
  self->copies.clear();
}
void finish_copies(const std::vector<AsyncCopy>& copies, const void* code) {
  for (const AsyncCopy& c : copies) {
    char values[16] = {};
    if (c.source_bytes > 0) copy(values, c.global, size_t(c.source_bytes), code);
    copy(at(c.shared), values, size_t(c.bytes), code);
  }
}
void cp_async_wait(int pending) {
  while (self->copy_groups.size() > size_t(pending)) {
    finish_copies(self->copy_groups[0], __builtin_return_address(0));
    self->copy_groups.erase(self->copy_groups.begin());
  }
}
void cp_async_arrive(uint64_t& barrier) {
  cp_async_commit();
  while (!self->copy_groups.empty()) {
    finish_copies(self->copy_groups[0], __builtin_return_address(0));
    self->copy_groups.erase(self->copy_groups.begin());
  }
  mbarrier_arrive(barrier, 1, 0);
}

void wgmma(const Product& product) {
  const void* code = __builtin_return_address(0);
  maybe_let_others();
  Warp& warp = warps[self->warp];
  Collective& all = warp.product;
  const unsigned generation = all.generation;
  all.values[0][view->lane] = reinterpret_cast<uint64_t>(&product);
  if (++all.count < 32) {
    all.waiting.push_back(self);
    self->waits_for = "wgmma";
    while (all.generation == generation) block();
    return;
  }
  const Product* of_lanes[32];
  Thread* lanes_of_warp = &threads[self->index / 32 * 32];
  int agent = lanes_of_warp[0].product_agent;
  if (agent < 0) {
    agent = new_agent(self->warp * kProductAgents + warp.next_agent, self->clocks);
    warp.next_agent = (warp.next_agent + 1) % kProductAgents;
  }
  for (int lane = 0; lane < 32; ++lane) {
    of_lanes[lane] = reinterpret_cast<const Product*>(all.values[0][lane]);
    const Product &p = *of_lanes[lane], &first = *of_lanes[0];
    if (p.a != first.a || p.b != first.b || p.blocks != first.blocks) {
      fail("a warp's lanes give a product different operands");
    }
    Thread& thread = lanes_of_warp[lane];
    join(agent_clocks[agent - num_threads], thread.clocks);
    ++thread.clocks[thread.index];
    thread.product_agent = agent;
  }
  act(agent, self, [&] { multiply(of_lanes, self->warp % 4 * 16, code); });
  all.count = 0;
  ++all.generation;
  wake_all(all.waiting);
}
void wgmma_commit() {
  exchange(6, ~0u, 0);  // products of all lanes are behind
  self->product_groups.push_back(self->product_agent >= 0 ? now_of(self->product_agent)
                                                          : AgentTime{self->index, 0});
  self->product_agent = -1;
  exchange(7, ~0u, 0);
}
void wgmma_wait(int pending) {
  maybe_let_others();
  while (self->product_groups.size() > size_t(pending)) {
    learn(self->product_groups[0]);
    self->product_groups.erase(self->product_groups.begin());
  }
}

void stmatrix(uint32_t shared, const uint32_t (&r)[4]) {
  const void* code = __builtin_return_address(0);
  if (shared % 16 != 0) fail("stmatrix that is not aligned");
  uint64_t pairs[2][32];
  for (int half = 0; half < 2; ++half) {
    const uint64_t own = r[2 * half] | uint64_t(r[2 * half + 1]) << 32;
    __real_memcpy(pairs[half], exchange(8 + half, ~0u, own), sizeof pairs[half]);
  }
  // This lane writes the row that it names: 4 words, of the lanes that hold them.
  const int matrix = view->lane / 8, row = view->lane % 8;
  uint32_t words[4];
  for (int c = 0; c < 4; ++c) {
    words[c] = uint32_t(pairs[matrix / 2][row * 4 + c] >> 32 * (matrix % 2));
  }
  copy(at(shared), reinterpret_cast<const char*>(words), sizeof words, code);
}

void ldmatrix(uint32_t (&r)[4], uint32_t shared, bool is_transposed) {
  const void* code = __builtin_return_address(0);
  if (shared % 16 != 0) fail("ldmatrix that is not aligned");
  // This lane reads the row that it names, of matrix lane / 8.
  uint64_t own[2], pairs[2][32];
  copy(reinterpret_cast<char*>(own), at(shared), sizeof own, code);
  for (int half = 0; half < 2; ++half) {
    __real_memcpy(pairs[half], exchange(10 + half, ~0u, own[half]), sizeof pairs[half]);
  }
  const auto element = [&](int matrix, int row, int column) {
    const uint64_t four = pairs[column / 4][matrix * 8 + row];
    return uint32_t(four >> 16 * (column % 4) & 0xffff);
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int row = view->lane / 4, column = view->lane % 4 * 2;
    r[matrix] = is_transposed
                    ? element(matrix, column, row) | element(matrix, column + 1, row) << 16
                    : element(matrix, row, column) | element(matrix, row, column + 1) << 16;
  }
}

void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool is_bf16) {
  uint64_t pairs[3][32];
  const uint64_t own[3] = {a[0] | uint64_t(a[1]) << 32, a[2] | uint64_t(a[3]) << 32,
                           b0 | uint64_t(b1) << 32};
  for (int i = 0; i < 3; ++i) {
    __real_memcpy(pairs[i], exchange(12 + i, ~0u, own[i]), sizeof pairs[i]);
  }
  const auto value = [&](uint64_t pair, int word, int half) {
    const uint16_t bits_of = uint16_t(pair >> (32 * word + 16 * half));
    return is_bf16 ? float(bits<__nv_bfloat16>(bits_of)) : float(bits<__half>(bits_of));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = view->lane / 4 + i / 2 * 8, column = view->lane % 4 * 2 + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int lane_a = row % 8 * 4 + k % 8 / 2, lane_b = column * 4 + k % 8 / 2;
      sum += value(pairs[k / 8][lane_a], row / 8, k % 2) * value(pairs[2][lane_b], k / 8, k % 2);
    }
    c[i] = sum;
  }
}

}  // namespace lanes

unsigned long long atomicAdd(unsigned long long* counter, unsigned long long count) {
  const unsigned long long before = *counter;
  *counter += count;
  return before;
}

int atomicAdd(int* counter, int count) {
  const int before = *counter;
  *counter += count;
  return before;
}

// --- What -fsanitize=thread calls at each access

#define LANES_ACCESS(name, bytes, writes)                               \
  extern "C" void __tsan_##name(void* pointer) {                        \
    lanes::access(pointer, bytes, writes, __builtin_return_address(0)); \
  }
#define LANES_ACCESSES(bytes)                       \
  LANES_ACCESS(read##bytes, bytes, false)           \
  LANES_ACCESS(write##bytes, bytes, true)           \
  LANES_ACCESS(unaligned_read##bytes, bytes, false) \
  LANES_ACCESS(unaligned_write##bytes, bytes, true)
LANES_ACCESSES(1)
LANES_ACCESSES(2)
LANES_ACCESSES(4)
LANES_ACCESSES(8)
LANES_ACCESSES(16)
extern "C" {
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_read_range(void* pointer, unsigned long bytes) {
  lanes::access(pointer, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, unsigned long bytes) {
  lanes::access(pointer, bytes, true, __builtin_return_address(0));
}
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  lanes::access(from, bytes, false, __builtin_return_address(0));
  lanes::access(to, bytes, true, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
void* __real_memset(void*, int, size_t);
void* __wrap_memset(void* to, int value, size_t bytes) {
  lanes::access(to, bytes, true, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}
// clang++'s names for these
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  return __wrap_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) { return __wrap_memset(to, value, bytes); }
}
