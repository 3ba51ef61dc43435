#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/engines/symmetric_memory.h"
#include "ffi/os/start_thread.h"
#include "ffi/python/module.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

using HeldMemory = Held<SymmetricMemory>;

// The tensor that a DLPack capsule named "dltensor" points to. Made by hand, since
// nanobind's takes the GIL when it ends, in whichever of XLA's threads that is.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*deleter)(ManagedTensor*) = nullptr;

  std::shared_ptr<SymmetricMemory> memory;
  std::vector<int64_t> shape;
};

constexpr char kUnused[] = "dltensor";

// A DLPack capsule of one device's part of a block. It keeps the memory, and counts as
// a holder until the array made of it is gone.
nb::object BlockOf(const HeldMemory& held, int ordinal,
                   std::pair<int, int> dlpack_device, int64_t offset,
                   std::vector<int64_t> shape, int dtype_code, int dtype_bits) {
  std::shared_ptr<SymmetricMemory> memory = held.of;
  void* const base = memory->data(ordinal);
  if (base == nullptr) {
    throw std::runtime_error(StrCat("device ", ordinal, " has no part of it"));
  }
  auto* made = new ManagedTensor;
  made->shape = std::move(shape);
  made->tensor.data = static_cast<char*>(base) + offset;
  made->tensor.device.device_type = dlpack_device.first;
  made->tensor.device.device_id = dlpack_device.second;
  made->tensor.ndim = static_cast<int32_t>(made->shape.size());
  made->tensor.dtype = {static_cast<uint8_t>(dtype_code),
                        static_cast<uint8_t>(dtype_bits), 1};
  made->tensor.shape = made->shape.data();
  made->deleter = [](ManagedTensor* tensor) {
    tensor->memory->LetGo();
    // The last reference frees it, which waits for devices: on no thread of XLA's,
    // unless no other can be had.
    (void)StartDetached([memory = std::move(tensor->memory)] {});
    delete tensor;
  };
  memory->Hold();
  made->memory = std::move(memory);
  PyObject* const capsule = PyCapsule_New(made, kUnused, [](PyObject* of) {
    // The taker of the tensor renames the capsule.
    if (PyCapsule_IsValid(of, kUnused) == 0) return;
    auto* tensor = static_cast<ManagedTensor*>(PyCapsule_GetPointer(of, kUnused));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) {
    made->deleter(made);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

HeldMemory MakeSymmetricMemory(const std::vector<int>& ordinals, int64_t bytes) {
  const auto make = [&] {
    nb::gil_scoped_release release;
    return ValueOf(SymmetricMemory::Create(Nccl(), ordinals, bytes));
  };
  return HeldMemory(make());
}

// From: an address on the device, 0 for zeros.
void Fill(HeldMemory& memory, int ordinal, int64_t offset, uint64_t from,
          int64_t bytes) {
  nb::gil_scoped_release release;
  ThrowIfFailed(
      memory.of->Fill(ordinal, offset, reinterpret_cast<const void*>(from), bytes));
}

}  // namespace

void BindSymmetricMemory(nb::module_& m) {
  nb::class_<HeldMemory>(m, "SymmetricMemory",
                         "A segment of memory on each local device.")
      .def_prop_ro(
          "segment", [](const HeldMemory& memory) { return memory.of->segment(); },
          "Its number in this process.")
      .def_prop_ro(
          "bytes", [](const HeldMemory& memory) { return memory.of->bytes(); },
          "Its size on each device.")
      .def_prop_ro(
          "used_bytes",
          [](const HeldMemory& memory) { return memory.of->used_bytes(); },
          "What is taken of them.")
      .def_prop_ro(
          "blocks", [](const HeldMemory& memory) { return memory.of->blocks(); },
          "Parts that arrays hold.")
      .def(
          "take",
          [](HeldMemory& memory, int64_t bytes) {
            return ValueOf(memory.of->Take(bytes));
          },
          nb::arg("bytes"), "The offset of a new block.")
      .def("fill", &Fill, nb::arg("ordinal"), nb::arg("offset"), nb::arg("source"),
           nb::arg("bytes"), "Copies from an address of the device; 0 writes zeros.")
      .def(
          "reset", [](HeldMemory& memory) { ThrowIfFailed(memory.of->Reset()); },
          "Takes all blocks back; refuses while arrays hold some.")
      .def(
          "close",
          [](HeldMemory& memory) {
            nb::gil_scoped_release release;
            ThrowIfFailed(memory.of->Close());
          },
          "Deregisters and frees it; refuses while arrays hold blocks.");
  m.def("symmetric_memory", &MakeSymmetricMemory, nb::arg("ordinals"), nb::arg("bytes"),
        "Allocates so many bytes with ncclMemAlloc on each of these devices.");
  m.def("symmetric_block", &BlockOf, nb::arg("memory"), nb::arg("ordinal"),
        nb::arg("dlpack_device"), nb::arg("offset"), nb::arg("shape"),
        nb::arg("dtype_code"), nb::arg("dtype_bits"),
        "One device's part of a block, for DLPack.");
}

}  // namespace jaxcomm
