"""`deepspeed.accelerator`: what scripts ask of the device that models compute on, a GPU or the CPU.

from unbounded.deepspeed.accelerator import get_accelerator
"""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from unbounded.native.host_memory import available_bytes
from unbounded.tiers.driver import resident_bytes


class Accelerator:
    """DeepSpeed's names for calls of `torch.cuda` and `torch.cpu`. What has the same name there is looked up there.

    On a CPU the memory of the device is that of this process.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(f"{self._module.__name__} has no attribute {name!r}") from None

    @property
    def _is_gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def _module(self) -> ModuleType:
        return torch.cuda if self._is_gpu else torch.cpu

    # -- the device ------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        name = "cuda" if self._is_gpu else "cpu"
        return name if device_index is None or not self._is_gpu else f"{name}:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._is_gpu else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return torch.cuda.device(device_index) if self._is_gpu else nullcontext()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def is_synchronized_device(self) -> bool:
        return not self._is_gpu

    def communication_backend_name(self) -> str:
        return "nccl" if self._is_gpu else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._is_gpu else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._is_gpu else tensor

    # -- random numbers: torch seeds all devices at once -----------------------------------------------------------

    def random(self) -> ModuleType:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if not self._is_gpu:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if not self._is_gpu:
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, self.current_device() if device_index is None else device_index)

    # -- memory ----------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        if self._is_gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._is_gpu else resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return torch.cuda.max_memory_allocated(device_index)
        return max(resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._is_gpu else resident_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._is_gpu else self.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return torch.cuda.mem_get_info(device_index)[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0] if self._is_gpu else available_bytes()


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator
