// A call site as a rank carries it out: made at its first call, and kept.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_RECIPE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_RECIPE_H_

#include <cstdint>
#include <memory>

#include "ffi/backends/nccl/engine_choice.h"
#include "ffi/backends/nccl/library.h"
#include "ffi/backends/nccl/peer_plan.h"
#include "ffi/backends/nccl/steps.h"
#include "ffi/base/status.h"
#include "ffi/core/call_site.h"

namespace jaxcomm {

struct Recipe {
  Steps steps;      // of the rank
  CallFacts facts;  // but for those of one call
  // The copies of all ranks; null if there are too few bytes for them, or nobody asked.
  std::shared_ptr<const PeerPlan> copies;
};

// Whose recipe it is.
struct RecipeOf {
  uint64_t communicator = 0;  // its NextCommunicatorNumber()
  int size = 0, rank = 0;
  bool with_copies = false;  // whether copy engines may do it
};

// Tells communicators of this process apart.
uint64_t NextCommunicatorNumber();

// Finds the recipe of a rank at a call site, which is kept as long as the site. Fails
// if NCCL cannot do the call.
Status FindRecipe(const NcclLibrary& library, CallSite& site, const RecipeOf& of,
                  const Recipe** recipe);

// Finds the copies of all ranks of a group. Without parts where the site has no plan
// that can be made in advance: FindRecipe() says why.
std::shared_ptr<const PeerPlan> FindPeerPlan(CallSite& site, uint64_t communicator,
                                             int size);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_RECIPE_H_
