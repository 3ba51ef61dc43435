#include "tests/doubles/nccl/faults.h"

#include <signal.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {
namespace {

struct Planned {
  std::string function;
  int after;
  Fault fault;
  bool die;
};

// What stands before the separator; `*text` keeps what stands after it.
std::string CutAt(char separator, std::string* text) {
  const size_t end = text->find(separator);
  const std::string before = text->substr(0, end);
  *text = end == std::string::npos ? "" : text->substr(end + 1);
  return before;
}

class Faults {
 public:
  static Faults& Get() {
    static Faults& faults = *new Faults;
    return faults;
  }

  void Add(Planned planned) {
    std::lock_guard<std::mutex> lock(mutex_);
    planned_.push_back(std::move(planned));
  }

  Fault Take(const std::string& function) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto due = planned_.end();
    for (auto fault = planned_.begin(); fault != planned_.end(); ++fault) {
      if (fault->function != function) continue;
      if (fault->after > 0) {
        --fault->after;
      } else if (due == planned_.end()) {
        due = fault;
      }
    }
    if (due == planned_.end()) return {};
    if (due->die) raise(SIGKILL);
    const Fault fault = due->fault;
    planned_.erase(due);
    return fault;
  }

 private:
  Faults() {
    const char* const text = std::getenv("JAXCOMM_FAKE_FAULTS");
    std::string rest = text == nullptr ? "" : text;
    while (!rest.empty()) {
      std::string item = CutAt(',', &rest);
      const std::string function = CutAt(':', &item);
      const std::string after = CutAt(':', &item);
      planned_.push_back({function, std::atoi(after.c_str()),
                          Fault{std::atoi(item.c_str()), item == "hang"},
                          item == "die"});
    }
  }

  std::mutex mutex_;
  std::vector<Planned> planned_;
};

}  // namespace

Fault TakeFault(const std::string& function) { return Faults::Get().Take(function); }

}  // namespace jaxcomm::fake

void jaxcommFakeFail(const char* function, int after, int result) {
  jaxcomm::fake::Faults::Get().Add({function, after, {result, false}, false});
}

void jaxcommFakeHang(const char* function, int after) {
  jaxcomm::fake::Faults::Get().Add({function, after, {0, true}, false});
}
