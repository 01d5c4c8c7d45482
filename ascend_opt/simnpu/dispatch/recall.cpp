// Without compute, asking a Meta kernel would be most of what a call costs, so answers are kept, by
// everything that shapes can depend on: dtypes, sizes and strides of tensors, and integers.
#include "dispatch.h"
#include <mutex>
#include <unordered_map>

namespace simnpu {
namespace {
using Key = std::vector<int64_t>;
struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = key.size();
    for (uint64_t x : key) h = (h ^ (x + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2))) * 0xff51afd7ed558ccdULL;
    return h;
  }
};

// Kinds of argument, so that no two lists of arguments read the same.
enum { kUndefined = -1, kNothing = -2, kNumber = -3, kString = -4 };

void put(Key* key, const Tensor& t) {
  if (!t.defined()) return key->push_back(kUndefined);
  bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
  key->push_back((int64_t)t.scalar_type() * 4 + is_npu(t) * 2 + wrapped);
  key->push_back(t.dim());
  key->insert(key->end(), t.sizes().begin(), t.sizes().end());
  key->insert(key->end(), t.strides().begin(), t.strides().end());
}

bool numbers_are_shapes(const std::string& name) {
  for (auto s : {"aten::arange", "aten::range", "aten::linspace", "aten::logspace"})
    if (name.rfind(s, 0) == 0) return true;
  return false;
}

// Returns whether the value could be described.
bool put(Key* key, const IValue& v, const c10::Argument& a, bool with_numbers) {
  bool number = a.type()->kind() == c10::TypeKind::NumberType && !with_numbers;
  if (v.isTensor()) put(key, v.toTensor());
  else if (v.isNone() || v.isGenerator()) key->push_back(kNothing);
  else if (number) key->insert(key->end(), {kNumber, (int64_t)v.isInt(), (int64_t)v.isBool()});
  else if (v.isInt()) key->push_back(v.toInt());
  else if (v.isBool()) key->push_back(v.toBool());
  else if (v.isDouble()) {
    double d = v.toDouble();
    key->push_back(with_numbers ? *reinterpret_cast<int64_t*>(&d) : kNumber);
  } else if (v.isString()) {
    key->insert(key->end(), {kString, (int64_t)std::hash<std::string_view>()(v.toStringRef())});
  } else if (v.isDevice()) key->push_back((int64_t)v.toDevice().type());
  else if (v.isIntList()) {
    auto list = v.toIntVector();
    key->push_back(list.size());
    // Lengths of sequences change with every step, and no shape with them.
    if (a.name().rfind("actual_", 0) != 0) key->insert(key->end(), list.begin(), list.end());
  } else if (v.isTensorList()) {
    auto list = v.toTensorVector();
    key->push_back(list.size());
    for (const Tensor& t : list) put(key, t);
  } else if (v.isOptionalTensorList()) {
    auto list = v.toOptionalTensorVector();
    key->push_back(list.size());
    for (const std::optional<Tensor>& t : list) put(key, t.value_or(Tensor()));
  } else return false;
  return true;
}

std::shared_ptr<Recalled> find_out(const c10::OperatorHandle& op, const std::string& name, const Stack& args) {
  auto found = std::make_shared<Recalled>();
  found->name = name;
  found->books = operator_books(name);
  found->inferred = infer(op, args, &found->inference);
  if (!found->inferred) return found;
  auto& schema = op.schema();
  found->inference.results.resize(schema.returns().size());
  for (size_t i = 0; i < schema.returns().size(); i++)
    if (auto returned = returned_argument(schema, i, args)) found->inference.results[i] = *returned;
  return found;
}

struct Known {
  std::string name;
  bool with_numbers;
  std::unordered_map<Key, std::shared_ptr<const Recalled>, Hash> by_key;
};
}  // namespace

std::shared_ptr<const Recalled> recall(const c10::OperatorHandle& op, const Stack& args) {
  static std::mutex mutex;
  static auto* operators = new std::unordered_map<const c10::FunctionSchema*, Known>;
  thread_local Key key;
  auto& schema = op.schema();
  // Whether values are needed is asked again while a graph is captured.
  key.assign(1, capturing());
  Known* known;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto [at, added] = operators->try_emplace(&schema);
    known = &at->second; // stays where it is
    if (added) known->name = full_name(op), known->with_numbers = numbers_are_shapes(known->name);
  }
  for (size_t i = 0; i < args.size(); i++)
    if (!put(&key, args[i], schema.arguments()[i], known->with_numbers)) return find_out(op, known->name, args);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto at = known->by_key.find(key);
    if (at != known->by_key.end()) return at->second;
  }
  Key kept = key; // finding out may come back here
  auto found = find_out(op, known->name, args);
  std::lock_guard<std::mutex> lock(mutex);
  return known->by_key.try_emplace(std::move(kept), found).first->second;
}
}  // namespace simnpu
