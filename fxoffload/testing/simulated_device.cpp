// "fxsim": a PrivateUse1 device that computes on the CPU but owns its memory: byte-exact counters, a capacity that
// raises the real out-of-memory error, byte counters per copy direction, and errors for operands on two devices.
//
// How it works. Device memory is ordinary host memory that only tensors of type fxsim point to. A kernel call *lends*
// its operands to the CPU kernel as CPU tensors over the same bytes (nothing is copied), then *takes* the results: a
// result over lent memory becomes a view of the device storage, fresh memory is charged to the device and adopted.
// So view ops, in-place ops, out= ops and undeclared mutations (BatchNorm statistics) need no code of their own, and
// the temporaries of a CPU kernel are never charged: they stand for the scratch of a fused device kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace fxsim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kDevice0(kDevice, 0);

// ---------------------------------------------------------------------------------------------------- the counters

// Layout shared with simulated_device.py (class _Counters).
struct Counters {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t allocations = 0;
  int64_t h2d_bytes = 0;
  int64_t d2h_bytes = 0;
  int64_t capacity_bytes = -1;  // -1: no limit
};

class Ledger {
 public:
  Counters read() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }
  void charge(int64_t n_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& c = counters_;
    TORCH_CHECK_WITH(
        OutOfMemoryError, c.capacity_bytes < 0 || c.current_bytes + n_bytes <= c.capacity_bytes,
        "fxsim out of memory. Tried to allocate ", n_bytes, " bytes. Device 0 has a capacity of ", c.capacity_bytes,
        " bytes, of which ", c.capacity_bytes - c.current_bytes, " bytes are free.");
    c.current_bytes += n_bytes;
    c.allocations += n_bytes > 0;
    c.peak_bytes = std::max(c.peak_bytes, c.current_bytes);
  }
  void refund(int64_t n_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.current_bytes -= n_bytes;
  }
  void moved(int64_t h2d_bytes, int64_t d2h_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.h2d_bytes += h2d_bytes;
    counters_.d2h_bytes += d2h_bytes;
  }
  void set_capacity(int64_t n_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.capacity_bytes = n_bytes;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.peak_bytes = counters_.current_bytes;
    counters_.allocations = 0;
  }
  void reset_transfers() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.h2d_bytes = counters_.d2h_bytes = 0;
  }

 private:
  std::mutex mutex_;
  Counters counters_;
};

// Leaked: tensors that outlive the library's destructors still refund their bytes.
Ledger& ledger() {
  static auto* instance = new Ledger();
  return *instance;
}

// ------------------------------------------------------------------------------------------------------ the memory

// One allocation: a charge on the ledger and the host bytes behind it, returned together.
class Block {
 public:
  explicit Block(int64_t n_bytes) : n_bytes_(n_bytes) { ledger().charge(n_bytes); }
  ~Block() { ledger().refund(n_bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  static c10::DataPtr hand_out(std::unique_ptr<Block> block, c10::Storage host) {
    void* data = host.mutable_data();
    block->host_ = std::move(host);
    return {data, block.release(), &Block::free, kDevice0};
  }
  static void free(void* block) { delete static_cast<Block*>(block); }

 private:
  int64_t n_bytes_;
  c10::Storage host_;
};

// Charges the bytes of a storage that a CPU kernel made and keeps them as device memory, without a copy.
c10::DataPtr adopt(const c10::Storage& host) {
  return Block::hand_out(std::make_unique<Block>(static_cast<int64_t>(host.nbytes())), host);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n_bytes) override {
    auto block = std::make_unique<Block>(static_cast<int64_t>(n_bytes));  // charged before there are bytes
    return Block::hand_out(
        std::move(block), c10::Storage(c10::Storage::use_byte_size_t(), n_bytes, c10::GetAllocator(c10::kCPU), false));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Block::free; }
  void copy_data(void* dst, const void* src, size_t n_bytes) const override { std::memcpy(dst, src, n_bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const auto counters = ledger().read();
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = counters.current_bytes;  // [0]: the aggregate over pools
      (*bytes)[0].peak = counters.peak_bytes;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { ledger().reset_peak(); }
  // No `override`: younger than the rest of the interface.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {
    const auto counters = ledger().read();
    const int64_t host_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    const int64_t total_bytes = counters.capacity_bytes < 0 ? host_bytes : counters.capacity_bytes;
    return {std::max<int64_t>(total_bytes - counters.current_bytes, 0), total_bytes};
  }
};

Allocator& allocator() {
  static auto* instance = new Allocator();
  return *instance;
}
REGISTER_ALLOCATOR(kDevice, &allocator());

// "Pinned" memory of a device that cannot pin: ordinary CPU memory, and is_pinned() stays false. Without an entry here
// torch dereferences a null allocator.
class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t n_bytes) override { return c10::GetAllocator(c10::kCPU)->allocate(n_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetAllocator(c10::kCPU)->raw_deleter(); }
  void copy_data(void* dst, const void* src, size_t n_bytes) const override { std::memcpy(dst, src, n_bytes); }
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator& host_allocator() {
  static auto* instance = new HostAllocator();
  return *instance;
}
REGISTER_HOST_ALLOCATOR(kDevice, &host_allocator());

// ------------------------------------------------------------------------------------------------------ the device

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice0; }
  // The device draws from the CPU generators, so that a seed gives the numbers it gives on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n_bytes) const override {
    auto data = allocator().allocate(n_bytes);
    const size_t kept_bytes = std::min(n_bytes, storage.nbytes());
    if (kept_bytes > 0) {
      std::memcpy(data.get(), storage.data(), kept_bytes);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(n_bytes);
  }
};

[[maybe_unused]] const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// One device, one queue. New streams and events are refused by the base class with a Python error.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream queue() { return c10::Stream(c10::Stream::DEFAULT, kDevice0); }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice0; }
  c10::Device getDevice() const override { return kDevice0; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return queue(); }
  c10::Stream getDefaultStream(c10::Device) const override { return queue(); }
  c10::Stream exchangeStream(c10::Stream) const override { return queue(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --------------------------------------------------------------------------------------------------------- lending

void copy_geometry(const at::Tensor& from, const at::Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_geometry(like, tensor);
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// The operands and results of one kernel call: device tensors lent to the host, host tensors taken to the device.
class Loan {
 public:
  at::Tensor lend(const at::Tensor& device) {
    TORCH_CHECK(device.layout() == c10::kStrided, "fxsim has strided tensors only, got ", device.layout());
    auto host = tensor_over(lend(device.storage()), c10::DispatchKey::CPU, device);
    if (device.unsafeGetTensorImpl()->is_wrapped_number()) {
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors_.emplace_back(device, host);
    return host;
  }

  // One host storage per device storage, so that operands which share memory still do.
  c10::Storage lend(const c10::Storage& device) {
    for (const auto& [lent, host] : storages_) {
      if (lent.is_alias_of(device)) {
        return host;
      }
    }
    auto* impl = device.unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(impl);  // the bytes live as long as any host tensor over them
    const auto give_back = [](void* lent) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(lent)); };
    c10::Storage host(
        c10::Storage::use_byte_size_t(), device.nbytes(),
        c10::DataPtr(impl->mutable_data(), impl, give_back, c10::kCPU), c10::GetAllocator(c10::kCPU), true);
    storages_.emplace_back(device, host);
    return host;
  }

  // Follows what the kernel did to its operands themselves: resize_, set_, out= of another size.
  void settle() {
    for (const auto& [device, host] : storages_) {
      if (device.data() != host.data()) {
        device.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(host));
        device.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
      }
    }
    const auto operands = tensors_;
    for (const auto& [device, host] : operands) {
      auto storage = take(host.storage());
      if (!storage.is_alias_of(device.storage())) {
        device.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset()) {
        copy_geometry(host, device);
      }
    }
  }

  at::Tensor take(const at::Tensor& host) {
    for (const auto& [device, lent] : tensors_) {
      if (lent.is_same(host)) {
        return device;
      }
    }
    return tensor_over(take(host.storage()), c10::DispatchKey::PrivateUse1, host);
  }

 private:
  c10::Storage take(const c10::Storage& host) {
    for (const auto& [device, lent] : storages_) {
      if (lent.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
        return device;
      }
    }
    c10::Storage device(c10::Storage::use_byte_size_t(), host.nbytes(), adopt(host), &allocator(), true);
    storages_.emplace_back(device, host);
    return device;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // device, host
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // device, host
};

// --------------------------------------------------------------------------------------------- kernels: any op, boxed

// A CPU scalar is a kernel argument on every accelerator; anything larger must already be on the device.
at::Tensor lend_operand(Loan& loan, const at::Tensor& operand, const c10::OperatorHandle& op) {
  if (!operand.defined() || (operand.is_cpu() && operand.dim() == 0)) {
    return operand;
  }
  TORCH_CHECK(
      operand.device() == kDevice0, "Expected all tensors to be on the same device, but found at least two devices, ",
      kDevice0, " and ", operand.device(), "! (when checking arguments of ", op.schema().name(), ")");
  return loan.lend(operand);
}

// Tensor?[] is the type of advanced indices: as on CUDA they may be on the CPU and are then copied over. aten::index
// has copied them when it computed its output's shape.
std::optional<at::Tensor> lend_index(
    Loan& loan, const std::optional<at::Tensor>& index, const c10::OperatorHandle& op) {
  if (!index.has_value() || !index->defined() || (index->is_cpu() && op.schema().name() == "aten::index")) {
    return index;
  }
  return loan.lend(index->to(kDevice0));
}

c10::IValue lend_argument(Loan& loan, const c10::IValue& argument, const c10::OperatorHandle& op) {
  if (argument.isTensor()) {
    return lend_operand(loan, argument.toTensor(), op);
  }
  if (argument.isTensorList()) {
    c10::List<at::Tensor> operands;
    for (const auto& operand : argument.toTensorVector()) {
      operands.push_back(lend_operand(loan, operand, op));
    }
    return operands;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> indices;
    for (const auto& index : argument.toOptionalTensorVector()) {
      indices.push_back(lend_index(loan, index, op));
    }
    return indices;
  }
  if (argument.isStorage()) {
    return loan.lend(argument.toStorage());
  }
  return argument.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : argument;
}

c10::IValue take_result(Loan& loan, const c10::IValue& result) {
  if (result.isTensor() && result.toTensor().defined()) {
    return loan.take(result.toTensor());
  }
  if (result.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const auto& tensor : result.toTensorVector()) {
      tensors.push_back(tensor.defined() ? loan.take(tensor) : tensor);
    }
    return tensors;
  }
  return result;
}

template <typename Change>
void change_last(torch::jit::Stack& stack, size_t n, const Change& change) {
  std::transform(stack.end() - static_cast<int64_t>(n), stack.end(), stack.end() - static_cast<int64_t>(n), change);
}

// Runs op's CPU kernel over device memory: arguments on the stack in, results on the stack out.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Loan loan;
  change_last(*stack, op.schema().arguments().size(), [&](const c10::IValue& argument) {
    return lend_argument(loan, argument, op);
  });
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  loan.settle();
  change_last(*stack, op.schema().returns().size(), [&](const c10::IValue& result) {
    return take_result(loan, result);
  });
}

// Convolution asks every backend it does not know for these two ops; the CPU answers them by its own choice of kernel.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_host(op, stack);
}

void convolution_backward(const c10::OperatorHandle& overrideable, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - static_cast<int64_t>(overrideable.schema().arguments().size());
  const int64_t out_channels = first->toTensor().size(1);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{out_channels}));  // bias_sizes, after grad, input, weight
  run_on_host(op, stack);
}

// --------------------------------------------------------------------------------------------- kernels: typed, aten

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor lend_if_on_device(Loan& loan, const at::Tensor& tensor) {
  return tensor.device() == kDevice0 ? loan.lend(tensor) : tensor;
}

// The host converts and broadcasts; what crosses is numel(dst) elements of the device tensor's dtype, as in a blocking
// CUDA copy.
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool) {
  const bool from_host = !src.is_privateuseone();
  const bool to_host = !dst.is_privateuseone();
  ledger().moved(from_host ? dst.numel() * dst.itemsize() : 0, to_host ? dst.numel() * src.itemsize() : 0);
  Loan loan;
  lend_if_on_device(loan, dst).copy_(lend_if_on_device(loan, src));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  return copy_from(src, dst.resize_(src.sizes()), false);
}

c10::Scalar local_scalar_dense(const at::Tensor& scalar) {
  ledger().moved(0, static_cast<int64_t>(scalar.itemsize()));
  Loan loan;
  return loan.lend(scalar).item();
}

// F.dropout takes this op on every accelerator and a composition on the CPU. The arithmetic here is the composition's
// (multiply by keep / (1 - p), not by 1 / (1 - p) after the mask), so that both give the same bits.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const double keep = train.value_or(true) ? 1 - p : 1.0;
  Loan loan;
  auto host = loan.lend(input);
  auto noise = at::empty_like(host).bernoulli_(keep);
  auto mask = noise.to(at::kBool);
  return {loan.take(host * noise.div_(keep)), loan.take(mask)};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  Loan loan;
  auto noise = loan.lend(mask).to(grad.scalar_type()).div_(1 / scale);
  return loan.take(loan.lend(grad) * noise);
}

// Accelerators count integers too (transformers routes experts by it); the CPU kernel takes floating types only.
at::Tensor histc(const at::Tensor& input, int64_t bins, const c10::Scalar& min, const c10::Scalar& max) {
  Loan loan;
  auto host = loan.lend(input);
  auto counts = at::isIntegralType(host.scalar_type(), false) ? at::histc(host.to(at::kDouble), bins, min, max)
                                                              : at::histc(host, bins, min, max);
  return loan.take(counts.to(input.scalar_type()));
}

// 0: the math path of scaled_dot_product_attention, which a device without a fused kernel gets.
int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// -------------------------------------------------------------------------------------------------------- autocast

// The CPU's autocast rules (aten/src/ATen/autocast_mode.cpp, AutocastCPU), so that autocast gives the CPU's numbers.
constexpr const char* kLowerPrecision[] = {
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "bmm", "mm", "linalg_vecdot",
    "baddbmm", "addmm", "_addmm_activation", "addbmm", "linear", "_convolution.deprecated", "matmul", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "prelu", "scaled_dot_product_attention",
    "_native_multi_head_attention"};
constexpr const char* kFloat32[] = {
    "avg_pool3d", "binary_cross_entropy", "grid_sampler", "polar", "prod", "prod.dim_int", "quantile",
    "quantile.scalar", "nanquantile", "nanquantile.scalar", "stft", "stft.center", "cdist", "grid_sampler_2d",
    "_grid_sampler_2d_cpu_fallback", "grid_sampler_3d", "trace", "view_as_complex", "cholesky", "cholesky_inverse",
    "cholesky_solve", "inverse", "lu_solve", "orgqr", "ormqr", "pinverse", "max_pool3d", "max_unpool2d",
    "max_unpool3d", "adaptive_avg_pool3d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "mse_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "poisson_nll_loss", "smooth_l1_loss", "cross_entropy_loss", "l1_loss", "huber_loss",
    "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "ctc_loss.IntList",
    "ctc_loss.Tensor", "kl_div", "multilabel_margin_loss", "binary_cross_entropy_with_logits"};
constexpr const char* kPromote[] = {"stack", "cat", "index_copy"};

template <typename Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> arguments, const Visit& visit) {
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const auto& tensor : argument.toTensorVector()) {
        visit(tensor);
      }
    }
  }
}

c10::IValue cast_argument(const c10::IValue& argument, c10::ScalarType dtype) {
  if (argument.isTensor() && argument.toTensor().defined()) {
    return at::autocast::cached_cast(dtype, argument.toTensor(), kDevice);
  }
  if (argument.isTensorList()) {
    return c10::IValue(at::autocast::cached_cast(dtype, argument.toTensorVector(), kDevice));
  }
  return argument;
}

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  change_last(*stack, op.schema().arguments().size(), [&](const c10::IValue& argument) {
    return cast_argument(argument, dtype);
  });
  op.callBoxed(stack);
}

void autocast_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(kDevice));
}

void autocast_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::kFloat);
}

void autocast_promote(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kDevice);
  for_each_tensor(torch::jit::last(*stack, op.schema().arguments().size()), [&](const at::Tensor& tensor) {
    if (tensor.defined() && at::autocast::is_eligible(tensor, kDevice) && tensor.scalar_type() == at::kFloat) {
      widest = at::kFloat;
    }
  });
  cast_and_call(op, stack, widest);
}

// --------------------------------------------------------------------------------------------------- registrations

template <c10::BoxedKernel::BoxedKernelFunction* kernel, size_t n>
void impl_boxed(torch::Library& library, const char* const (&names)[n]) {
  for (const char* name : names) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

// Ops with a kernel of their own on the CPU and a composition for backends that have none: without these entries the
// composition would run, with other bits and with temporaries in device memory.
constexpr const char* kAtenWithCpuKernel[] = {
    "native_layer_norm", "native_group_norm", "native_channel_shuffle", "silu_backward", "mish_backward", "addr",
    "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out", "_stack", "_stack.out", "linalg__powsum"};

// Ops whose out= kernel resizes its output on the way, with a warning, when the default for new backends calls it.
constexpr const char* kAtenFunctional[] = {"mse_loss", "smooth_l1_loss"};

// bitsandbytes computes these in one kernel on the CPU or on CUDA and has a composition for other devices.
constexpr const char* kBitsandbytes[] = {
    "quantize_4bit", "dequantize_4bit", "dequantize_4bit.out", "gemv_4bit", "gemv_4bit.out", "gemm_4bit",
    "quantize_blockwise", "dequantize_blockwise", "dequantize_blockwise.out", "int8_linear_matmul",
    "int8_linear_matmul.out", "int8_mm_dequant", "int8_scaled_mm", "int8_mixed_scaled_mm", "int8_vectorwise_quant",
    "int8_vectorwise_dequant", "int8_double_quant", "optimizer_update_32bit", "optimizer_update_8bit_blockwise"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
  library.impl("histc", histc);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  impl_boxed<&run_on_host>(library, kAtenWithCpuKernel);
  impl_boxed<&run_on_host>(library, kAtenFunctional);
}

// A copy reads and writes lazily conjugated or negated memory; the generic rule would materialize it by a copy, and so
// on for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(bitsandbytes, PrivateUse1, library) {
  impl_boxed<&run_on_host>(library, kBitsandbytes);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  impl_boxed<&autocast_lower_precision>(library, kLowerPrecision);
  impl_boxed<&autocast_float32>(library, kFloat32);
  impl_boxed<&autocast_promote>(library, kPromote);
}

}  // namespace fxsim

// -------------------------------------------------------------------------------------- control, called from ctypes

extern "C" {
void fxsim_read(fxsim::Counters* counters) { *counters = fxsim::ledger().read(); }
void fxsim_set_capacity(int64_t n_bytes) { fxsim::ledger().set_capacity(n_bytes); }
void fxsim_reset_peak() { fxsim::ledger().reset_peak(); }
void fxsim_reset_transfers() { fxsim::ledger().reset_transfers(); }
}
