// A device guard and hooks for CUDA that do nothing: with them, a build of PyTorch without CUDA runs backward of tensors
// that have no memory and say that they are on a graphics card. `fake_cuda.py` compiles this and preloads it.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>

namespace {

using namespace c10;

struct Guard : impl::DeviceGuardImplInterface {
  Device zero() const { return Device(DeviceType::CUDA, 0); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return zero(); }
  Device getDevice() const override { return zero(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, zero()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, zero()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, zero()); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, zero()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  bool isStreamCapturing(const Stream&) const override { return false; }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
