#include "ffi/backends/nccl/failure/poison.h"

namespace jaxcomm {

ErrorOr<std::unique_ptr<Poison>> Poison::Create(
    const NcclLibrary& library, const std::vector<cuda::Context>& contexts) {
  std::unique_ptr<Poison> made(new Poison(library, contexts[0]));
  CurrentContext current(library.cuda, contexts[0]);
  void* word = nullptr;
  RETURN_IF_ERROR(library.Try(library.cuda.MemAllocHost, &word, sizeof(uint32_t)));
  made->word_ = static_cast<uint32_t*>(word);
  *made->word_ = 0;
  for (cuda::Context context : contexts) {
    ASSIGN_OR_RETURN(made->kernels_.emplace_back(),
                     DeviceKernels::Load(library, context));
  }
  return made;
}

Poison::~Poison() {
  CurrentContext current(library_.cuda, context_);
  if (word_ != nullptr) library_.cuda.MemFreeHost(word_);
}

Status Poison::Give(const Call& call, size_t place, cuda::Stream stream) const {
  PoisonArguments arguments;
  arguments.word = reinterpret_cast<uint64_t>(word_);
  const std::vector<Leaf>& results = call.site->results();
  for (size_t i = 0; i < results.size(); ++i) {
    const auto bytes = static_cast<uint64_t>(results[i].bytes());
    if (bytes == 0) continue;
    arguments.results[arguments.count++] = {reinterpret_cast<uint64_t>(call.results[i]),
                                            bytes};
    if (arguments.count < PoisonArguments::kMostPoisoned) continue;
    RETURN_IF_ERROR(kernels_[place]->Poison(arguments, stream));
    arguments.count = 0;
  }
  return arguments.count == 0 ? OkStatus() : kernels_[place]->Poison(arguments, stream);
}

}  // namespace jaxcomm
