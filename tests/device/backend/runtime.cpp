#include "runtime.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>

namespace software {
namespace {

constexpr int kPool = 32;
constexpr int kPerDevice = kPool + 1;
constexpr size_t kArena = size_t{16} << 30;  // address space only
constexpr size_t kGrain = 512;

using Steady = std::chrono::steady_clock;

struct Item {
  Task task;                     // or
  RecordingP until;              // go no further before this is done; or
  std::function<bool()> ready;  // before this is true
};

struct Stream {
  int number;
  std::deque<Item> items;
  bool is_running = false;  // in the middle of a task, which breathes
  Clock clock;
};

struct Epoch {
  int stream = -1;
  uint64_t tick = 0;
  std::string what;
};

struct Segment {
  uintptr_t end;
  Epoch writer;
  std::vector<Epoch> readers;
};

struct Block {
  void* pointer;
  size_t bytes;
  int device;
  int64_t stream;
  std::vector<std::pair<int, int64_t>> uses;
};

struct Waiting {
  Block block;
  std::vector<RecordingP> until;
};

struct State {
  std::recursive_mutex mutex;  // all that follows, and every task of a stream
  std::condition_variable_any change;  // a recording is done
  int devices = 1;
  std::map<int, std::unique_ptr<Stream>> streams;
  std::vector<int64_t> next_stream = std::vector<int64_t>(8, 0);
  std::map<int, Clock> hosts;  // by thread
  int threads = 0;
  std::map<uintptr_t, Segment> history;
  std::vector<std::string> races;
  std::map<std::string, uint64_t> counters;
  Options options;
  std::vector<std::pair<char*, char*>> arenas = std::vector<std::pair<char*, char*>>(8);  // guarded, shadow
  std::vector<size_t> used = std::vector<size_t>(8, 0);
  std::vector<std::pair<int64_t, int64_t>> allocated = std::vector<std::pair<int64_t, int64_t>>(8);  // now, peak
  std::map<void*, Block> live;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, void*>> free;
  std::deque<Waiting> waiting;
  std::map<uintptr_t, size_t> pinned;
  std::map<void*, std::pair<size_t, std::vector<RecordingP>>> pin_blocks;
  std::deque<std::pair<void*, std::pair<size_t, std::vector<RecordingP>>>> pin_waiting;
  std::string error;
  // The scheduler.
  uint64_t dice = 1;
  uint64_t calls = 0;         // of the host, since the seed was set
  uint64_t turns = 0;
  uint64_t order = 0;         // a digest of which streams took turns
  int eagerness = 0;          // of 16: how far the device follows the host at each call; drawn anew now and then
  uint64_t lag = 0;           // streams that are passed over while others can go on, by bits
  long driver = 0;            // thread of the host that enqueued last
};

State& state() {
  static State* made = new State;  // leaked: threads may still run at exit
  return *made;
}

using Guard = std::lock_guard<std::recursive_mutex>;
std::atomic<bool> is_forked{false};
thread_local uint64_t waits_of_this_thread = 0;

// As with CUDA, what was forked before the device was used may use it.
struct AtFork {
  AtFork() {
    pthread_atfork(nullptr, nullptr, [] { is_forked = !state().streams.empty(); });
  }
} at_fork;

// What a thread of the host knows to be done. Another thread that waited does not order what this one enqueues.
Clock& host() {
  thread_local const int mine = ++state().threads;
  return state().hosts[mine];
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

uint64_t at(const Clock& clock, int index) { return size_t(index) < clock.size() ? clock[index] : 0; }

int number_of(int device, int64_t stream) { return device * kPerDevice + int(stream); }

Stream& stream_of(int device, int64_t id) {
  if (is_forked) throw std::runtime_error("software device: a forked process cannot use the device");
  State& s = state();
  if (device < 0 || device >= s.devices || id < 0 || id > kPool) throw std::runtime_error("software device: no such stream");
  auto& found = s.streams[number_of(device, id)];
  if (!found) {
    found = std::make_unique<Stream>();
    found->number = number_of(device, id);
  }
  return *found;
}

// ------------------------------------------------------------------ the scheduler

uint64_t draw() {
  uint64_t z = (state().dice += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

long this_thread() { return syscall(SYS_gettid); }  // another one behind a fork

bool is_done(const RecordingP& recording);

bool can_go_on(const Stream& stream) {
  if (stream.is_running || stream.items.empty()) return false;
  const Item& next = stream.items.front();
  return next.ready ? next.ready() : !next.until || is_done(next.until);
}

// One stream that can go on does one thing. False if none can.
bool turn() {
  State& s = state();
  std::vector<Stream*> able, prompt;
  for (auto& [number, stream] : s.streams) {
    if (!can_go_on(*stream)) continue;
    able.push_back(stream.get());
    if (!(s.lag >> (number % 64) & 1)) prompt.push_back(stream.get());
  }
  if (able.empty()) return false;
  const auto& among = prompt.empty() ? able : prompt;
  Stream& chosen = *among[draw() % among.size()];
  s.order = (s.order ^ uint64_t(chosen.number + 1)) * 0x100000001B3ull;
  if (++s.turns == s.options.dies_at) {
    if (s.options.report_to >= 0)
      dprintf(s.options.report_to, "{\"turns\": %lu, \"order\": %lu}\n", (unsigned long)s.turns, (unsigned long)s.order);
    kill(getpid(), SIGKILL);
  }
  Item item = std::move(chosen.items.front());
  chosen.items.pop_front();
  if (!item.task) return true;
  chosen.is_running = true;
  try {
    run_clean(item.task);
  } catch (const std::exception& error) {
    if (s.error.empty()) s.error = error.what();
  } catch (...) {
    if (s.error.empty()) s.error = "an unknown error";
  }
  chosen.is_running = false;
  return true;
}

// The host made a call: the device follows it, more or less.
void follow() {
  State& s = state();
  s.driver = this_thread();
  if (s.calls++ % 64 == 0) {
    static const int kinds[] = {0, 1, 4, 15};  // far behind the host, to nearly with it
    s.eagerness = kinds[draw() % 4];
    s.lag = draw() & draw();
  }
  for (int done = 0; done < 8 && int(draw() % 16) < s.eagerness; ++done)
    if (!turn()) return;
}

void push(Stream& stream, Item item) {
  stream.items.push_back(std::move(item));
  follow();
}

// True if no other thread of this process runs: all wait for something.
bool others_sleep() {
  DIR* tasks = opendir("/proc/self/task");
  if (!tasks) return true;
  bool all = true;
  while (const dirent* entry = readdir(tasks)) {
    const long number = atol(entry->d_name);
    if (number <= 0 || number == this_thread()) continue;
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", number);
    FILE* file = fopen(path, "r");
    if (!file) continue;  // it has ended
    const size_t read = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[read] = 0;
    const char* behind = strrchr(text, ')');  // of its name
    if (behind && behind[1] && behind[2] != 'S') all = false;
  }
  closedir(tasks);
  return all;
}

// ------------------------------------------------------------------ the detector

std::string name_of(int number) {
  if (number < 0) return "host";
  return "stream " + std::to_string(number / kPerDevice) + "/" + std::to_string(number % kPerDevice);
}

void report(const char* kind, const Epoch& before, int stream, const char* what, uintptr_t begin, uintptr_t end) {
  State& s = state();
  std::string text = std::string(kind) + ": " + what + " on " + name_of(stream) + " is not ordered behind " +
                     before.what + " on " + name_of(before.stream) + " (" + std::to_string(end - begin) + " bytes)";
  s.counters["races"]++;
  if (s.races.size() < 1000) s.races.push_back(text);
  if (s.options.report_to >= 0) dprintf(s.options.report_to, "%s\n", text.c_str());
}

void split(uintptr_t where) {
  auto& history = state().history;
  auto it = history.upper_bound(where);
  if (it == history.begin()) return;
  --it;
  if (it->first == where || it->second.end <= where) return;
  Segment rest = it->second;
  it->second.end = where;
  history.emplace(where, std::move(rest));
}

void forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  auto& history = state().history;
  history.erase(history.lower_bound(begin), history.lower_bound(end));
}

bool is_tracked(uintptr_t begin, uintptr_t end) {
  return device_of(reinterpret_cast<void*>(begin)) >= 0 || is_pinned(reinterpret_cast<void*>(begin), end - begin);
}

void look(const Access& access, int stream, const Clock& clock, uint64_t tick, const char* what) {
  if (access.begin >= access.end || !is_tracked(access.begin, access.end)) return;
  auto& history = state().history;
  split(access.begin);
  split(access.end);
  Epoch mine{stream, tick, what};
  bool is_reported = false;
  auto complain = [&](const char* kind, const Epoch& other, uintptr_t begin, uintptr_t end) {
    if (!is_reported) report(kind, other, stream, what, begin, end);
    is_reported = true;
  };
  uintptr_t place = access.begin;
  auto it = history.lower_bound(access.begin);
  while (place < access.end) {
    if (it == history.end() || it->first > place) {  // never touched
      const uintptr_t end = it == history.end() ? access.end : std::min(access.end, it->first);
      Segment fresh{end, {}, {}};
      it = history.emplace_hint(it, place, std::move(fresh));
    }
    Segment& segment = it->second;
    if (segment.writer.stream >= 0 && segment.writer.tick > at(clock, segment.writer.stream))
      complain(access.write ? "write after write" : "read after write", segment.writer, it->first, segment.end);
    if (access.write) {
      for (const Epoch& reader : segment.readers)
        if (reader.tick > at(clock, reader.stream)) complain("write after read", reader, it->first, segment.end);
      segment.writer = mine;
      segment.readers.clear();
    } else if (stream >= 0) {
      auto same = std::find_if(segment.readers.begin(), segment.readers.end(),
                               [&](const Epoch& reader) { return reader.stream == stream; });
      if (same == segment.readers.end()) segment.readers.push_back(mine);
      else *same = mine;
    }
    place = segment.end;
    ++it;
  }
}

bool is_done(const std::vector<RecordingP>& all);

}  // namespace

// ------------------------------------------------------------------ streams and events

struct Recording {
  bool done = false;
  Steady::time_point time;
  Clock clock;
};

namespace {
bool is_done(const RecordingP& recording) { return recording->done; }

void finish(const RecordingP& recording) {
  recording->time = Steady::now();
  recording->done = true;
  state().change.notify_all();
}

// Lets the device work until the recording is done. The thread that works with the device does so at once; any other
// (a thread that copies beside training) only while nothing else in this process runs: so the order is not the
// operating system's. It does not wait for a thread that never rests. A stream that is held is waited for.
void drive(const RecordingP& recording) {
  State& s = state();
  std::unique_lock<std::recursive_mutex> lock(s.mutex);
  const auto patient_until = Steady::now() + std::chrono::seconds(1);
  while (!recording->done) {
    bool is_mine = s.driver == this_thread() || Steady::now() > patient_until;
    for (int looks = 0; !is_mine && looks < 2; ++looks) {
      const uint64_t calls = s.calls, turns = s.turns;
      s.change.wait_for(lock, std::chrono::microseconds(100));
      if (recording->done) return;
      lock.unlock();
      const bool is_quiet = others_sleep();
      lock.lock();
      if (!is_quiet || s.calls != calls || s.turns != turns) looks = -1;
      is_mine = looks == 1 || Steady::now() > patient_until;
    }
    const uint64_t calls = s.calls;
    while (!recording->done && s.calls == calls && turn()) {
    }
    if (!recording->done) s.change.wait_for(lock, std::chrono::microseconds(200));
  }
}
}  // namespace

size_t piece() { return size_t{1024} << (draw() % 7); }

void breathe() {
  for (int done = 0; done < 4 && draw() % 4 == 0; ++done)
    if (!turn()) return;
}

std::function<void()> hold(int device, int64_t id) {
  Guard guard(state().mutex);
  auto open = std::make_shared<Recording>();
  push(stream_of(device, id), {nullptr, open, nullptr});
  return [open] {
    Guard guard(state().mutex);
    finish(open);
  };
}

int device_count() { return state().devices; }
void set_device_count(int count) { state().devices = std::min(std::max(count, 0), 8); }
bool forked() { return is_forked; }

int64_t new_stream(int device) {
  Guard guard(state().mutex);
  return 1 + state().next_stream[device]++ % kPool;
}

void enqueue(int device, int64_t id, const char* what, const std::vector<Access>& accesses, Task task) {
  Guard guard(state().mutex);
  Stream& stream = stream_of(device, id);
  {
    join(stream.clock, host());
    if (stream.clock.size() <= size_t(stream.number)) stream.clock.resize(stream.number + 1);
    const uint64_t tick = ++stream.clock[stream.number];
    for (const Access& access : accesses)
      if (!access.write) look(access, stream.number, stream.clock, tick, what);
    for (const Access& access : accesses)
      if (access.write) look(access, stream.number, stream.clock, tick, what);
  }
  push(stream, {std::move(task), nullptr, nullptr});
}

void wait_until(int device, int64_t id, std::function<bool()> ready) {
  Guard guard(state().mutex);
  push(stream_of(device, id), {nullptr, nullptr, std::move(ready)});
}

RecordingP record(int device, int64_t id) {
  Guard guard(state().mutex);
  Stream& stream = stream_of(device, id);
  auto made = std::make_shared<Recording>();
  join(stream.clock, host());
  made->clock = stream.clock;
  push(stream, {[made] { finish(made); }, nullptr, nullptr});
  return made;
}

void wait(int device, int64_t id, const RecordingP& recording) {
  if (!recording) return;
  Guard guard(state().mutex);
  Stream& stream = stream_of(device, id);
  join(stream.clock, recording->clock);
  push(stream, {nullptr, recording, nullptr});
}

void throw_pending() {
  Guard guard(state().mutex);
  if (state().error.empty()) return;
  std::string text = "software device: a task failed: " + state().error;
  state().error.clear();
  throw std::runtime_error(text);
}

bool query(const RecordingP& recording) {
  if (!recording) return true;
  Guard guard(state().mutex);
  if (!recording->done) turn();  // who polls does so until it is done
  return recording->done;
}

void synchronize(const RecordingP& recording) {
  if (!recording) return;
  ++waits_of_this_thread;
  drive(recording);
  {
    Guard guard(state().mutex);
    join(host(), recording->clock);
  }
  throw_pending();
}

double milliseconds(const RecordingP& from, const RecordingP& to) {
  Guard guard(state().mutex);
  if (!from || !to || !from->done || !to->done) throw std::runtime_error("software device: an event is not done");
  return std::chrono::duration<double, std::milli>(to->time - from->time).count();
}

void synchronize_stream(int device, int64_t id) {
  count("stream synchronisations");
  synchronize(record(device, id));
}

bool query_stream(int device, int64_t id) {
  auto made = record(device, id);
  return query(made);
}

void synchronize_device(int device) {
  std::vector<RecordingP> all;
  {
    Guard guard(state().mutex);
    for (auto& [number, stream] : state().streams)
      if (number / kPerDevice == device) all.push_back(record(device, number % kPerDevice));
  }
  for (auto& one : all) synchronize(one);
}

// ------------------------------------------------------------------ device memory

namespace {
bool is_done(const std::vector<RecordingP>& all) {
  return std::all_of(all.begin(), all.end(), [](const RecordingP& one) { return one->done; });
}

void reuse(const Block& block) {
  State& s = state();
  {
    void* where = shadow(block.pointer);
    const size_t bytes = block.bytes;
    const auto begin = reinterpret_cast<uintptr_t>(block.pointer);
    enqueue(block.device, block.stream, "poison of freed memory", {{begin, begin + bytes, true}},
            [where, bytes]() { memset(where, 0xDB, bytes); });
  }
  s.free[{block.device, block.stream}].emplace(block.bytes, block.pointer);
}

void collect() {
  State& s = state();
  for (size_t left = s.waiting.size(); left > 0; --left) {
    Waiting one = std::move(s.waiting.front());
    s.waiting.pop_front();
    if (is_done(one.until)) {
      // The allocator saw that the other streams are done: nothing that comes can meet what they did.
      const auto begin = reinterpret_cast<uintptr_t>(one.block.pointer);
      forget(begin, begin + one.block.bytes);
      reuse(one.block);
    } else {
      s.waiting.push_back(std::move(one));
    }
  }
}
}  // namespace

void* allocate(int device, int64_t stream, size_t bytes) {
  if (!bytes) return nullptr;
  Guard guard(state().mutex);
  State& s = state();
  if (is_forked) throw std::runtime_error("software device: a forked process cannot use the device");
  collect();
  if (s.options.failing_allocation && --s.options.failing_allocation == 0)
    return nullptr;
  bytes = (bytes + kGrain - 1) / kGrain * kGrain;
  auto& shelf = s.free[{device, stream}];
  auto found = shelf.lower_bound(bytes);
  void* pointer;
  if (found != shelf.end() && found->first <= 2 * bytes) {
    bytes = found->first;
    pointer = found->second;
    shelf.erase(found);
    s.counters["blocks reused"]++;
  } else {
    auto& [guarded, shown] = s.arenas[device];
    if (!guarded) {
      // Device addresses are reserved and never mapped: a host that follows one dies of SIGSEGV there.
      auto map = [](int protection) {
        void* at = mmap(nullptr, kArena, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::runtime_error("software device: no address space");
        return static_cast<char*>(at);
      };
      guarded = map(PROT_NONE);
      shown = map(PROT_READ | PROT_WRITE);
    }
    if (s.used[device] + bytes > kArena) return nullptr;
    pointer = guarded + s.used[device];
    s.used[device] += bytes;
  }
  s.live[pointer] = Block{pointer, bytes, device, stream, {}};
  auto& [now, peak] = s.allocated[device];
  now += int64_t(bytes);
  peak = std::max(peak, now);
  return pointer;
}

std::pair<int64_t, int64_t> allocated_bytes(int device) {
  Guard guard(state().mutex);
  return state().allocated[device];
}

void reset_peak(int device) {
  Guard guard(state().mutex);
  auto& [now, peak] = state().allocated[device];
  peak = now;
}

void release(void* pointer) {
  if (!pointer || is_forked) return;
  Guard guard(state().mutex);
  State& s = state();
  auto found = s.live.find(pointer);
  if (found == s.live.end()) return;
  Block block = std::move(found->second);
  s.live.erase(found);
  s.allocated[block.device].first -= int64_t(block.bytes);
  {
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    Clock clock = stream_of(block.device, block.stream).clock;
    join(clock, host());
    for (auto it = s.history.lower_bound(begin); it != s.history.end() && it->first < begin + block.bytes; ++it) {
      auto check = [&](const Epoch& epoch) {
        const bool is_recorded = std::any_of(block.uses.begin(), block.uses.end(), [&](const auto& use) {
          return number_of(use.first, use.second) == epoch.stream;
        });
        if (epoch.stream >= 0 && !is_recorded && epoch.tick > at(clock, epoch.stream))
          report("freed without record_stream", epoch, number_of(block.device, block.stream), "the end of memory",
                 it->first, it->second.end);
      };
      check(it->second.writer);
      for (const Epoch& reader : it->second.readers) check(reader);
    }
  }
  std::vector<RecordingP> until;
  for (auto& use : block.uses) until.push_back(record(use.first, use.second));
  if (until.empty()) reuse(block);
  else s.waiting.push_back({std::move(block), std::move(until)});
}

void record_use(void* pointer, int device, int64_t stream) {
  Guard guard(state().mutex);
  auto& live = state().live;
  auto found = live.upper_bound(pointer);
  if (found == live.begin()) return;
  Block& block = std::prev(found)->second;
  const std::pair<int, int64_t> use{device, stream};
  if (use == std::make_pair(block.device, block.stream)) return;
  if (std::find(block.uses.begin(), block.uses.end(), use) == block.uses.end()) block.uses.push_back(use);
}

int device_of(const void* pointer) {
  State& s = state();
  for (int device = 0; device < s.devices; ++device) {
    const char* base = s.arenas[device].first;
    if (base && pointer >= base && pointer < base + kArena) return device;
  }
  return -1;
}

void* shadow(const void* pointer) {
  const int device = device_of(pointer);
  if (device < 0) return const_cast<void*>(pointer);
  auto& [guarded, shown] = state().arenas[device];
  return shown + (static_cast<const char*>(pointer) - guarded);
}

// ------------------------------------------------------------------ host memory

void* pin_allocate(size_t bytes) {
  Guard guard(state().mutex);
  State& s = state();
  for (size_t left = s.pin_waiting.size(); left > 0; --left) {
    auto one = std::move(s.pin_waiting.front());
    s.pin_waiting.pop_front();
    if (is_done(one.second.second)) free(one.first);
    else s.pin_waiting.push_back(std::move(one));
  }
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 4096, std::max<size_t>(bytes, 1))) throw std::bad_alloc();
  s.pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  s.pin_blocks[pointer] = {bytes, {}};
  return pointer;
}

void pin_release(void* pointer) {
  if (!pointer) return;
  if (is_forked) return free(pointer);
  Guard guard(state().mutex);
  State& s = state();
  auto found = s.pin_blocks.find(pointer);
  if (found == s.pin_blocks.end()) return;
  auto block = std::move(found->second);
  s.pin_blocks.erase(found);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  s.pinned.erase(begin);
  forget(begin, begin + block.first);
  if (is_done(block.second)) free(pointer);
  else s.pin_waiting.emplace_back(pointer, std::move(block));
}

void pin_record_use(void* pointer, int device, int64_t stream) {
  Guard guard(state().mutex);
  auto& blocks = state().pin_blocks;
  auto found = blocks.upper_bound(pointer);
  if (found == blocks.begin()) return;
  --found;
  if (static_cast<char*>(found->first) + found->second.first <= pointer) return;  // registered, not allocated here
  found->second.second.push_back(record(device, stream));
}

int host_register(uintptr_t pointer, size_t bytes) {
  Guard guard(state().mutex);
  auto& pinned = state().pinned;
  auto next = pinned.lower_bound(pointer);
  if (next != pinned.end() && next->first < pointer + bytes) return 712;
  if (next != pinned.begin() && std::prev(next)->first + std::prev(next)->second > pointer) return 712;
  pinned[pointer] = bytes;
  state().counters["registrations"]++;
  return 0;
}

int host_unregister(uintptr_t pointer) {
  Guard guard(state().mutex);
  auto& pinned = state().pinned;
  auto found = pinned.find(pointer);
  if (found == pinned.end()) return 713;
  // As with CUDA, nobody waits here; memory that a stream still writes is a race of the host.
  const size_t bytes = found->second;
  host_access(pointer, bytes, true, "unregistration");
  forget(pointer, pointer + bytes);
  pinned.erase(found);
  return 0;
}

bool is_pinned(const void* pointer, size_t bytes) {
  Guard guard(state().mutex);
  auto& pinned = state().pinned;
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  auto next = pinned.upper_bound(begin);
  if (next == pinned.begin()) return false;
  --next;
  return begin + std::max<size_t>(bytes, 1) <= next->first + next->second;
}

void host_access(uintptr_t pointer, size_t bytes, bool write, const char* what) {
  Guard guard(state().mutex);
  State& s = state();
  // The host has no tick of its own: what it enqueues later is behind what it did.
  Access access{pointer, pointer + bytes, write};
  if (!is_tracked(access.begin, access.end)) return;
  split(access.begin);
  split(access.end);
  for (auto it = s.history.lower_bound(access.begin); it != s.history.end() && it->first < access.end; ++it) {
    Segment& segment = it->second;
    if (segment.writer.stream >= 0 && segment.writer.tick > at(host(), segment.writer.stream))
      return report(write ? "write after write" : "read after write", segment.writer, -1, what, it->first, segment.end);
    for (const Epoch& reader : segment.readers)
      if (write && reader.tick > at(host(), reader.stream))
        return report("write after read", reader, -1, what, it->first, segment.end);
  }
}

void host_join() {
  Guard guard(state().mutex);
  for (auto& [thread, clock] : state().hosts) join(host(), clock);
}

// ------------------------------------------------------------------ the rest

void configure(const Options& options) {
  Guard guard(state().mutex);
  State& s = state();
  s.options = options;
  s.dice = options.seed * 1000003 + 1;
  s.calls = s.turns = s.order = 0;
}
Options options() {
  Guard guard(state().mutex);
  return state().options;
}

std::vector<std::string> take_races() {
  Guard guard(state().mutex);
  return std::exchange(state().races, {});
}

void count(const char* what) {
  Guard guard(state().mutex);
  state().counters[what]++;
}

uint64_t synchronisations() { return waits_of_this_thread; }

std::vector<std::pair<std::string, uint64_t>> counters() {
  Guard guard(state().mutex);
  state().counters["turns"] = state().turns;
  state().counters["order"] = state().order;
  return {state().counters.begin(), state().counters.end()};
}
}  // namespace software
