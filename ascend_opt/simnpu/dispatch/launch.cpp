// Putting work on the current stream.
#include "dispatch.h"
#include <c10/core/InferenceMode.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

namespace at_npu::native {
// Of torch_npu's OpCommand, the one entry that operator libraries launch through: it runs the
// function here, or in torch_npu's task queue where TASK_QUEUE_ENABLE is on, after what is queued.
class OpCommand {
 public:
  static void RunOpApiV2(const std::string& name, const std::function<int()>& run, bool sync);
};
}  // namespace at_npu::native

namespace simnpu {
namespace {
struct Work {
  std::string name;
  std::function<void()> run;
};

void run_work(void* arg) {
  auto* work = static_cast<Work*>(arg);
  // The arguments may have been made under inference mode, where only inference mode may write them.
  c10::InferenceMode inference;
  try {
    work->run();
  } catch (const std::exception& e) {
    simnpu_work_failed((work->name + " failed while the device ran it: " + e.what()).c_str());
  }
}
void drop_work(void* arg) { delete static_cast<Work*>(arg); }
}  // namespace

void launch(const std::string& name, std::function<void()> run) {
  if (simnpu_on_device_thread()) return run();
  void* stream = c10_npu::getCurrentNPUStream().stream(false);
  if (!run) {
    at_npu::native::OpCommand::RunOpApiV2(
        name, [=] { return simnpu_enqueue(stream, name.c_str(), nullptr, nullptr, nullptr); }, false);
    return;
  }
  auto* work = new Work{name, std::move(run)};
  at_npu::native::OpCommand::RunOpApiV2(
      name, [=] { return simnpu_enqueue(stream, work->name.c_str(), run_work, drop_work, work); }, false);
}

void settle() {
  if (simnpu_on_device_thread()) return;
  void* stream = c10_npu::getCurrentNPUStream().stream(true);  // empties torch_npu's task queue first
  TORCH_CHECK(simnpu_settle(stream) == 0, "simnpu: ", aclGetRecentErrMsg());
}

bool capturing() { return simnpu_capturing(c10_npu::getCurrentNPUStream().stream(false)); }
}  // namespace simnpu
