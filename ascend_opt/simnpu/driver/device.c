// One device, always there; and the few answers that torch_npu insists on.
#include "simnpu.h"
#include <string.h>

static int current;

SIMNPU_API int aclInit(const char *config) {
  (void)config;
  return SIM_OK;
}
SIMNPU_API int aclFinalize(void) { return SIM_OK; }
SIMNPU_API int aclrtSetDevice(int32_t device) {
  if (device != 0)
    return sim_fail(SIM_BAD_ARGUMENT, "device %d: simnpu has one device, 0", (int)device);
  current = device;
  return SIM_OK;
}
SIMNPU_API int aclrtResetDevice(int32_t device) {
  (void)device;
  return SIM_OK;
}
SIMNPU_API int aclrtGetDevice(int32_t *device) {
  *device = current;
  return SIM_OK;
}
SIMNPU_API int aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return SIM_OK;
}
SIMNPU_API const char *aclrtGetSocName(void) { return "Ascend910B3"; }
SIMNPU_API int aclrtGetCurrentContext(void **context) {
  static int the_context;
  *context = &the_context;
  return SIM_OK;
}
SIMNPU_API int aclrtSetCurrentContext(void *context) {
  (void)context;
  return SIM_OK;
}
SIMNPU_API size_t aclGetCompileoptSize(int option) {
  (void)option;
  return 8;
}
SIMNPU_API int aclGetCompileopt(int option, char *value, size_t room) {
  (void)option;
  strncpy(value, "1", room);
  return SIM_OK;
}

// The older single-operator interface compiles a kernel by name. There is no such kernel here.
static int no_aclop(const char *name) {
  sim_count(CALL_aclop, NULL, 0, name);
  return sim_fail(SIM_FAILED, "simnpu has no kernel for the aclop %s", name);
}
SIMNPU_API int aclopCompileAndExecute(const char *name) { return no_aclop(name); }
SIMNPU_API int aclopCompileAndExecuteV2(const char *name) { return no_aclop(name); }

// Data symbols that torch_npu's ATB glue links against.
SIMNPU_API void _ZTHN3atb10g_hash_bufE(void) {}
SIMNPU_API void _ZTHN3atb13g_hash_offsetE(void) {}
