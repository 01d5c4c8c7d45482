// The Python module: registration, kernels written in Python, and what the driver asks of Python.
#include "dispatch.h"
#include <mutex>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>
#include <unordered_map>

namespace simnpu {
namespace {
// Python objects are let go of with the GIL held, whichever thread drops the last reference.
using Held = std::shared_ptr<py::object>;
Held hold(py::object o) {
  return Held(new py::object(std::move(o)), [](py::object* p) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete p;
  });
}

std::unordered_map<std::string, Held>& python_kernels() {
  static auto* kernels = new std::unordered_map<std::string, Held>;
  return *kernels;
}

// Python errors are bound to the GIL; what travels between threads is their text.
template <typename F> auto with_python(F&& f) {
  std::string error;
  {
    py::gil_scoped_acquire gil;
    // A collection on the device thread could free npu tensors, whose allocator may be locked by the
    // very thread that waits for the device.
    struct NoCollection {
      bool on = simnpu_on_device_thread() && PyGC_Disable();
      ~NoCollection() {
        if (on) PyGC_Enable();
      }
    } no_collection;
    try {
      return f();
    } catch (py::error_already_set& e) {
      error = e.what();
    }
  }
  throw std::runtime_error(error);
}

std::vector<std::unique_ptr<torch::Library>> libraries;
torch::Library& library(const std::string& ns) {
  static std::unordered_map<std::string, torch::Library*> known;
  auto it = known.find(ns);
  if (it == known.end()) {
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse1,
                                                         __FILE__, __LINE__));
    it = known.emplace(ns, libraries.back().get()).first;
  }
  return *it->second;
}

std::vector<std::string> bind(const std::vector<std::string>& operators) {
  std::vector<std::string> refused;
  for (auto& name : operators) {
    auto colons = name.find("::");
    try {
      library(name.substr(0, colons))
          .impl(name.substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    } catch (const std::exception&) {
      refused.push_back(name);
    }
  }
  return refused;
}

// An operator that has no kernel: Python decides whether this is an error.
py::object* on_missing = nullptr;
void missing(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto name = full_name(op);
  {
    // Raises unless placeholders are allowed here. We are in the caller's own thread, so its exception
    // may travel as it is.
    py::gil_scoped_acquire gil;
    (*on_missing)(name);
  }
  size_t n = op.schema().arguments().size();
  Stack args(stack->end() - n, stack->end());
  Inference inference;
  TORCH_CHECK(infer(op, args, &inference), "simnpu: no kernel and no shape function for ", name);
  stack->erase(stack->end() - n, stack->end());
  for (auto& r : inference.results) {
    if (r.kind == Result::kFresh)
      stack->push_back(at::zeros(r.sizes, at::TensorOptions().dtype(r.dtype).device(npu_device())));
    else
      stack->push_back(r.kind == Result::kArgument ? args[r.argument] : r.value);
  }
}
void bind_missing(const std::vector<std::string>& operators, py::object callback) {
  on_missing = new py::object(std::move(callback));
  for (auto& name : operators) {
    auto colons = name.find("::");
    try {
      library(name.substr(0, colons))
          .impl(name.substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunction<&missing>());
    } catch (const std::exception&) {
      // torch_npu keeps its own kernel: an aclnn call fails with its name.
    }
  }
}

// Where in the program is this thread? The innermost frame outside the frameworks' own plumbing.
int where(char* room, size_t size) {
  if (!Py_IsInitialized()) return 0;
  py::gil_scoped_acquire gil;
  static const char* plumbing[] = {"/torch/", "/torch_npu/", "/ascend_opt/simnpu/", "<frozen", "<string>",
                                   "/triton/", "/contextlib.py"};
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  int found = 0;
  while (frame && !found) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = py::str(py::handle(code->co_filename));
    bool skip = false;
    for (auto p : plumbing) skip = skip || file.find(p) != std::string::npos;
    if (!skip) {
      auto at = file.rfind("/site-packages/");
      if (at != std::string::npos) file = file.substr(at + 15);
      std::snprintf(room, size, "%s:%d", file.c_str(), PyFrame_GetLineNumber(frame));
      found = 1;
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}

void* release_gil() {
  return Py_IsInitialized() && PyGILState_Check() ? static_cast<void*>(PyEval_SaveThread()) : nullptr;
}
void retake_gil(void* state) {
  if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}
}  // namespace

bool has_python_kernel(const c10::OperatorHandle& op) { return python_kernels().count(full_name(op)); }

void run_python_kernel(const c10::OperatorHandle& op, Stack* stack) {
  auto kernel = python_kernels().at(full_name(op));
  auto& schema = op.schema();
  with_python([&] {
    py::list positional;
    py::dict named;
    size_t n = schema.arguments().size(), base = stack->size() - n;
    for (size_t i = 0; i < n; i++) {
      auto& a = schema.arguments()[i];
      py::object value = torch::jit::toPyObject((*stack)[base + i]);
      if (a.kwarg_only()) named[a.name().c_str()] = value;
      else positional.append(value);
    }
    py::object result = (*kernel)(*positional, **named);
    stack->erase(stack->end() - n, stack->end());
    auto& returns = schema.returns();
    if (returns.size() == 1) stack->push_back(torch::jit::toIValue(result, returns[0].type()));
    else
      for (size_t i = 0; i < returns.size(); i++)
        stack->push_back(torch::jit::toIValue(result[py::int_(i)], returns[i].type()));
  });
}

void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  if (has_python_kernel(op)) run_python_kernel(op, stack);
  else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}
}  // namespace simnpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simnpu;
  m.def("alias", &cpu_view, "A CPU tensor over the bytes of an npu tensor; keeps nothing alive.");
  m.def("bind", &bind, "Put the boxed kernel behind these operators; returns the names it could not take.");
  m.def("bind_missing", &bind_missing, "Operators without a kernel, and who decides what to do about it.");
  m.def("add_kernel", [](const std::string& name, py::object f) { python_kernels()[name] = hold(std::move(f)); });
  m.def("launch", [](const std::string& name, py::object f) {
    auto held = hold(std::move(f));
    launch(name, [held] { with_python([&] { (*held)(); }); });
  });
  m.def("computes", &computes);
  m.def("launch_nothing", [](const std::string& name) { launch(name, {}); }, "A kernel that returns at once.");
  m.def("kernels_with_books", &kernels_with_books);
  m.def("keep_books", &keep_books, "A kernel whose effect an engine needs to run, without compute too.");
  m.def("settle", &settle, py::call_guard<py::gil_scoped_release>());
  m.def("capturing", &capturing);
  m.def("install", [] {
    keep_original_copy();
    library("aten").impl("copy_", TORCH_FN(copy_));
    library("aten").impl("_to_copy", TORCH_FN(to_copy));
    simnpu_set_wait_hooks(release_gil, retake_gil);
    simnpu_set_where(where);
  });
}
