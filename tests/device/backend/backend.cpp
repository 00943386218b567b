// The device for torch: guard, hooks, allocators, copies, and a boxed fallback that runs CPU kernels on streams.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "runtime.h"

namespace software {

void run_clean(const Task& task) {
  static const at::ThreadLocalState clean;
  const at::ThreadLocalStateGuard guard(clean);
  task();
}

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
constexpr auto kType = DeviceType::PrivateUse1;

thread_local DeviceIndex current = 0;
thread_local int64_t current_streams[8] = {};

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }
Stream stream_object(DeviceIndex device, int64_t id) { return Stream(Stream::UNSAFE, Device(kType, device), id); }

// ------------------------------------------------------------------ guard: devices, streams, events

struct Event {
  RecordingP last;
  DeviceIndex device = 0;
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kType;
  GuardImpl() = default;
  explicit GuardImpl(DeviceType) {}
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const auto old = current;
    current = index_of(device);
    return Device(kType, old);
  }
  Device getDevice() const override { return Device(kType, current); }
  void setDevice(Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  Stream getStream(Device device) const override {
    const auto index = index_of(device);
    return stream_object(index, current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_object(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    TORCH_CHECK(options().has_streams, "the software device has no streams now");
    const auto index = index_of(device);
    return stream_object(index, new_stream(index));
  }
  Stream exchangeStream(Stream stream) const override {
    const auto index = stream.device_index();
    return stream_object(index, std::exchange(current_streams[index], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->device = stream.device_index();
    static_cast<Event*>(*event)->last = software::record(stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) software::wait(stream.device_index(), stream.id(), static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override { return !event || query(static_cast<Event*>(event)->last); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count("waits for an event");
    // CUDA makes a context on the current device, which takes memory there.
    if (static_cast<Event*>(event)->device != current) count("waits on another device than the event's");
    synchronize(static_cast<Event*>(event)->last);
  }
  bool queryStream(const Stream& stream) const override { return query_stream(stream.device_index(), stream.id()); }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(stream.device_index(), stream.id()); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device < 0 ? current : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_use(data.get(), stream.device_index(), stream.id());
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(from && to, "both events must be recorded");
    return milliseconds(static_cast<Event*>(from)->last, static_cast<Event*>(to)->last);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

// ------------------------------------------------------------------ allocators

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = software::allocate(current, current_streams[current], bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, at || !bytes, "the software device has no ", bytes, " bytes left");
    return {at, at, &release, Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    synchronize_device(current);
    memcpy(shadow(target), shadow(source), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    record_use(data.get(), stream.device_index(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats made;
    const auto [now, peak] = allocated_bytes(device);
    auto& stat = made.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    stat.current = now, stat.peak = peak;
    return made;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peak(device); }
} device_memory;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &device_memory);

struct HostMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = pin_allocate(bytes);
    return {at, at, &pin_release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pin_release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
  bool record_event(void* pointer, void*, Stream stream) override {
    pin_record_use(pointer, stream.device_index(), stream.id());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} host_memory;
REGISTER_HOST_ALLOCATOR(DeviceType::PrivateUse1, &host_memory);

// ------------------------------------------------------------------ random numbers: seed and number of the draw

struct Dice final : c10::GeneratorImpl {
  explicit Dice(DeviceIndex device) : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& from) override {
    const auto* words = static_cast<const uint64_t*>(from.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto made = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(made.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return made.getIntrusivePtr();
  }
  // The seed of one kernel, drawn when it is enqueued.
  uint64_t draw() { return seed_ * 0x9E3779B97F4A7C15ull + ++offset_ * 0xD1B54A32D192ED03ull; }

 private:
  Dice* clone_impl() const override {
    auto* made = new Dice(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < 8; ++i) made.push_back(at::make_generator<Dice>(i));
    return made;
  }();
  return all[device < 0 ? current : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return device < 0 ? current : exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  Device getDeviceFromPtr(void* data) const override { return Device(kType, DeviceIndex(device_of(data))); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return at::make_generator<Dice>(device < 0 ? current : device); }
};

// ------------------------------------------------------------------ what a task keeps of a tensor: no reference

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

struct Place {
  void* pointer = nullptr;  // a device address, or host memory
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool wrapped = false;

  Place() = default;
  explicit Place(const at::Tensor& tensor)
      : pointer(tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        wrapped(tensor.unsafeGetTensorImpl()->is_wrapped_number()) {}
  size_t bytes() const {  // spanned
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!sizes[i]) return 0;
      last += (sizes[i] - 1) * strides[i];
    }
    return size_t(last + 1) * c10::elementSize(dtype);
  }
  Access access(bool write) const {
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    return {begin, pointer ? begin + bytes() : begin, write};
  }
  at::Tensor on_cpu() const {
    if (!pointer) return at::empty_strided(sizes, strides, at::TensorOptions(dtype));
    auto made = at::from_blob(shadow(pointer), sizes, strides, at::TensorOptions(dtype));
    if (wrapped) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }
};

struct Here {
  DeviceIndex device;
  int64_t stream;
  explicit Here(DeviceIndex index) : device(index), stream(current_streams[index]) {}
  void enqueue(const char* what, const std::vector<Access>& accesses, Task task) const {
    software::enqueue(device, stream, what, accesses, std::move(task));
  }
  void synchronize() const { synchronize_stream(device, stream); }
};

// ------------------------------------------------------------------ empty and views

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(Device(kType, index_of(device.value_or(Device(kType)))));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(Device(kType, index_of(device.value_or(Device(kType)))));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

void grow(const at::Tensor& self, size_t bytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= bytes) return;
  const c10::DeviceGuard guard(self.device());
  auto fresh = device_memory.allocate(bytes);
  const size_t old = storage->nbytes();
  if (old) {
    void *from = shadow(storage->data()), *to = shadow(fresh.get());
    const auto a = reinterpret_cast<uintptr_t>(storage->data()), b = reinterpret_cast<uintptr_t>(fresh.get());
    Here(self.device().index()).enqueue("resize_", {{a, a + old, false}, {b, b + old, true}},
                                        [from, to, old]() { memcpy(to, from, old); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self, (self.storage_offset() + self.numel()) * self.element_size());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() && !stride.empty()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes()) / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}

// ------------------------------------------------------------------ copies

// Piece by piece, other streams in between, so that a missing wait tears it.
void copy_pieces(void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t next = std::min(piece(), bytes - done);
    memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, next);
    done += next;
    if (done < bytes) breathe();
  }
}

void copy_places(const Place& to, const Place& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto a = to.on_cpu(), b = from.on_cpu();
  if (a.is_contiguous() && b.is_contiguous() && a.dtype() == b.dtype() && a.sizes() == b.sizes()) {
    copy_pieces(a.data_ptr(), b.const_data_ptr(), a.nbytes());
  } else if (a.dim() && a.size(0) > 1 && a.sizes() == b.sizes()) {
    const int64_t half = a.size(0) / 2;
    a.narrow(0, 0, half).copy_(b.narrow(0, 0, half));
    breathe();
    a.narrow(0, half, a.size(0) - half).copy_(b.narrow(0, half, a.size(0) - half));
  } else {
    a.copy_(b);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  at::Tensor source = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (is_ours(source) && is_ours(dst)) {
    const Here here(source.device().index());
    const Place from(source), to(dst);
    const bool is_far = source.device() != dst.device();
    const Here there(dst.device().index());
    // As CUDA: a copy between devices waits for both current streams, and both for it.
    if (is_far) software::wait(here.device, here.stream, record(there.device, there.stream));
    here.enqueue("copy_ on the device", {from.access(false), to.access(true)},
                 [from, to]() { copy_places(to, from); });
    if (is_far) software::wait(there.device, there.stream, record(here.device, here.stream));
    return dst;
  }
  if (is_ours(dst)) {  // to the device
    const Here here(dst.device().index());
    const Place to(dst);
    at::Tensor host = source;
    const Place plain(host);
    const bool is_direct = host.is_contiguous() && is_pinned(plain.pointer, plain.bytes());
    if (!is_direct) {
      count("copies from pageable memory");
      host = host.clone(at::MemoryFormat::Contiguous);  // staged; the task keeps it
    } else {
      count("copies from pinned memory");
      host_access(reinterpret_cast<uintptr_t>(plain.pointer), plain.bytes(), false, "a copy to the device");
    }
    const Place from(host);
    if (is_direct) host = at::Tensor();
    here.enqueue("copy_ from the host", {from.access(false), to.access(true)},
                 [from, to, host]() { copy_places(to, from); });
    if (is_direct) pin_record_use(from.pointer, here.device, here.stream);
    if (!non_blocking) here.synchronize();
    return dst;
  }
  const Here here(source.device().index());
  if (source.dtype() != dst.dtype() || !source.is_contiguous()) {  // converted on the device
    auto flat = at::empty(dst.sizes(), dst.options().device(source.device()).pinned_memory(false));
    flat.copy_(source);
    source = flat;
  }
  const Place from(source), to(dst);
  const bool is_direct = dst.is_contiguous() && is_pinned(to.pointer, to.bytes());
  here.enqueue("copy_ to the host", {from.access(false), to.access(true)},
               [from, to]() { copy_places(to, from); });
  if (is_direct) pin_record_use(to.pointer, here.device, here.stream);
  if (non_blocking && is_direct) {
    count("asynchronous copies to the host");
    return dst;
  }
  count(non_blocking ? "copies to the host that blocked though they should not" : "blocking copies to the host");
  here.synchronize();
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const Here here(self.device().index());
  const Place from(self);
  auto host = at::empty({}, self.options().device(at::kCPU));
  here.enqueue("item", {from.access(false)}, [from, host]() { host.copy_(from.on_cpu()); });
  here.synchronize();
  return host.item();
}

void record_stream(at::Tensor& self, Stream stream) {
  record_use(self.storage().mutable_data(), stream.device_index(), stream.id());
}

// The mean over ranks, through memory that they share: for each rank a counter, then two buffers of ``capacity`` bytes.
// It is queued, as with NCCL: no host waits. Two buffers are enough, as a rank is in round n only if all wrote for n - 1.
void all_reduce(at::Tensor tensor, at::Tensor shared, int rank, int world, int64_t capacity) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.dtype() == at::kFloat && int64_t(tensor.nbytes()) <= capacity);
  static std::vector<uint64_t> rounds(8, 0);
  const Here here(tensor.device().index());
  const Place place(tensor);
  const uint64_t round = ++rounds[here.device];
  const size_t bytes = tensor.nbytes();
  char* base = static_cast<char*>(shared.data_ptr());
  auto counter = [=](int of) { return reinterpret_cast<std::atomic<uint64_t>*>(base + of * (64 + 2 * capacity)); };
  auto buffer = [=](int of) { return reinterpret_cast<float*>(base + of * (64 + 2 * capacity) + 64 + round % 2 * capacity); };
  here.enqueue("all-reduce, sending", {place.access(false)}, [=] {
    memcpy(buffer(rank), shadow(place.pointer), bytes);
    counter(rank)->store(round);
  });
  wait_until(here.device, here.stream, [=] {
    for (int of = 0; of < world; ++of)
      if (counter(of)->load() < round) return false;
    return true;
  });
  here.enqueue("all-reduce, receiving", {place.access(true)}, [=] {
    auto* values = static_cast<float*>(shadow(place.pointer));
    for (size_t i = 0; i < bytes / sizeof(float); ++i) {
      float sum = 0;
      for (int of = 0; of < world; ++of) sum += buffer(of)[i];
      values[i] = sum / float(world);
    }
  });
}

// Its kernel for CPUs would draw from the generator of the host, and when the task runs.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// ------------------------------------------------------------------ the fallback

template <typename OnTensor>
IValue mapped(const IValue& value, Device device, const OnTensor& on_tensor) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(on_tensor(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& item : value.toTensorVector()) made.push_back(item.defined() ? on_tensor(item) : item);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
      made.push_back(item && item->defined() ? std::optional<at::Tensor>(on_tensor(*item)) : item);
    return made;
  }
  if (value.isDevice()) return IValue(device);
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& look) {
  mapped(value, at::kCPU, [&](const at::Tensor& tensor) { return look(tensor), tensor; });
}

using Impl = c10::TensorImpl*;

std::mutex no_meta_mutex;
std::set<std::string> no_meta;  // operators without a kernel that tells the shapes of results

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count_in = schema.arguments().size(), first = stack->size() - count_in;
  const std::string name = c10::toString(op.operator_name());
  const char* what = schema.name().c_str();
  for (const auto& returned : schema.returns())
    TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(), "the software device has no view operator ", name);

  bool has_generator = false;
  for (const auto& argument : schema.arguments()) has_generator |= argument.type()->str().find("Generator") != std::string::npos;
  TORCH_CHECK(has_generator || !op.hasTag(at::Tag::nondeterministic_seeded), "the software device cannot draw for ", name);

  // What it reads and writes, and on which device.
  std::vector<std::pair<at::Tensor, bool>> ours;
  std::unordered_map<Impl, bool> writes;
  DeviceIndex device = -1;
  for (size_t i = 0; i < count_in; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().type() == kType) device = index_of(value.toDevice());
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return;
      device = tensor.device().index();
      ours.emplace_back(tensor, alias && alias->isWrite());
      writes[tensor.unsafeGetTensorImpl()] |= alias && alias->isWrite();
    });
  }
  TORCH_CHECK(device >= 0, "software device: no tensor of the device in ", name);
  const c10::DeviceGuard guard(Device(kType, device));
  const Here here(device);

  // Tensors of the device become meta tensors; those of the CPU are copied, as a launch takes scalars by value.
  std::unordered_map<Impl, at::Tensor> metas;
  std::unordered_map<Impl, at::Tensor> back;
  std::vector<IValue> template_;
  for (size_t i = 0; i < count_in; ++i) {
    IValue value = (*stack)[first + i];
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
      at::Generator given = value.isNone() ? default_generator(device) : value.toGenerator();
      const uint64_t seed = given.device().type() == kType ? given.get<Dice>()->draw() : given.get<at::CPUGeneratorImpl>()->random64();
      template_.push_back(at::make_generator<at::CPUGeneratorImpl>(seed));
      continue;
    }
    template_.push_back(mapped(value, at::kMeta, [&](const at::Tensor& tensor) -> at::Tensor {
      if (!is_ours(tensor)) {
        if (tensor.device().type() != DeviceType::CPU) return tensor;
        auto copied = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copied.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copied;
      }
      auto& meta = metas[tensor.unsafeGetTensorImpl()];
      if (!meta.defined()) {
        meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
        back[meta.unsafeGetTensorImpl()] = tensor;
      }
      return meta;
    }));
  }

  bool is_async = true;
  for (const auto& returned : schema.returns()) {
    const auto type = returned.type()->str();
    if (type.find("Tensor") == std::string::npos) is_async = false;
  }
  {
    std::lock_guard<std::mutex> lock(no_meta_mutex);
    if (no_meta.count(name)) is_async = false;
  }
  torch::jit::Stack results(template_);
  if (is_async) {
    // A CPU generator does no harm: no number is drawn.
    try {
      run_on_cpu(op, results);
    } catch (const c10::NotImplementedError&) {
      is_async = false;
      std::lock_guard<std::mutex> lock(no_meta_mutex);
      no_meta.insert(name);
    } catch (const std::exception&) {
      is_async = false;  // the CPU kernel says what is wrong, if anything is
    }
  }

  std::unordered_map<Impl, Place> places;  // by meta tensor
  std::vector<Access> accesses;
  auto take_places = [&] {
    for (auto& [meta, tensor] : back) places[meta] = Place(tensor);
    for (auto& [tensor, is_written] : ours) {
      const Place place(tensor);
      if (is_written) accesses.push_back(place.access(true));
      accesses.push_back(place.access(false));
    }
  };
  auto on_cpu = [](const std::unordered_map<Impl, Place>& known, const std::vector<IValue>& given) {
    torch::jit::Stack made;
    std::unordered_map<Impl, at::Tensor> same;
    for (const IValue& value : given)
      made.push_back(mapped(value, at::kCPU, [&](const at::Tensor& tensor) -> at::Tensor {
        auto found = known.find(tensor.unsafeGetTensorImpl());
        if (found == known.end()) return tensor;
        auto& cpu = same[tensor.unsafeGetTensorImpl()];
        if (!cpu.defined()) cpu = found->second.on_cpu();
        return cpu;
      }));
    return made;
  };

  if (is_async) {
    count("kernels run asynchronously");
    for (auto& [meta, tensor] : back) {
      if (!writes[tensor.unsafeGetTensorImpl()] || tensor.sizes() == meta->sizes()) continue;
      resize_(tensor, meta->sizes(), std::nullopt);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta->sizes(), meta->strides());
    }
    take_places();
    std::vector<std::pair<size_t, Place>> outputs;  // number among all returned tensors
    size_t number = 0;
    std::vector<IValue> returned;
    for (const IValue& value : results)
      returned.push_back(mapped(value, Device(kType, device), [&](const at::Tensor& tensor) -> at::Tensor {
        const size_t mine = number++;
        auto found = back.find(tensor.unsafeGetTensorImpl());
        if (found != back.end()) return found->second;
        if (tensor.device().type() != DeviceType::Meta) return tensor;
        auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(Device(kType, device)));
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
        outputs.emplace_back(mine, Place(made));
        accesses.push_back(Place(made).access(true));
        return made;
      }));
    // What a task keeps must not belong to Python, as meta kernels that are written in it leave their tensors: it is
    // destroyed under the runtime's lock.
    std::unordered_map<Impl, Place> known;
    std::vector<IValue> given;
    for (const IValue& value : template_)
      given.push_back(mapped(value, at::kMeta, [&](const at::Tensor& tensor) {
        auto made = tensor.detach();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
        if (places.count(tensor.unsafeGetTensorImpl()))
          known[made.unsafeGetTensorImpl()] = places[tensor.unsafeGetTensorImpl()];
        return made;
      }));
    here.enqueue(what, accesses,
                 [op, given = std::move(given), known = std::move(known), outputs = std::move(outputs), on_cpu]() {
                   auto cpu = on_cpu(known, given);
                   run_on_cpu(op, cpu);
                   if (outputs.empty()) return;
                   std::vector<at::Tensor> made;
                   for (const IValue& value : cpu) each_tensor(value, [&](const at::Tensor& tensor) { made.push_back(tensor); });
                   at::AutoDispatchBelowADInplaceOrView below;
                   for (auto& [which, place] : outputs) place.on_cpu().copy_(made.at(which));
                 });
    torch::jit::drop(*stack, count_in);
    for (auto& value : returned) stack->push_back(std::move(value));
    return;
  }

  // Drain the stream, run the CPU kernel behind what it holds, wait.
  count("kernels run synchronously");
  count(("synchronous " + name).c_str());
  take_places();
  std::unordered_map<Impl, at::Tensor> outs;  // by meta tensor: out= arguments, which may grow
  for (size_t i = 0; i < count_in; ++i)
    if (schema.arguments()[i].is_out() && template_[i].isTensor()) {
      auto* meta = template_[i].toTensor().unsafeGetTensorImpl();
      auto& tensor = back[meta];
      outs[meta] = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    }
  torch::jit::Stack cpu;
  std::string error;
  std::unordered_map<Impl, Impl> origin;
  here.enqueue(what, accesses, [&]() {
    try {
      for (const IValue& value : template_)
        cpu.push_back(mapped(value, at::kCPU, [&](const at::Tensor& tensor) -> at::Tensor {
          auto* meta = tensor.unsafeGetTensorImpl();
          if (outs.count(meta)) return origin[outs[meta].unsafeGetTensorImpl()] = meta, outs[meta];
          auto found = places.find(meta);
          if (found == places.end()) return tensor;
          auto made = found->second.on_cpu();
          origin[made.unsafeGetTensorImpl()] = meta;
          return made;
        }));
      run_on_cpu(op, cpu);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  });
  here.synchronize();
  TORCH_CHECK(error.empty(), error);
  for (auto& [meta, tensor] : outs) {
    at::Tensor target = back[meta];
    if (target.sizes() != tensor.sizes()) resize_(target, tensor.sizes(), std::nullopt);
    target.copy_(tensor);
  }
  torch::jit::drop(*stack, count_in);
  for (const IValue& value : cpu)
    stack->push_back(mapped(value, Device(kType, device), [&](const at::Tensor& tensor) -> at::Tensor {
      auto found = origin.find(tensor.unsafeGetTensorImpl());
      if (found != origin.end()) return back[found->second];
      auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(Device(kType, device)));
      made.copy_(tensor);
      return made;
    }));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace
}  // namespace software

PYBIND11_MODULE(_software, m) {
  using namespace software;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int device) { current = DeviceIndex(device); });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("is_registered", [](uintptr_t pointer, size_t bytes) { return is_pinned(reinterpret_cast<void*>(pointer), bytes); });
  m.def("host_access", &host_access);
  m.def("host_join", &host_join);
  // Holds a stream until the returned function is called.
  m.def("hold", [](int device, int64_t stream) { return py::cpp_function(hold(device, stream)); });
  m.def("all_reduce", &all_reduce);
  m.def("forked", &forked);
  m.def("races", &take_races);
  m.def("counters", [] {
    py::dict made;
    for (auto& [name, value] : counters()) made[py::str(name)] = value;
    return made;
  });
  m.def("synchronize_device", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int device) { return default_generator(DeviceIndex(device)); });
  m.def("synchronisations", &synchronisations);
  m.def("configure", [](uint64_t seed, int failing_allocation, bool has_streams, uint64_t dies_at, int report_to) {
    configure({seed, failing_allocation, has_streams, dies_at, report_to});
  });
}
