#include "ffi/backends/nccl/exchange.h"

namespace jaxcomm {

Status Exchange::Prepare() {
  if (is_prepared_) return OkStatus();
  MutexLock lock(preparing_);
  const NcclLibrary& library = parts_.library;
  for (const auto& rank : parts_.ranks) {
    if (rank->facts.size < 2) continue;
    Item& item = items_[rank->facts.place];
    CurrentContext current(library.cuda, rank->facts.context);
    if (item.on_host == nullptr) {
      void* host = nullptr;
      RETURN_IF_ERROR(library.Try(library.cuda.MemAllocHost, &host, BytesOf(*rank)));
      item.on_host = static_cast<char*>(host);
    }
    if (item.on_device == 0) {
      RETURN_IF_ERROR(
          library.Try(library.cuda.MemAlloc, &item.on_device, BytesOf(*rank)));
    }
  }
  is_prepared_ = true;
  return OkStatus();
}

Exchange::~Exchange() {
  for (const auto& rank : parts_.ranks) {
    const Item& item = items_[rank->facts.place];
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    if (item.on_device != 0) parts_.library.cuda.MemFree(item.on_device);
    if (item.on_host != nullptr) parts_.library.cuda.MemFreeHost(item.on_host);
  }
}

Status Exchange::Gather(const LocalRank& rank, size_t bytes, cuda::Stream stream) {
  const size_t place = rank.facts.place;
  const cuda::Pointer from = own_on_device(place), to = gathered_on_device(place);
  const nccl::Comm comm = parts_.comms.comm(place);
  if (comm == nullptr) return parts_.health.failure();
  const nccl::Result result = parts_.library.nccl.AllGather(
      reinterpret_cast<void*>(from), reinterpret_cast<void*>(to), bytes,
      nccl::Type::kInt8, comm, stream);
  return parts_.comms.Finish(result, comm, "ncclAllGather",
                             parts_.spec.timeout_seconds);
}

Status Exchange::Give(const LocalRank& rank, size_t bytes, cuda::Stream stream) {
  RETURN_IF_ERROR(Gather(rank, bytes, stream));
  const size_t place = rank.facts.place;
  return parts_.library.Try(
      parts_.library.cuda.MemcpyDtoHAsync, items_[place].on_host + most_bytes_,
      gathered_on_device(place), static_cast<size_t>(rank.facts.size) * bytes, stream);
}

int64_t Exchange::device_bytes() const {
  if (!is_prepared_) return 0;
  int64_t bytes = 0;
  for (const auto& rank : parts_.ranks) {
    if (rank->facts.size > 1) bytes += static_cast<int64_t>(BytesOf(*rank));
  }
  return bytes;
}

}  // namespace jaxcomm
