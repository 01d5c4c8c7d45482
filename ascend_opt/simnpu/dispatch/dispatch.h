// Operators of the simulated device: what the files of this library share.
//
// An NPU tensor's memory is host memory, so any operator can run as a CPU kernel
// over the same bytes. It may not run at the call, though: it is queued on the
// current stream, and its results are NPU tensors allocated beforehand.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace simnpu {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
inline bool is_npu(const Tensor& t) { return t.defined() && t.device().type() == kNpu; }
std::string full_name(const c10::OperatorHandle& op);

// aliases.cpp
// A CPU tensor over an NPU tensor's bytes. It keeps nothing alive: as on a card,
// freed memory may be reused by later work of the same stream.
Tensor cpu_view(const Tensor& t);
// Copies the bytes of a CPU tensor into a new NPU tensor, at once. Only for a settled stream.
Tensor to_npu(const Tensor& cpu);
c10::Device npu_device();

// launch.cpp
void launch(const std::string& name, std::function<void()> work); // work may be empty
void settle(); // waits, on behalf of the test bed, for the current stream
bool capturing();

// infer.cpp: what an operator will return, without running it on its data.
struct Result {
  enum { kOther, kFresh, kArgument, kList } kind = kOther;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  size_t argument = 0;   // kArgument: which, and
  int element = -1;      // which of a list
  std::vector<Result> items;
  IValue value;
};
struct Inference {
  std::vector<Result> results;
  // Arguments that are written and change their size: argument, element, new sizes.
  std::vector<std::tuple<size_t, int, std::vector<int64_t>>> resized;
};
bool infer(const c10::OperatorHandle& op, const Stack& args, Inference* out);

// books.cpp: without compute, kernels return at once; these keep an engine's books all the same.
constexpr size_t kSmall = 64 << 10; // bytes: SIM_SMALL of the driver
bool computes();
std::vector<std::string> kernels_with_books();
void keep_books(const std::string& kernel, const std::map<std::string, Tensor>& arguments);
using OperatorBooks = void (*)(const Stack& args);
OperatorBooks operator_books(const std::string& name); // or null

// recall.cpp: what infer() says, remembered by everything that shapes depend on.
struct Recalled {
  std::string name;
  bool inferred = false;
  OperatorBooks books = nullptr;
  Inference inference; // a result that is an argument says so
};
std::shared_ptr<const Recalled> recall(const c10::OperatorHandle& op, const Stack& args);
std::optional<Result> returned_argument(const c10::FunctionSchema& schema, size_t result, const Stack& args);
bool is_written(const c10::Argument& a);

// kernels.cpp: kernels written in Python
bool has_python_kernel(const c10::OperatorHandle& op);
void run_python_kernel(const c10::OperatorHandle& op, Stack* stack);
void run_kernel(const c10::OperatorHandle& op, Stack* stack);

// boxed.cpp
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

// copies.cpp
void keep_original_copy();
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking);
Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format);
}  // namespace simnpu

extern "C" { // the simulated driver
int simnpu_enqueue(void* stream, const char* name, void (*run)(void*), void (*drop)(void*), void* arg);
int simnpu_settle(void* stream);
int simnpu_capturing(void* stream);
extern int simnpu_computes;
int simnpu_on_device_thread(void);
const char* aclGetRecentErrMsg(void);
void simnpu_work_failed(const char* text);
void simnpu_set_wait_hooks(void* (*before)(void), void (*after)(void*));
void simnpu_set_where(int (*fn)(char*, size_t));
}
