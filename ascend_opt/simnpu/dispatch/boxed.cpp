// The one kernel that stands behind every operator of the simulated device.
#include "dispatch.h"
#include <ATen/CPUGeneratorImpl.h>
#include <mutex>
#include <unordered_map>

namespace simnpu {
namespace {

// A CPU generator for each NPU generator, reseeded when that one was.
at::Generator cpu_generator(const at::Generator& npu) {
  static std::mutex mutex;
  static std::unordered_map<void*, std::pair<uint64_t, at::Generator>> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto seed = npu.current_seed();
  auto it = known.find(npu.unsafeGetGeneratorImpl());
  if (it == known.end() || it->second.first != seed)
    it = known.insert_or_assign(npu.unsafeGetGeneratorImpl(),
                                std::make_pair(seed, at::make_generator<at::CPUGeneratorImpl>(seed))).first;
  return it->second.second;
}

Tensor on_cpu(const Tensor& t, bool written) {
  if (!t.defined()) return t;
  if (is_npu(t)) return cpu_view(t);
  // Host values are taken at the call, as a launch on a card does.
  return written || t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
}

IValue on_cpu(const IValue& v, const c10::Argument& a) {
  bool written = is_written(a);
  if (v.isTensor()) return on_cpu(v.toTensor(), written);
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(on_cpu(t, written));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<Tensor>(on_cpu(*t, written)) : std::nullopt);
    return list;
  }
  if (v.isDevice() && v.toDevice().type() == kNpu) return c10::Device(at::kCPU);
  if (v.isGenerator() && v.toGenerator().device().type() == kNpu) return cpu_generator(v.toGenerator());
  if (a.name() == "pin_memory" && v.isBool()) return IValue(false);
  return v;
}

Stack cpu_arguments(const c10::OperatorHandle& op, const Stack& args) {
  Stack in;
  for (size_t i = 0; i < args.size(); i++) in.push_back(on_cpu(args[i], op.schema().arguments()[i]));
  return in;
}

IValue allocate(const Result& r, const Stack& args) {
  switch (r.kind) {
    case Result::kFresh: {
      auto options = at::TensorOptions().dtype(r.dtype).device(npu_device());
      return r.strides.size() == r.sizes.size() ? at::empty_strided(r.sizes, r.strides, options)
                                                : at::empty(r.sizes, options);
    }
    case Result::kArgument:
      return r.element < 0 ? args[r.argument] : IValue(args[r.argument].toTensorVector().at(r.element));
    case Result::kList: {
      c10::List<Tensor> list;
      for (auto& i : r.items) list.push_back(allocate(i, args).toTensor());
      return list;
    }
    default:
      return r.value;
  }
}

// Where a kernel's result goes when it has run: alias of the tensor that was handed out, or nothing
// where the kernel wrote its argument.
void collect(const Result& r, const IValue& handed_out, std::vector<Tensor>* targets) {
  if (r.kind == Result::kFresh) targets->push_back(cpu_view(handed_out.toTensor()));
  else if (r.kind == Result::kList)
    for (size_t i = 0; i < r.items.size(); i++)
      collect(r.items[i], IValue(handed_out.toTensorVector()[i]), targets);
  else targets->push_back(Tensor());
}

void flatten(const IValue& v, std::vector<Tensor>* out) {
  if (v.isTensor()) out->push_back(v.toTensor());
  else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) out->push_back(t);
  else out->push_back(Tensor());
}

void resize(const Stack& args, const Inference& inference) {
  for (auto& [i, element, sizes] : inference.resized)
    (element < 0 ? args[i].toTensor() : args[i].toTensorVector()[element]).resize_(sizes);
}

void deliver(const Stack& results, const std::vector<Tensor>& targets) {
  std::vector<Tensor> from;
  for (auto& v : results) flatten(v, &from);
  TORCH_CHECK(from.size() == targets.size(), "returned ", from.size(), " tensors, ", targets.size(), " expected");
  for (size_t i = 0; i < from.size(); i++) {
    if (!targets[i].defined() || !from[i].defined() || !targets[i].numel()) continue;
    TORCH_CHECK(targets[i].sizes().equals(from[i].sizes()), "returned shape ", from[i].sizes(), ", but ",
                targets[i].sizes(), " was announced");
    targets[i].copy_(from[i]);
  }
}

// Runs the operator once the stream is settled: for results whose shape only the data tells, and for
// values that the host wants.
void run_settled(const c10::OperatorHandle& op, const Stack& args, Stack* results) {
  auto state = std::make_shared<std::pair<Stack, std::exception_ptr>>();
  state->first = cpu_arguments(op, args);
  auto& schema = op.schema();
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < args.size(); i++)
    if (is_written(schema.arguments()[i]) && args[i].isTensor() && is_npu(args[i].toTensor())) {
      auto npu = args[i].toTensor();
      if (!npu.numel()) state->first[i] = at::empty(npu.sizes(), npu.options().device(at::kCPU));
      written.emplace_back(npu, state->first[i].toTensor());
    }
  launch(full_name(op), [op, state] {
    try {
      run_kernel(op, &state->first);
    } catch (...) {
      state->second = std::current_exception();
    }
  });
  settle();
  if (state->second) std::rethrow_exception(state->second);
  for (auto& [npu, cpu] : written) {
    if (npu.sizes().equals(cpu.sizes())) continue;
    npu.resize_(cpu.sizes());
    if (npu.numel()) cpu_view(npu).copy_(cpu);
  }
  for (size_t i = 0; i < schema.returns().size(); i++) {
    IValue v;
    if (auto returned = returned_argument(schema, i, args)) {
      v = allocate(*returned, args);
    } else {
      v = state->first[i];
      if (v.isTensor()) v = to_npu(v.toTensor());
      else if (v.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(to_npu(t));
        v = list;
      }
    }
    results->push_back(v);
  }
}
}  // namespace

// The argument that a return value is, by the schema.
std::optional<Result> returned_argument(const c10::FunctionSchema& schema, size_t result, const Stack& args) {
  Result found;
  found.kind = Result::kArgument;
  if (auto ra = schema.returns()[result].alias_info(); ra && ra->isWrite())
    for (found.argument = 0; found.argument < args.size(); found.argument++) {
      auto aa = schema.arguments()[found.argument].alias_info();
      if (aa && *aa == *ra) return found;
    }
  found.element = result;
  for (found.argument = 0; found.argument < args.size(); found.argument++) {
    auto& a = schema.arguments()[found.argument];
    if (a.name() == "out" && a.kwarg_only() && args[found.argument].isTensorList()) return found;
  }
  return std::nullopt;
}

static bool is_out(const c10::FunctionSchema& schema, const Result& r) {
  return r.kind == Result::kArgument && r.element < 0 && schema.arguments()[r.argument].is_out();
}

// What happens to be in memory could be taken for a token or an index by whoever reads it.
static void clear_integers(const IValue& v) {
  if (!v.isTensor() || !is_npu(v.toTensor())) return;
  const Tensor& t = v.toTensor();
  if (c10::isIntegralType(t.scalar_type(), true) && t.nbytes() <= kSmall && t.is_contiguous())
    std::memset(t.data_ptr(), 0, t.nbytes());
}

// Gives tensors of the right shapes and computes nothing.
static void shapes_only(const c10::OperatorHandle& op, const Stack& args, Stack* results) {
  auto known = recall(op, args);
  if (!known->inferred) return run_settled(op, args, results);
  resize(args, known->inference);
  for (auto& r : known->inference.results) {
    results->push_back(allocate(r, args));
    if (r.kind == Result::kFresh || is_out(op.schema(), r)) clear_integers(results->back());
  }
  if (known->books) launch(known->name, [known, args] { known->books(args); });
  else launch(known->name, {});
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto& schema = op.schema();
  size_t n = schema.arguments().size();
  Stack args(stack->end() - n, stack->end());
  stack->erase(stack->end() - n, stack->end());

  if (!computes()) return shapes_only(op, args, stack);
  Inference inference;
  if (!infer(op, args, &inference)) {
    TORCH_CHECK(!capturing(), "simnpu: ", full_name(op), " needs values while a graph is being captured");
    return run_settled(op, args, stack);
  }
  resize(args, inference);
  Stack results;
  std::vector<Tensor> targets;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    IValue v;
    if (auto returned = returned_argument(schema, i, args)) {
      v = allocate(*returned, args);
      for (size_t e = 0; e < (v.isTensorList() ? v.toTensorVector().size() : 1); e++) targets.push_back(Tensor());
    } else {
      v = allocate(inference.results[i], args);
      collect(inference.results[i], v, &targets);
    }
    results.push_back(v);
  }
  launch(full_name(op), [op, in = cpu_arguments(op, args), targets] {
    Stack work = in;
    run_kernel(op, &work);
    deliver(work, targets);
  });
  for (auto& v : results) stack->push_back(v);
}
}  // namespace simnpu
