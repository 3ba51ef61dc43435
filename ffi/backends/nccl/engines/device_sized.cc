#include "ffi/backends/nccl/engines/device_sized.h"

#include <algorithm>
#include <utility>

#include "ffi/backends/nccl/plans/engine_choice.h"
#include "ffi/flight/operation_table.h"
#include "ffi/planners/collectives.h"

namespace jaxcomm {
namespace {

using Arguments = RaggedArguments;

// The operands: what is sent, what the result is made of, and the numbers.
constexpr size_t kData = 0, kOutput = 1, kNumbers = 2;
// Behind the halves of an arena: the word of the check, and one that ranks add up to
// wait for each other.
constexpr size_t kWordsBytes = 256;
constexpr unsigned kThreads = 512;
// The blocks that send, and as many that receive: they fill the links of an H100.
constexpr uint32_t kBlocks = 32;

uint64_t AddressOf(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// The numbers of all ranks, as a planner takes them.
class NumbersOfRanks {
 public:
  NumbersOfRanks(const void* numbers, size_t array_bytes, int size) {
    const auto* data = static_cast<const char*>(numbers);
    for (int rank = 0; rank < size; ++rank) {
      auto& operands = operands_.emplace_back(kNumbers + Arguments::kNumbers);
      for (size_t i = kNumbers; i < operands.size(); ++i, data += array_bytes) {
        operands[i] = data;
      }
    }
    for (const auto& operands : operands_) of_ranks_.push_back(operands.data());
  }

  const void* const* const* get() const { return of_ranks_.data(); }

 private:
  std::vector<std::vector<const void*>> operands_;
  std::vector<const void* const*> of_ranks_;
};

bool IsIndex(DataType type) {
  return type == DataType::S32 || type == DataType::U32 || type == DataType::S64 ||
         type == DataType::U64;
}

DataType IndexOf(const RaggedRefusal& refusal) {
  if (refusal.index_bytes == 8) {
    return refusal.is_signed != 0 ? DataType::S64 : DataType::U64;
  }
  return refusal.is_signed != 0 ? DataType::S32 : DataType::U32;
}

// What does not fit in a call that was refused. The planner says it: shapes are as good
// as their numbers of rows.
std::string ReasonOf(const RaggedRefusal& refusal, int size) {
  const auto rows = [](uint64_t count) {
    return Leaf{
        DataType::U8, {static_cast<int64_t>(count)}, static_cast<int64_t>(count), 1};
  };
  const Leaf numbers{
      IndexOf(refusal), {refusal.slices}, refusal.slices, refusal.index_bytes};
  std::vector<Leaf> operands(kNumbers + Arguments::kNumbers, numbers);
  operands[kData] = rows(refusal.operand_rows);
  operands[kOutput] = rows(refusal.output_rows);
  const std::vector<Leaf> results = {operands[kOutput]};
  const std::vector<int64_t> params;
  const NumbersOfRanks of_ranks(refusal.numbers, refusal.number_bytes, size);
  Plan plan;
  const Status status =
      kRaggedAllToAll.planner({size, operands, results, params}, of_ranks.get(), &plan);
  if (status.failure()) return std::string(status.message());
  return "a GPU found that offsets and sizes do not fit, which a look at them does not "
         "confirm";
}

}  // namespace

ErrorOr<std::unique_ptr<DeviceSized>> DeviceSized::Create(
    NcclParts& parts, Exchange& numbers, uint64_t window_bytes,
    std::unique_ptr<PeerMemory> arenas) {
  std::unique_ptr<DeviceSized> made(
      new DeviceSized(parts, numbers, window_bytes, std::move(arenas)));
  for (const auto& rank : parts.ranks) {
    if (rank->facts.size < 2) continue;
    // Not an error: the other processes would wait for this one. They learn of it.
    if (Status able = made->Prepare(*rank); able.failure()) {
      made->arenas_->SetUnable(rank->facts.place, able);
      continue;
    }
    RETURN_IF_ERROR(made->arenas_->Take(rank->facts.place,
                                        2 * window_bytes + kWordsBytes,
                                        /*zeroed=*/kWordsBytes));
  }
  made->arenas_->ShareHere();
  return made;
}

Status DeviceSized::Prepare(const LocalRank& rank) {
  const NcclLibrary& library = parts_.library;
  CurrentContext current(library.cuda, rank.facts.context);
  Member& member = members_[rank.facts.place];
  ASSIGN_OR_RETURN(member.kernels, DeviceKernels::Load(library, rank.facts.context));
  ASSIGN_OR_RETURN(member.give, member.kernels->Find(kRaggedGive));
  ASSIGN_OR_RETURN(member.check, member.kernels->Find(kRaggedCheck));
  ASSIGN_OR_RETURN(member.move, member.kernels->Find(kRaggedMove));
  RETURN_IF_ERROR(
      library.Try(library.cuda.EventCreate, &member.last, cuda::kEventDisableTiming));
  void* memory = nullptr;
  RETURN_IF_ERROR(
      library.Try(library.cuda.MemAllocHost, &memory, sizeof(RaggedRefusal)));
  member.refusal = new (memory) RaggedRefusal();
  return OkStatus();
}

DeviceSized::~DeviceSized() {
  Leave();
  const cuda::Api& cuda = parts_.library.cuda;
  for (const auto& rank : parts_.ranks) {
    const Member& member = members_[rank->facts.place];
    CurrentContext current(cuda, rank->facts.context);
    if (member.last != nullptr) cuda.EventDestroy(member.last);
    if (member.refusal != nullptr) cuda.MemFreeHost(member.refusal);
  }
}

void DeviceSized::Leave() {
  if (has_left_) return;
  has_left_ = true;
  bool is_busy = false;
  for (const auto& rank : parts_.ranks) {
    const Member& member = members_[rank->facts.place];
    CurrentContext current(parts_.library.cuda, rank->facts.context);
    is_busy =
        is_busy || (member.stream != nullptr &&
                    parts_.library.cuda.EventQuery(member.last) == cuda::kNotReady);
  }
  arenas_->Leave(is_busy, parts_.health.ends_by_force());
}

bool DeviceSized::Takes(const CallSite& site, const RankFacts& rank) {
  return arenas_->is_shared(rank.place) && ArgumentsOf(site, rank).has_value();
}

const std::optional<RaggedArguments>& DeviceSized::ArgumentsOf(const CallSite& site,
                                                               const RankFacts& rank) {
  using Made = std::optional<RaggedArguments>;
  const auto make = [&]() -> ErrorOr<Made> { return MakeArguments(site, rank); };
  return **members_[rank.place].sites.Find(site, make);
}

std::optional<RaggedArguments> DeviceSized::MakeArguments(const CallSite& site,
                                                          const RankFacts& rank) const {
  const std::vector<Leaf>& leaves = site.operands();
  if (site.kind() != Plan::Kind::kRaggedAllToAll) return std::nullopt;
  // Shapes are data, and may come from elsewhere. The planner knows which fit.
  const std::vector<char> zeros(RaggedRefusal::kMostBytes);
  const NumbersOfRanks nothing(zeros.data(), /*array_bytes=*/0, rank.size);
  if (site.MakePlan(rank.size, nothing.get()).has_error()) return std::nullopt;
  const Leaf &data = leaves[kData], &output = leaves[kOutput];
  const Leaf& numbers = leaves[kNumbers];
  const bool is_of_one_type =
      std::all_of(leaves.begin() + kNumbers, leaves.end(),
                  [&](const Leaf& leaf) { return leaf.dtype == numbers.dtype; });
  if (!is_of_one_type || !IsIndex(numbers.dtype) || output.bytes() == 0) {
    return std::nullopt;
  }
  if (!SizesAreForGpus(data.bytes(), output.bytes(),
                       static_cast<int64_t>(window_bytes_))) {
    return std::nullopt;
  }
  const auto number_bytes = (static_cast<size_t>(numbers.bytes()) + 7) & ~size_t{7};
  if (Arguments::kNumbers * number_bytes > RaggedRefusal::kMostBytes) {
    return std::nullopt;
  }
  Arguments made;
  const cuda::Pointer words = arenas_->own(rank.place) + 2 * window_bytes_;
  made.own = numbers_.own_on_device(rank.place);
  made.gathered = numbers_.gathered_on_device(rank.place);
  made.verdict = words;
  made.refusal = AddressOf(members_[rank.place].refusal);
  for (int each = 0; each < rank.size; ++each) {
    made.arenas[each] = arenas_->of(rank.place, each);
  }
  made.operand_rows = static_cast<uint64_t>(data.dims[0]);
  made.output_rows = static_cast<uint64_t>(output.dims[0]);
  made.row_bytes = static_cast<uint64_t>(output.bytes()) / made.output_rows;
  made.window_bytes = window_bytes_;
  made.rank = static_cast<uint32_t>(rank.rank);
  made.ranks = static_cast<uint32_t>(rank.size);
  made.slices = static_cast<uint32_t>(numbers.elements);
  made.index_bytes = static_cast<uint32_t>(numbers.element_bytes);
  made.is_signed = numbers.dtype == DataType::S32 || numbers.dtype == DataType::S64;
  made.number_bytes = static_cast<uint32_t>(number_bytes);
  made.lanes = (kBlocks + made.ranks - 2) / (made.ranks - 1);
  made.operation = site.operation();
  return made;
}

Status DeviceSized::Enqueue(const Call& call, LocalRank& rank, cuda::Stream stream) {
  if (FailIfRefused(rank.facts)) {
    rank.queue.Refuse(call);
    return parts_.health.failure();
  }
  RETURN_IF_ERROR(rank.queue.Give(call, stream, rank.queue.Record(call),
                                  [&] { return Launch(call, rank, stream); }));
  rank.queue.counts().Add(*call.site, CallCounts::Kind::kDeviceSized);
  return OkStatus();
}

Status DeviceSized::KeepOrder(size_t place, cuda::Stream stream) const {
  const Member& member = members_[place];
  if (member.stream == nullptr || member.stream == stream) return OkStatus();
  return parts_.library.Try(parts_.library.cuda.StreamWaitEvent, stream, member.last,
                            0);
}

Status DeviceSized::Launch(const Call& call, LocalRank& rank, cuda::Stream stream) {
  Member& member = members_[rank.facts.place];
  Arguments arguments = *ArgumentsOf(*call.site, rank.facts);
  arguments.operand = AddressOf(call.operands[kData]);
  arguments.result = AddressOf(call.results[0]);
  for (size_t i = 0; i < Arguments::kNumbers; ++i) {
    arguments.given[i] = AddressOf(call.operands[kNumbers + i]);
  }
  RETURN_IF_ERROR(KeepOrder(rank.facts.place, stream));
  RETURN_IF_ERROR(LaunchKernel(member.give, 1, arguments, stream));
  RETURN_IF_ERROR(numbers_.Gather(
      rank, size_t{Arguments::kNumbers} * arguments.number_bytes, stream));
  rank.queue.MayWait();
  RETURN_IF_ERROR(LaunchKernel(member.check, 1, arguments, stream));
  const uint64_t bytes = arguments.output_rows * arguments.row_bytes;
  const uint64_t windows = (bytes + window_bytes_ - 1) / window_bytes_;
  // With the last, only pulls. A half is written to again once all have pulled from it,
  // a barrier later.
  for (uint64_t window = 0; window <= windows; ++window) {
    arguments.pushed = window < windows ? window : Arguments::kNoWindow;
    arguments.pulled = window > 0 ? window - 1 : Arguments::kNoWindow;
    const bool is_first = window == 0, is_last = window == windows;
    const uint32_t pieces =
        (is_first || is_last ? 1 : 2) * (arguments.ranks - 1) + (is_first ? 1 : 0);
    RETURN_IF_ERROR(
        LaunchKernel(member.move, pieces * arguments.lanes, arguments, stream));
    if (!is_last) RETURN_IF_ERROR(Barrier(rank.facts, stream));
  }
  member.stream = stream;
  return parts_.library.Try(parts_.library.cuda.EventRecord, member.last, stream);
}

Status DeviceSized::LaunchKernel(cuda::Function kernel, unsigned blocks,
                                 const RaggedArguments& arguments,
                                 cuda::Stream stream) const {
  void* parameters[] = {const_cast<RaggedArguments*>(&arguments)};
  return parts_.library.Try(parts_.library.cuda.LaunchKernel, kernel, blocks, 1, 1,
                            kThreads, 1, 1, 0, stream, parameters, nullptr);
}

Status DeviceSized::Barrier(const RankFacts& rank, cuda::Stream stream) const {
  const nccl::Comm comm = parts_.comms.comm(rank.place);
  if (comm == nullptr) return parts_.health.failure();
  void* const word = reinterpret_cast<void*>(arenas_->own(rank.place) +
                                             2 * window_bytes_ + kWordsBytes / 2);
  const nccl::Result result = parts_.library.nccl.AllReduce(
      word, word, 1, nccl::Type::kInt32, nccl::RedOp::kSum, comm, stream);
  return parts_.comms.Finish(result, comm, "ncclAllReduce",
                             parts_.spec.timeout_seconds);
}

// It fails the communicator by itself: the watch would name the operation that is in
// flight, which may be a later one.
Status DeviceSized::AsyncError(LocalRank& rank) {
  FailIfRefused(rank.facts);
  return OkStatus();
}

bool DeviceSized::FailIfRefused(const RankFacts& rank) {
  const RaggedRefusal* const refusal = members_[rank.place].refusal;
  if (refusal == nullptr || __atomic_load_n(&refusal->is_set, __ATOMIC_ACQUIRE) == 0) {
    return false;
  }
  const Operation& operation = OperationTable::Get().At(refusal->operation);
  parts_.health.Fail(
      {InvalidArgument(operation.name, "(", operation.operands, ") over axes ",
                       parts_.spec.axes, ", ", rank.ToString(), ": ",
                       ReasonOf(*refusal, rank.size),
                       ". On all ranks of the group every bit of its result is set"),
       /*names_a_call=*/true, /*dump=*/"error"});
  return true;
}

}  // namespace jaxcomm
