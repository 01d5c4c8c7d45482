// Seeing device memory as CPU tensors.
#include "dispatch.h"

namespace simnpu {

c10::Device npu_device() { return c10::Device(kNpu, 0); }

std::string full_name(const c10::OperatorHandle& op) {
  auto& n = op.operator_name();
  return n.overload_name.empty() ? n.name : n.name + "." + n.overload_name;
}

Tensor cpu_view(const Tensor& t) {
  if (!is_npu(t)) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  Tensor r = t.numel() ? at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options)
                       : at::empty_strided(t.sizes(), t.strides(), options);
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

Tensor to_npu(const Tensor& cpu) {
  if (!cpu.defined() || is_npu(cpu)) return cpu;
  Tensor s = cpu.resolve_conj().resolve_neg();
  if (!s.is_non_overlapping_and_dense()) s = s.contiguous();
  auto r = at::empty_strided(s.sizes(), s.strides(), s.options().device(npu_device()).pinned_memory(false));
  if (s.numel()) cpu_view(r).copy_(s);
  return r;
}
}  // namespace simnpu
