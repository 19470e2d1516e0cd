"""Model runner V2 of vLLM on a CPU: its Triton kernels run in Triton's interpreter, streams and events do nothing.

vLLM's build for CPUs has a model runner V2, but wants a Triton with a backend for CPUs, which PyPI does not have. The
interpreter runs kernels as Python code over tensors, tens of times slower and with the same results. What is replaced
here is only what cannot be there without a GPU; everything of vLLM and of the plugin runs as it is.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """Work of the CPU is done when it is asked for, in order; there is nothing to wait for."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def install() -> None:
    """For the whole process, before vLLM is imported. The process must have been started with TRITON_INTERPRET=1, which
    Triton looks at when it is imported, and much imports Triton."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 to test the model runner V2"
    from triton.backends import backends
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    store = InterpreterBuilder.create_masked_store

    def store_where(self: Any, pointers: Any, values: Any, mask: Any, policy: Any) -> Any:
        """Some of vLLM's masks are int32 in the interpreter, which it then does not take."""
        return store(self, pointers, values, TensorHandle(mask.data.astype(bool), int1), policy)

    InterpreterBuilder.create_masked_store = store_where
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    torch.cuda.Stream, torch.cuda.Event, torch.Event = Stream, Event, Event  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: Stream()  # type: ignore[assignment, return-value]
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment, return-value]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def adapt() -> None:
    """When vLLM is imported: two things that the interpreter cannot run, for each engine again."""
    import triton.language as tl
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    topk_topp_sampler.HAS_TRITON = False  # its kernel of top-k and top-p; vLLM has both in PyTorch too
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(x + 1.0))  # a function of CUDA's library
