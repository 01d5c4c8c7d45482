// Copies. Plain ones keep torch_npu's own kernel, so the driver sees the copies that a card would see;
// conversions and strided copies become a kernel on the device plus a plain copy.
#include "dispatch.h"

namespace simnpu {
namespace {
std::optional<c10::SafeKernelFunction> original;

const c10::OperatorHandle& copy_op() {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  return op;
}

void plain_copy(const Tensor& dst, const Tensor& src, bool non_blocking) {
  Stack stack{dst, src, non_blocking};
  original->callBoxed(copy_op(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
}

void device_copy(const Tensor& dst, const Tensor& src) {
  bool books = c10::isIntegralType(dst.scalar_type(), true) && dst.nbytes() <= kSmall;
  if (!computes() && !books) return launch("aten::copy_", {});
  launch("aten::copy_", [d = cpu_view(dst), s = cpu_view(src)] { d.copy_(s); });
}
}  // namespace

void keep_original_copy() {
  original = copy_op().getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (!self.numel()) return self;
  bool to = is_npu(self), from = is_npu(src);
  bool plain = self.scalar_type() == src.scalar_type() && self.sizes().equals(src.sizes()) &&
               self.is_contiguous() && src.is_contiguous() && self.is_conj() == src.is_conj() &&
               self.is_neg() == src.is_neg();
  if (plain) {
    plain_copy(self, src, non_blocking);
  } else if (to && from) {
    device_copy(self, src);
  } else if (from) {  // convert on the device, copy out plainly, spread on the host
    auto staged = at::empty(self.sizes(), src.options().dtype(self.scalar_type()));
    device_copy(staged, src);
    if (self.is_contiguous()) return plain_copy(self, staged, non_blocking), self;
    auto host = at::empty(self.sizes(), self.options().pinned_memory(false));
    plain_copy(host, staged, false);
    self.copy_(host);
  } else {  // convert on the host, copy in plainly, spread on the device
    auto host = at::empty(self.sizes(), src.options().dtype(self.scalar_type()).pinned_memory(false));
    host.copy_(src);
    if (self.is_contiguous()) return plain_copy(self, host, false), self;
    auto staged = at::empty(self.sizes(), self.options());
    plain_copy(staged, host, false);
    device_copy(self, staged);
  }
  return self;
}

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
               std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  auto options = self.options().pinned_memory(false);
  if (dtype) options = options.dtype(*dtype);
  if (device) options = options.device(*device);
  if (pin_memory.value_or(false) && options.device().is_cpu()) options = options.pinned_memory(true);
  bool preserve = format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
  bool dense = self.is_non_overlapping_and_dense();
  Tensor r = preserve && dense
                 ? at::empty_strided(self.sizes(), self.strides(), options)
                 : at::empty(self.sizes(), options.memory_format(preserve ? at::MemoryFormat::Contiguous : *format));
  if (!self.numel()) return r;
  bool same_layout = self.scalar_type() == r.scalar_type() && self.strides().equals(r.strides()) && dense;
  if (same_layout && !self.is_contiguous() && self.device() != r.device()) {
    // A transposed tensor is one run of bytes all the same: let the driver see one copy.
    auto to = at::as_strided(r, {r.numel()}, {1}, 0);
    to.copy_(at::as_strided(self, {self.numel()}, {1}, self.storage_offset()), non_blocking);
  } else {
    r.copy_(self, non_blocking);
  }
  return r;
}
}  // namespace simnpu
