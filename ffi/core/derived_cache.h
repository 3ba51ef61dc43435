// What backends derive from call sites, such as their plans.
#ifndef JAXCOMM_FFI_CORE_DERIVED_CACHE_H_
#define JAXCOMM_FFI_CORE_DERIVED_CACHE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"

namespace jaxcomm {

// One thing for each call site, made when it is first asked for. It lives as long as
// the site, and no longer than the cache, which belongs to a communicator. Not
// thread-safe: the owner has a lock.
template <typename T>
class DerivedCache {
 public:
  // Returns what make(), an ErrorOr<T>, returned for the site. An error is not kept:
  // the next call makes it again.
  template <typename Make>
  ErrorOr<const T*> Find(const CallSite& site, const Make& make) {
    const auto known = entries_.find(site.serial());
    if (known != entries_.end()) return known->second.made.get();
    ASSIGN_OR_RETURN(T made, make());
    if (entries_.size() >= most_) ForgetEnded();
    Entry& entry = entries_[site.serial()];
    entry = {site.life(), std::make_unique<const T>(std::move(made))};
    return entry.made.get();
  }

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::weak_ptr<const void> site;
    std::unique_ptr<const T> made;
  };

  // Looks through all, and so leaves room for as many again.
  void ForgetEnded() {
    for (auto it = entries_.begin(); it != entries_.end();) {
      it = it->second.site.expired() ? entries_.erase(it) : std::next(it);
    }
    most_ = std::max<size_t>(kLeast, 2 * entries_.size());
  }

  static constexpr size_t kLeast = 16;

  std::unordered_map<uint64_t, Entry> entries_;  // by serial number
  size_t most_ = kLeast;                         // before it looks for ended sites
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_DERIVED_CACHE_H_
