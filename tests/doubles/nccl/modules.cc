// Modules and kernels. The only module is kernels.cu's, compiled for the host.

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/grid.h"
#include "tests/doubles/nccl/host_kernels.h"
#include "tests/doubles/nccl/settings.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

struct Kernel {
  const HostKernel* code = nullptr;
  int device = 0;
};

struct Module {
  int device = 0;
  std::vector<cuda::Function> functions;
};

Handles<cuda::Module, Module>& Modules() {
  static auto& modules = *new Handles<cuda::Module, Module>(0x20000000);
  return modules;
}

Handles<cuda::Function, Kernel>& Functions() {
  static auto& functions = *new Handles<cuda::Function, Kernel>(0x30000000);
  return functions;
}

const OpenKind kOpen("modules", [] { return Modules().size(); });

}  // namespace
}  // namespace jaxcomm::fake

namespace jaxcomm::cuda {

Result cuModuleLoadData(Module* module, const void* image) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuModuleLoadData");
  auto made = std::make_shared<fake::Module>();
  made->device = fake::CurrentDevice();
  if (made->device == fake::kNoDevice) return kInvalidContext;
  if (!fake::IsPtxOfKernels(static_cast<const char*>(image))) {
    fake::TraceEntry entry;
    entry.name = "cuModuleLoadData";
    entry.violation = "not the PTX of kernels.cu, which is all that the stand-in has";
    fake::Trace(entry);
    return kInvalidPtx;
  }
  *module = fake::Modules().Add(std::move(made));
  return kSuccess;
}

Result cuModuleUnload(Module module) {
  JAXCOMM_FAKE_CALL(kForbidden, "cuModuleUnload");
  const auto removed = fake::Modules().Remove(module);
  if (removed == nullptr) return kInvalidHandle;
  for (Function function : removed->functions) fake::Functions().Remove(function);
  return kSuccess;
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuModuleGetFunction");
  const auto found = fake::Modules().Find(module);
  if (found == nullptr) return kInvalidHandle;
  const fake::HostKernel* const code = fake::FindHostKernel(name);
  if (code == nullptr || (code->is_sum && !fake::RunsSumKernels())) return kNotFound;
  *function = fake::Functions().Add(
      std::make_shared<fake::Kernel>(fake::Kernel{code, found->device}));
  found->functions.push_back(*function);
  return kSuccess;
}

Result cuLaunchKernel(Function function, unsigned blocks, unsigned blocks_y,
                      unsigned blocks_z, unsigned threads, unsigned threads_y,
                      unsigned threads_z, unsigned, Stream stream, void** parameters,
                      void**) {
  JAXCOMM_FAKE_CALL(kAllowed, "cuLaunchKernel", 0, fake::Number(stream),
                    static_cast<int64_t>(blocks) * threads);
  const auto kernel = fake::Functions().Find(function);
  const auto on = fake::FindStream(stream, fake::CurrentDevice());
  if (kernel == nullptr || on == nullptr || on->device() != kernel->device) {
    fake::Misuse("a kernel or a stream of another device, or none");
    return kInvalidHandle;
  }
  if (blocks == 0 || threads == 0 || threads > 1024 || blocks_y != 1 || blocks_z != 1 ||
      threads_y != 1 || threads_z != 1) {
    return kInvalidValue;
  }
  const auto* const bytes = static_cast<const char*>(parameters[0]);
  std::vector<char> arguments(bytes, bytes + kernel->code->argument_bytes);
  on->Enqueue([kernel, blocks, threads, arguments = std::move(arguments)] {
    fake::RunGrid(blocks, threads, [&] { kernel->code->run(arguments.data()); });
  });
  return kSuccess;
}

}  // namespace jaxcomm::cuda
