// Whose memory a process attaches to, and what processes must agree on first.
#include "ffi/backends/host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "ffi/core/hash.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kBytes = 4096;
constexpr uint64_t kNonce = 0x1234567890abcdef;

std::string Attach(const std::string& path) {
  const Status status = Segment::Attach({path, kBytes, kNonce}).status();
  return status.success() ? "" : status.message();
}

// Makes a file look like the segment that is announced; gone afterwards.
struct File {
  explicit File(std::string path) : path(std::move(path)) {
    const int fd = open(this->path.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK_TRUE(fd >= 0);
    CHECK_EQ(ftruncate(fd, kBytes), 0);
    CHECK_EQ(pwrite(fd, &kNonce, sizeof(kNonce), 0), 8);
    close(fd);
  }
  ~File() { unlink(path.c_str()); }
  const std::string path;
};

std::string Named(const std::string& name) {
  return StrCat("/dev/shm/jaxcomm-test-", getpid(), name);
}

TEST(both_kinds_of_segments_are_attached_to) {
  for (const bool named : {false, true}) {
    const auto made = Must(Segment::Create(kBytes, named));
    made->data()[100] = 'x';
    CHECK_EQ(Must(Segment::Attach(made->address()))->data()[100], 'x');
    SegmentAddress longer = made->address();
    longer.bytes *= 2;
    CHECK_CONTAINS(Segment::Attach(longer).status().message(), "not the segment");
    SegmentAddress other = made->address();
    ++other.nonce;
    CHECK_CONTAINS(Segment::Attach(other).status().message(), "not the segment");
  }
}

TEST(other_paths_are_refused) {
  const File elsewhere(StrCat("/tmp/jaxcomm-segment-test-", getpid()));
  CHECK_CONTAINS(Attach(elsewhere.path), "no path of shared memory");
  CHECK_CONTAINS(Attach("/dev/shm/jaxcomm-/../../.." + elsewhere.path),
                 "no path of shared memory");
  for (const char* path :
       {"", "/dev/shm/jaxcomm-", "/proc/self/fd/1", "/proc//fd/1", "/proc/1/fd/",
        "/proc/1/fd/1/", "/proc/1x/fd/1", "/dev/tty"}) {
    CHECK_CONTAINS(Attach(path), "no path of shared memory");
  }
}

TEST(links_and_files_of_other_kinds_are_refused) {
  const File file(Named("file"));
  CHECK_EQ(Attach(file.path), "");
  const std::string link = Named("link"), fifo = Named("fifo");
  CHECK_EQ(symlink(file.path.c_str(), link.c_str()), 0);
  CHECK_TRUE(!Attach(link).empty());
  CHECK_EQ(mkfifo(fifo.c_str(), 0600), 0);
  CHECK_CONTAINS(Attach(fifo), "not the segment");
  unlink(link.c_str());
  unlink(fifo.c_str());
  if (geteuid() != 0) return;  // only root gives files away
  if (chown(file.path.c_str(), 1, 1) != 0) {
    CHECK_EQ(errno, EINVAL);  // a sandbox without other users
    return;
  }
  CHECK_CONTAINS(Attach(file.path), "belongs to user 1");
}

TEST(nobody_can_change_the_size_of_anonymous_memory) {
  const auto segment = Must(Segment::Create(kBytes, false));
  const int fd = open(segment->address().path.c_str(), O_RDWR);
  CHECK_TRUE(fd >= 0);
  for (const int64_t bytes : {int64_t{0}, 2 * kBytes}) {
    CHECK_EQ(ftruncate(fd, bytes), -1);
    CHECK_EQ(errno, EPERM);
  }
  close(fd);
  // And memory whose size can be changed is not attached to.
  const int loose = memfd_create("loose", MFD_CLOEXEC);
  CHECK_EQ(ftruncate(loose, kBytes), 0);
  CHECK_EQ(pwrite(loose, &kNonce, sizeof(kNonce), 0), 8);
  CHECK_CONTAINS(Attach(StrCat("/proc/", getpid(), "/fd/", loose)), "size may change");
  close(loose);
}

TEST(the_hash_is_that_of_its_definition) {
  // Published test vectors of FNV-1a.
  CHECK_EQ(Fnv1a(""), 0xcbf29ce484222325u);
  CHECK_EQ(Fnv1a("a"), 0xaf63dc4c8601ec8cu);
  CHECK_EQ(Fnv1a("foobar"), 0x85944171f73967e8u);
}

TEST(signatures_are_the_same_for_every_standard_library) {
  const auto site = MakeSite("permute", {-1, 0}, {FloatLeaf(4)}, {FloatLeaf(4)});
  CHECK_EQ(site->signature(), Fnv1a("permute/sum/-1,0,float32[4]->float32[4]"));
}

}  // namespace
}  // namespace jaxcomm::testing
