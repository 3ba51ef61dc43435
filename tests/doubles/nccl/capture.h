// Streams that pretend to be captured into a graph.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_CAPTURE_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_CAPTURE_H_

#include <cstdint>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {

bool IsCapturing(cuda::Stream stream);

// Whether the calling thread captures any stream.
bool CapturesHere();

// The number of the graph that is captured last, or now; and whether it has ended.
uint64_t LastGraph();
bool HasEnded(uint64_t graph);

// Whether `stream` is captured; if so the trace says that `function` broke the rule.
bool ViolatesCapture(const char* function, cuda::Stream stream);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_CAPTURE_H_
