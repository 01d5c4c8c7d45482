// What will an operator return? Asked of its Meta kernel, or, for device operators without one, of
// the kernel itself over zeros.
#include "dispatch.h"
#include <c10/core/InferenceMode.h>
#include <mutex>
#include <unordered_map>

namespace simnpu {
namespace {

// Their shapes depend on values: no Meta kernel can know, though some have one that guesses.
bool depends_on_values(const std::string& name) {
  static const char* starts[] = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::unique",
                                 "aten::repeat_interleave.Tensor", "aten::bincount", "aten::histc",
                                 "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero",
                                 "aten::argwhere", "aten::item"};
  for (auto s : starts)
    if (name.rfind(s, 0) == 0) return true;
  return false;
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (auto& r : schema.returns()) {
    auto kind = r.type()->kind();
    bool list = kind == c10::TypeKind::ListType &&
                r.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) return false;
  }
  return true;
}

using Stand = std::pair<size_t, int>;
using Stands = std::vector<std::pair<c10::TensorImpl*, Stand>>;

// Replaces tensors by stand-ins, remembering which stands for which.
struct Doubles {
  bool meta;
  Stands stands;
  Tensor make(const Tensor& t, size_t argument, int element) {
    if (!t.defined() || (!is_npu(t) && t.dim() == 0)) return t;
    Tensor r;
    auto options = at::TensorOptions().dtype(t.dtype());
    if (meta) {
      r = at::empty_strided(t.sizes(), t.strides(), options.device(at::kMeta));
    } else {
      r = at::empty_strided(t.sizes(), t.strides(), options.device(at::kCPU));
      r.zero_();
    }
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
    stands.push_back({r.unsafeGetTensorImpl(), {argument, element}});
    return r;
  }
  IValue convert(const IValue& v, size_t argument) {
    if (v.isTensor()) return make(v.toTensor(), argument, -1);
    if (v.isTensorList()) {
      c10::List<Tensor> list;
      int i = 0;
      for (const Tensor& t : v.toTensorVector()) list.push_back(make(t, argument, i++));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      int i = 0;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) {
        list.push_back(t && t->defined() ? std::optional<Tensor>(make(*t, argument, i)) : std::nullopt);
        i++;
      }
      return list;
    }
    if (v.isDevice() && v.toDevice().type() == kNpu) return c10::Device(meta ? at::kMeta : at::kCPU);
    if (v.isGenerator()) return IValue();
    return v;
  }
};

Result describe(const IValue& v, const Stands& stands) {
  Result r;
  if (v.isTensor() && v.toTensor().defined()) {
    const Tensor& t = v.toTensor();
    for (auto& s : stands)
      if (s.first == t.unsafeGetTensorImpl()) {
        r.kind = Result::kArgument;
        std::tie(r.argument, r.element) = s.second;
        return r;
      }
    r.kind = Result::kFresh;
    r.sizes = t.sizes().vec();
    r.strides = t.is_non_overlapping_and_dense() ? t.strides().vec() : std::vector<int64_t>();
    r.dtype = t.scalar_type();
    return r;
  }
  if (v.isTensorList()) {
    r.kind = Result::kList;
    for (const Tensor& t : v.toTensorVector()) r.items.push_back(describe(IValue(t), stands));
    return r;
  }
  r.value = v;
  return r;
}

void find_resized(const c10::FunctionSchema& schema, const Stack& args, const Stack& doubles, Inference* out) {
  auto check = [&](const Tensor& a, const Tensor& b, size_t i, int e) {
    if (is_npu(a) && b.defined() && !a.sizes().equals(b.sizes())) out->resized.push_back({i, e, b.sizes().vec()});
  };
  for (size_t i = 0; i < args.size(); i++) {
    if (!is_written(schema.arguments()[i])) continue;
    if (args[i].isTensor()) check(args[i].toTensor(), doubles[i].toTensor(), i, -1);
    if (args[i].isTensorList())
      for (size_t e = 0; e < args[i].toTensorVector().size(); e++)
        check(args[i].toTensorVector()[e], doubles[i].toTensorVector()[e], i, e);
  }
}

bool try_with(const c10::OperatorHandle& op, const Stack& args, bool meta, Inference* out) {
  Doubles doubles{meta, {}};
  Stack in, stack;
  for (size_t i = 0; i < args.size(); i++) {
    IValue v = doubles.convert(args[i], i);
    if (op.schema().arguments()[i].name() == "pin_memory" && v.isBool()) v = IValue(false);
    in.push_back(v);
  }
  stack = in;
  // The modes of a tracer around us must not see this.
  c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize}));
  c10::InferenceMode inference;
  try {
    if (meta) op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    else run_kernel(op, &stack);
  } catch (const std::exception&) {
    return false;
  }
  if (stack.size() != op.schema().returns().size()) return false;
  for (auto& v : stack) out->results.push_back(describe(v, doubles.stands));
  find_resized(op.schema(), args, in, out);
  return true;
}

// Operator, shapes, dtypes and numbers: what a probe's answer depends on.
std::string signature(const c10::OperatorHandle& op, const Stack& args) {
  std::ostringstream s;
  s << full_name(op);
  auto put = [&](const Tensor& t) {
    if (t.defined()) s << t.sizes() << t.strides() << t.scalar_type();
  };
  for (auto& v : args) {
    s << '|';
    if (v.isTensor()) put(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) put(t);
    else if (v.isOptionalTensorList()) {
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) if (t) put(*t);
    }
    else if (!v.isGenerator()) s << v;
  }
  return s.str();
}
}  // namespace

bool is_written(const c10::Argument& a) {
  if (a.alias_info() && a.alias_info()->isWrite()) return true;
  // torch_npu declares some out lists without saying that they are written.
  return a.name() == "out" && a.kwarg_only();
}

bool infer(const c10::OperatorHandle& op, const Stack& args, Inference* out) {
  auto name = full_name(op);
  bool ours = has_python_kernel(op), during_capture = capturing();
  if (!returns_tensors(op.schema()) || (depends_on_values(name) && !during_capture)) return false;
  if (op.schema().returns().empty() && ours) return true;  // writes its arguments, which keep their sizes
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) && try_with(op, args, true, out)) return true;
  *out = Inference();
  if (!ours && !during_capture) return false;
  static std::mutex mutex;
  static std::unordered_map<std::string, Inference> known;
  auto key = signature(op, args);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = known.find(key);
    if (it != known.end()) {
      *out = it->second;
      return true;
    }
  }
  if (!try_with(op, args, false, out)) return false;
  std::lock_guard<std::mutex> lock(mutex);
  known[key] = *out;
  return true;
}
}  // namespace simnpu
