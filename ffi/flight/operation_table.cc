#include "ffi/flight/operation_table.h"

#include "ffi/base/status.h"

namespace jaxcomm {

OperationTable& OperationTable::Get() {
  static OperationTable* const table = new OperationTable;
  return *table;
}

uint32_t OperationTable::Intern(const Operation& operation) {
  // The signature holds collective, parameters, shapes and dtypes.
  const std::string key = StrCat(operation.signature, "/", operation.name);
  MutexLock lock(mutex_);
  const auto [found, is_new] =
      index_of_.emplace(key, static_cast<uint32_t>(operations_.size()));
  if (is_new) operations_.push_back(operation);
  return found->second;
}

const Operation& OperationTable::At(uint32_t index) const {
  MutexLock lock(mutex_);
  return operations_[index];
}

}  // namespace jaxcomm
