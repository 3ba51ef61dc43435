// One custom call of a compiled program: its attributes, parsed when XLA
// instantiates the program, and what backends make of them.
#ifndef JAXCOMM_FFI_CORE_CALL_SITE_H_
#define JAXCOMM_FFI_CORE_CALL_SITE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/dtype.h"
#include "ffi/core/plan.h"
#include "ffi/os/mutex.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

class Communicator;

// How programs went on after calls of a site, until their next wait. Shared with ranks
// that outlive the site.
struct Pace {
  // One was seen to block. From then on each gets a thread at once. (Ten calls in turn
  // with jax.lax's among 8 devices on 2 cores: 8 times as long without this.)
  std::atomic<bool> stalls{false};
  // The last one ran for long, or there was none.
  std::atomic<bool> is_long{true};
};

class CallSite {
 public:
  // XLA sets the id when the type is registered as a handler's state.
  static xla::ffi::TypeId id;

  struct Attributes {
    std::string name;     // what the user called: "psum"
    std::string axes;     // for messages: "('data', 'context')"
    int64_t key = 0;      // of the communicator
    int64_t program = 0;  // the same for all call sites of one program
    ReduceOp reduce = ReduceOp::kSum;
    std::vector<int64_t> params;
    // What the call is a part of, with all that ranks must agree on:
    // "ring_attention(scale=0.5)". Empty of a call by itself.
    std::string part_of = {};
  };

  // `collective` must live longer.
  CallSite(Attributes attributes, const Collective& collective);

  const Attributes& attributes() const { return attributes_; }
  Plan::Kind kind() const { return collective_.kind; }

  // Unique in this process: a program inlines a function once per call, so
  // equal attributes do not mean the same place in the program.
  uint64_t serial() const { return serial_; }

  // The same for this place of the program on every process. XLA instantiates the call
  // sites of a program one after the other, in an order that depends on the program
  // alone. If processes disagree on the size of the program, no two tags are equal.
  // Requires that the program is complete: call this when it runs.
  uint64_t shared_tag();
  // The same for the program as a whole on every process.
  uint64_t program_tag() const;

  // Fixes the shapes, at the first execution: XLA does not say them earlier.
  bool has_shapes() const { return has_shapes_.load(std::memory_order_acquire); }
  void SetShapes(std::vector<Leaf> operands, std::vector<Leaf> results);
  const std::vector<Leaf>& operands() const { return operands_; }
  const std::vector<Leaf>& results() const { return results_; }
  int64_t operand_bytes() const { return operand_bytes_; }

  // Equal on two ranks exactly when collective, reduction, parameters, shapes, dtypes
  // and what the call is a part of are.
  uint64_t signature() const { return signature_; }
  // In the OperationTable; 0 without shapes.
  uint32_t operation() const { return operation_; }
  // "psum(float32[4,8], int32[])"
  std::string ToString() const;
  // ToString(), for messages about a call that may outlive its program. Null without
  // shapes.
  const std::shared_ptr<const std::string>& label() const { return label_; }
  // "psum(float32[4,8], int32[]) of ring_attention(scale=0.5) over axes ('i',)". Empty
  // without shapes.
  const std::string& description() const { return description_; }

  // Makes the plan for a group of `size` ranks. `operands_of`: null unless the plan
  // reads operands, see Planner.
  ErrorOr<Plan> MakePlan(int size, const void* const* const* operands_of) const;
  bool plan_reads_operands() const { return plan_reads_operands_from() >= 0; }
  int plan_reads_operands_from() const { return collective_.plan_reads_operands_from; }

  // Expires with the site.
  std::weak_ptr<const void> life() const { return life_; }

  const std::shared_ptr<Pace>& pace() const { return pace_; }

  // The communicator that was remembered at this epoch of the registry. Null if there
  // is none, or it has ended.
  std::shared_ptr<Communicator> CommunicatorAt(uint64_t epoch) const;
  void Remember(const std::shared_ptr<Communicator>& communicator, uint64_t epoch);

 private:
  const Attributes attributes_;
  const Collective& collective_;
  const uint64_t serial_;
  // Call sites of the program so far; this one is number ordinal_.
  const std::shared_ptr<std::atomic<uint64_t>> program_size_;
  const uint64_t ordinal_;
  std::atomic<uint64_t> shared_tag_{0};
  const std::shared_ptr<const void> life_ = std::make_shared<char>();
  const std::shared_ptr<Pace> pace_ = std::make_shared<Pace>();

  struct Known {
    std::weak_ptr<Communicator> communicator;
    std::atomic<uint64_t> epoch{0};
  };

  Mutex mutex_;
  // Read without the lock. So all live as long as the site: one for each communicator
  // that was closed and created again.
  std::atomic<Known*> known_{nullptr};
  std::vector<std::unique_ptr<Known>> all_known_ GUARDED_BY(mutex_);
  std::atomic<bool> has_shapes_{false};
  std::vector<Leaf> operands_;
  std::vector<Leaf> results_;
  int64_t operand_bytes_ = 0;
  uint64_t signature_ = 0;
  std::string description_;
  std::shared_ptr<const std::string> label_;
  uint32_t operation_ = 0;
};

// Call sites instantiated after this under the number `program` belong to a new
// program.
void BeginProgram(int64_t program);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_CALL_SITE_H_
