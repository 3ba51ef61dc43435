// A communicator of NVIDIA GPUs: the ranks of this process, and the engines that carry
// out their calls.
//
// Its parts, each with a header: engine_choice says which engine does a call; engines/
// are NCCL, copy engines and our own kernel of small sums; launch_queue gives a rank's
// calls to streams and follows them; health says whether calls are taken, and ends the
// communicator; comms has NCCL's communicators; call_check compares calls.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ffi/backends/nccl/call_check.h"
#include "ffi/backends/nccl/comms.h"
#include "ffi/backends/nccl/engine_choice.h"
#include "ffi/backends/nccl/engines/copy_engine.h"
#include "ffi/backends/nccl/engines/nccl_engine.h"
#include "ffi/backends/nccl/engines/one_shot_engine.h"
#include "ffi/backends/nccl/health.h"
#include "ffi/backends/nccl/local_rank.h"
#include "ffi/backends/nccl/symmetric_memory.h"
#include "ffi/backends/nccl/world.h"
#include "ffi/core/communicator.h"

namespace jaxcomm {

struct NcclSpec {
  std::shared_ptr<NcclWorld> world;
  NcclSettings settings;
  NcclPatience patience;
  // Whether copy engines may move bytes, where all ranks are of this process.
  bool copy_engines = false;
  // Whether small sums may go by a kernel of ours, where all ranks are of this host.
  bool one_shot = false;
  OnFailure on_failure = OnFailure::kRaise;
  // Whether ranks compare what they call before each call.
  bool check = false;
};

class NcclCommunicator final : public Communicator,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(CommunicatorSpec spec, NcclSpec how);
  ~NcclCommunicator() override;

  // Makes it with the other processes, connects its ranks and waits for all of them.
  Status Make();

  Status Enqueue(const Call& call, void* stream) override;
  Status EnqueueStart(const Call& call, void* stream) override;
  Status EnqueueDone(const Call& call, void* stream) override;
  // For CPU devices, which a test double serves.
  xla::ffi::Future Execute(const Call& call) override;
  void Abort(const Status& reason) override;
  CommunicatorStats stats() const override;

  // Registers a segment with NCCL, once; every process of the communicator calls it.
  // Says how it is registered, or why NCCL refused, which is no error.
  Status Register(const std::shared_ptr<SymmetricMemory>& memory, std::string* how);
  // Gives device memory back until Resume(), where NCCL can; every process calls them.
  // Operations in between fail.
  Status Suspend() { return SuspendOrResume(true); }
  Status Resume() { return SuspendOrResume(false); }
  // Fails because something did elsewhere: another process says so.
  void FailElsewhere(const std::string& reason) { health_.FailElsewhere(reason); }

  // Which engine does such a call of the first local rank, and why.
  Status Explain(CallSite& site, EngineChoice* choice);

 private:
  struct Request {
    LocalRank* rank = nullptr;
    const Recipe* recipe = nullptr;
    Engine* engine = nullptr;
  };

  Status MakeEngines();
  Status WarmUp();
  // Finds the rank of a call that came for `stream`.
  Status FindRank(const Call& call, cuda::Stream stream, LocalRank** rank);
  // Finds the engine that does a call, once the rank may make it. `may_wait`: whether
  // the call's thread may wait for the calls of other ranks.
  Status FindEngine(const Call& call, bool may_wait, Request* request);
  EngineChoice ChooseFor(const CallFacts& facts, size_t place) const;
  RecipeOf RecipeFor(const RankFacts& facts) const;
  Status SuspendOrResume(bool suspend);
  Status SuspendNow(bool suspend);
  int64_t DeviceBytesNow() const;
  bool shares_memory() const;

  const NcclSpec how_;
  const NcclLibrary& library_;
  const uint64_t number_;
  Health health_;
  LocalRanks ranks_;
  Comms comms_;
  NcclEngine nccl_;
  std::unique_ptr<CopyEngine> copy_;         // null where NCCL moves all
  std::unique_ptr<OneShotEngine> one_shot_;  // null where NCCL adds all
  std::unique_ptr<CallCheck> check_;         // null where ranks do not compare calls
  int64_t device_bytes_ = 0;                 // that it took when it was made
};

// Makes a communicator: see NcclCommunicator::Make(). Groups of one get no communicator
// of NCCL's.
Status MakeNcclCommunicator(CommunicatorSpec spec, NcclSpec how,
                            std::shared_ptr<Communicator>* communicator);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_NCCL_COMMUNICATOR_H_
