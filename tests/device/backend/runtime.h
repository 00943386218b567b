// Runtime of the asynchronous software device: streams, events, memory, a seeded scheduler and the happens-before checker.
//
// A stream is a queue. The host puts work into it; the scheduler runs that later, one task at a time, of a stream that
// the seed chooses among those that may go on. It takes turns whenever the host calls the device: a few that the seed
// draws, and at a wait as many as it needs. So the same calls of the host lead to the same order of work.
// The checker works when work is *enqueued*: every stream and every host thread has a vector clock, every piece of
// memory remembers its last writer and its readers since. A read or write that no event orders behind them is reported,
// however lucky the order was. Late work, copies that land in pieces and poison in freed memory are the second net: they
// make a missing wait visible in the bytes.
//
// No torch here; backend.cpp ties this to PyTorch.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace software {

using Clock = std::vector<uint64_t>;  // by global number of a stream: how many of its tasks happened before

struct Access {
  uintptr_t begin, end;
  bool write;
};

struct Recording;  // one recording of an event
using RecordingP = std::shared_ptr<Recording>;
using Task = std::function<void()>;

int device_count();
void set_device_count(int count);
int64_t new_stream(int device);  // from a pool of 32, round robin, as CUDA; 0 is the default stream

// Puts a task at the end of a stream; the detector compares its accesses at once, in program order.
void enqueue(int device, int64_t stream, const char* what, const std::vector<Access>& accesses, Task task);
size_t piece();  // bytes of the next piece of a copy
void breathe();  // between two pieces: other streams may take turns
std::function<void()> hold(int device, int64_t stream);  // the stream goes no further until the function is called
void wait_until(int device, int64_t stream, std::function<bool()> ready);  // the stream goes no further before
RecordingP record(int device, int64_t stream);
void wait(int device, int64_t stream, const RecordingP& recording);
bool query(const RecordingP& recording);  // orders nothing for the checker: code that polls must not rely on luck
void synchronize(const RecordingP& recording);
double milliseconds(const RecordingP& from, const RecordingP& to);  // throws if one is not done, as CUDA does
void synchronize_stream(int device, int64_t stream);
bool query_stream(int device, int64_t stream);
void synchronize_device(int device);
void throw_pending();  // an error that a task met is thrown at the next synchronisation

void* allocate(int device, int64_t stream, size_t bytes);  // null: out of memory
void release(void* pointer);
void record_use(void* pointer, int device, int64_t stream);
void* shadow(const void* device_pointer);  // where tasks find what stands at a device address
int device_of(const void* pointer);        // -1: host memory
std::pair<int64_t, int64_t> allocated_bytes(int device);  // now, and at most since reset_peak
void reset_peak(int device);

void* pin_allocate(size_t bytes);
void pin_release(void* pointer);
void pin_record_use(void* pointer, int device, int64_t stream);
int host_register(uintptr_t pointer, size_t bytes);  // 0; 712 if a part of it is registered already
int host_unregister(uintptr_t pointer);              // 0; 713 if it is not registered
bool is_pinned(const void* pointer, size_t bytes);

void host_access(uintptr_t pointer, size_t bytes, bool write, const char* what);  // a test says what the host does

void host_join();  // a test says: this thread waited for what all other threads of the host did

struct Options {
  uint64_t seed = 0;
  int failing_allocation = 0;  // the n-th allocation from now on finds no memory; 0: none
  bool has_streams = true;     // false: as a device without streams, of which torch.Stream cannot be made
  uint64_t dies_at = 0;        // the turn of the scheduler at which SIGKILL ends this process; 0: none
  int report_to = -1;          // a file that gets each report of the checker at once, for processes that are killed
};
void configure(const Options& options);
Options options();
std::vector<std::string> take_races();
std::vector<std::pair<std::string, uint64_t>> counters();
void count(const char* what);
uint64_t synchronisations();  // how often this thread waited for the device so far
bool forked();
void run_clean(const Task& task);  // defined beside torch: without what the calling thread has set for itself
}  // namespace software
